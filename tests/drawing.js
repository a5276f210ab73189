// The first screen of a page, as wide as its drawings: two thirds as high as wide.
() => {
  const shown = [...document.querySelectorAll("svg, canvas, img, table, .beside, .duo, .places, .first")].filter(e => e.checkVisibility());
  let boxes = shown.map(e => e.getBoundingClientRect()).filter(b => b.width >= 60 && b.height >= 36);
  if (!boxes.length) boxes = [document.body.getBoundingClientRect()];
  const top = Math.min(...boxes.map(b => b.top)), row = boxes.filter(b => b.top < top + 200);
  const x = Math.max(0, Math.min(...row.map(b => b.left)) - 24);
  const right = Math.min(innerWidth, Math.max(...row.map(b => b.right)) + 12);
  const width = Math.max(540, right - x);
  return {x, y: 0, width, height: width * 2 / 3};
}
