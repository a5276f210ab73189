"use strict";
// Saves a picture of a page as a file: a drawing as SVG or PNG, a map over its picture as PNG.

function saveFile(url, name) {
  const link = document.createElement("a");
  Object.assign(link, {href: url, download: name});
  link.click();
}

// A copy of a drawing that looks the same outside the page: its styles stand in it.
function drawingText(svg) {
  const copy = svg.cloneNode(true), parts = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((part, number) => {
    const style = getComputedStyle(parts[number]);
    for (const name of ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "opacity",
      "font-family", "font-size", "font-weight"]) part.style.setProperty(name, style.getPropertyValue(name));
  });
  copy.style.background = getComputedStyle(svg.parentElement).backgroundColor;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

function saveDrawing(svg, name, asPng) {
  const url = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawingText(svg))}`;
  if (!asPng) return saveFile(url, `${name}.svg`);
  const box = svg.getBoundingClientRect(), image = new Image();
  image.onload = () => saveCanvas(2 * box.width, 2 * box.height, context =>
    context.drawImage(image, 0, 0, 2 * box.width, 2 * box.height), `${name}.png`);
  image.src = url;
}

function saveCanvas(width, height, paint, name) {
  const canvas = Object.assign(document.createElement("canvas"), {width, height});
  paint(canvas.getContext("2d"));
  saveFile(canvas.toDataURL("image/png"), name);
}
