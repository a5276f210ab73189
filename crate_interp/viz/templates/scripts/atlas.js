// What both kinds of pages of an atlas draw: patches, contexts and effects.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function made(tag, kind, words) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (words !== undefined) element.textContent = words;
  return element;
}

const signed = value => (value > 0 ? "+" : "") + String(Number(value.toPrecision(2))).replace("-", "\u2212");
const minus = words => words.replace(/(?<=[ (])-(?=[\d.])/g, "\u2212");
const share = value => value && value < .0005 ? "<0.1 %" : `${(100 * value).toFixed(value < .0995 ? 1 : 0)} %`;

function interval(effect, low, high) {
  if (low === null && high === null) return signed(effect);
  return `${signed(effect)} (${low === null ? "-\u221e" : signed(low)} to `
    + `${high === null ? "\u221e" : signed(high)})`;
}

// a patch with the patches around it, cut from the image by its style; CLS is the entire image
function patch(sample, token) {
  const element = made("i", token ? "" : "cls"), [rows, columns] = data.grid;
  element.style.backgroundImage = `url("images/${+sample}.webp")`;
  if (!token) return element;
  const row = Math.floor((token - 1) / columns), column = (token - 1) % columns;
  element.style.backgroundSize = `${columns / 3 * 100}% ${rows / 3 * 100}%`;
  element.style.backgroundPosition =
    [column, row].map(place => `calc(var(--side) * ${(1 - place) / 3})`).join(" ");
  return element;
}

function context([before, at, after], most = 1) {
  const line = made("span", "line", before), mark = made("mark", "", at);
  mark.style.setProperty("--share", most);
  line.append(mark, after);
  return line;
}
