// A text shaded by the values of one atom, beside a table of every atom at every token.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);
const [layers, atoms] = [find("layer"), find("atom")], heads = [...document.querySelectorAll(".values thead th + th > span")];
const digits = (value, most) => most > .1 && Math.abs(value) < .01 ? `${value < 0 ? "\u2212" : ""}<0.01` : `${+value.toPrecision(2)}`;

for (const [menu, names, first] of [[layers, data.layers, data.first[0]], [atoms, data.atoms, data.first[1]]]) {
  names.forEach((name, place) => menu.add(new Option(name, place)));
  menu.value = first;
  menu.addEventListener("input", show);
}
// circuitsvis writes white text on colours that are too light for white
function readable() {
  for (const part of find("text").querySelectorAll("span[style]")) {
    const found = part.style.backgroundColor.match(/[\d.]+/g);
    if (!found) continue;
    const [r, g, b] = found.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    const ink = .2126 * r + .7152 * g + .0722 * b > .179 ? "rgb(0, 0, 0)" : "rgb(255, 255, 255)";
    if (part.style.color !== ink) part.style.color = ink;
  }
}
new MutationObserver(readable).observe(find("text"), {subtree: true, childList: true, attributes: true, attributeFilter: ["style"]});

function shadeText(values, most) {
  const view = document.createElement("div");
  view.id = "view";
  find("text").replaceChildren(view);
  const colours = {minValue: -most, maxValue: most, negativeColor: "#c8702c", positiveColor: "#1f66a3"};
  CircuitsVis.render("view", CircuitsVis.ColoredTokens, {tokens: data.tokens, values, ...colours});
}

let columns = []; // the atoms of the table, the largest of the layer first
heads.forEach((head, place) => {
  head.tabIndex = 0;
  head.setAttribute("role", "button");
  head.addEventListener("click", () => { atoms.value = columns[place]; show(); });
  head.addEventListener("keydown", event => { if (event.key === "Enter") head.click(); });
});

function say(place) {
  find("live").textContent = `${find("which").textContent} at ${data.names[place]}: ${data.values[layers.value][atoms.value][place]}.`;
}

function shade(cell, value, most) {
  cell.style.setProperty("--share", (Math.abs(value) / most).toFixed(3));
  cell.classList.toggle("minus", value < 0);
}

function show() {
  const layer = data.values[layers.value], now = layer[atoms.value];
  const largest = lines => lines.flat().reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  const most = largest(layer), top = largest(now);
  const tops = layer.map(line => Math.max(...line.map(Math.abs)));
  columns = tops.map((_, atom) => atom).sort((a, b) => tops[b] - tops[a]).slice(0, heads.length);
  heads.forEach((head, place) => { head.textContent = data.atoms[columns[place]]; });
  find("which").textContent = `L${data.layers[layers.value]}A${data.atoms[atoms.value]}`;
  find("of").textContent = data.layers[layers.value];
  find("most").textContent = `${+most.toPrecision(3)}`;
  shadeText(now, top);
  [...find("rows").rows].forEach((row, place) => heads.forEach((head, column) => {
    const cell = row.cells[column + 1], value = layer[columns[column]][place];
    shade(cell, value, most);
    cell.textContent = value ? digits(value, most) : "";
  }));
  heads.forEach((head, place) => head.setAttribute("aria-pressed", String(columns[place] === +atoms.value)));
  const on = now.filter(value => value > 0).length;
  if (on) say(now.map(Math.abs).indexOf(top));
  find("live").textContent = on ? `On at ${on === now.length ? `all ${on}` : `${on} of ${now.length}`} tokens. ${find("live").textContent}` : "Off at every token of this text.";
}
find("signed").hidden = !data.values.flat(2).some(value => value < 0);
show();
