// A text shaded by the values of one atom, beside a table of every atom at every token.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);
const [layers, atoms] = [find("layer"), find("atom")], heads = [...document.querySelectorAll(".values thead th + th > span")];
const digits = value => `${+value.toPrecision(2)}`;

for (const [menu, names, first] of [[layers, data.layers, data.first[0]], [atoms, data.atoms, data.first[1]]]) {
  names.forEach((name, place) => menu.add(new Option(name, place)));
  menu.value = first;
  menu.addEventListener("input", show);
}
const words = data.tokens.map((token, place) => {
  const word = document.createElement("span");
  word.textContent = token;
  word.tabIndex = 0;
  for (const kind of ["pointerenter", "focus"]) word.addEventListener(kind, () => say(place));
  find("text").append(word);
  return word;
});
heads.forEach((head, place) => {
  head.tabIndex = 0;
  head.setAttribute("role", "button");
  head.addEventListener("click", () => { atoms.value = place; show(); });
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
  find("which").textContent = `L${data.layers[layers.value]}A${data.atoms[atoms.value]}`;
  find("of").textContent = data.layers[layers.value];
  find("most").textContent = `${+most.toPrecision(3)}`;
  words.forEach((word, place) => shade(word, now[place], top));
  [...find("rows").rows].forEach((row, place) => heads.forEach((head, column) => {
    const cell = row.cells[column + 1], value = layer[column][place];
    shade(cell, value, most);
    cell.textContent = value ? digits(value) : "";
  }));
  heads.forEach((head, place) => head.setAttribute("aria-pressed", String(place === +atoms.value)));
  const on = now.filter(value => value).length;
  if (on) say(now.map(Math.abs).indexOf(top));
  find("live").textContent = on ? `On at ${on} of ${now.length} tokens. ${find("live").textContent}` : "Off at every token of this text.";
}
find("signed").hidden = !data.values.flat(2).some(value => value < 0);
show();
