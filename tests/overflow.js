// What sticks out to the right of the window, unless something that scrolls holds it.
() => {
  const width = window.innerWidth, wrong = [];
  const held = element => {
    for (let outer = element.parentElement; outer; outer = outer.parentElement)
      if (outer !== document.body && outer !== document.documentElement
          && getComputedStyle(outer).overflowX !== 'visible') return true;
    return false;
  };
  if (document.scrollingElement.scrollWidth > width)
    wrong.push(`the page is ${document.scrollingElement.scrollWidth} px wide, the window ${width}`);
  for (const element of document.body.querySelectorAll('*')) {
    const box = element.getBoundingClientRect();
    if (box.width > 1 && box.right > width + 1 && element.checkVisibility() && !held(element))
      wrong.push(`${element.tagName.toLowerCase()}.${element.getAttribute('class') ?? ''} `
        + `reaches ${Math.round(box.right)} px`);
  }
  return wrong.slice(0, 8);
}
