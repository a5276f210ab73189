// The first screen of a page: two thirds as high as it is wide.
() => {
  const page = document.querySelector("main").getBoundingClientRect();
  const x = Math.max(0, page.left - 16), width = Math.min(innerWidth, page.right + 16) - x;
  return {x, y: 0, width, height: width * 2 / 3};
}
