// The tokens at which each atom of a layer is on in a sample, the largest value first.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);
const made = (tag, words, parent) => {
  const element = document.createElement(tag);
  element.textContent = words;
  parent.append(element);
  return element;
};

function menu(id, names, first) {
  const select = find(id);
  if (!select) return () => first;
  names.forEach((name, place) => select.add(new Option(name, place)));
  select.value = first;
  select.addEventListener("input", show);
  return () => +select.value;
}
const sample = menu("sample", data.tokens.map((_, place) => `sample ${place}`), data.first[0]), layer = menu("layer", data.layers, data.first[1]);

const MOST = 12; // atoms that stand in the table at first
let every = false;
find("more").addEventListener("click", () => { every = !every; show(); });

function show() {
  const values = data.values[sample()][layer()], places = data.ranked[sample()][layer()], off = [];
  const tops = values.map(line => Math.max(...line.map(Math.abs))), order = [];
  tops.forEach((top, atom) => { if (top) order.push(atom); else off.push(data.atoms[atom]); });
  order.sort((a, b) => tops[b] - tops[a]);
  find("rows").replaceChildren();
  find("more").hidden = order.length <= MOST;
  find("more").textContent = every ? `Only the ${MOST} largest` : `All ${order.length} ${data.word}s that are on`;
  order.slice(0, every ? order.length : MOST).forEach(atom => {
    const line = values[atom];
    const row = made("tr", "", find("rows"));
    made("th", `${data.word} ${data.atoms[atom]}`, row).scope = "row";
    const cell = made("td", "", row);
    line.forEach((value, rank) => {
      if (rank === data.count && data.tokens[sample()].length > 2 * data.count) made("small", "\u2026", cell);
      if (!value) return;
      const chip = made("span", "", cell);
      chip.style.setProperty("--share", (Math.abs(value) / data.most).toFixed(3));
      chip.classList.toggle("minus", value < 0);
      made("code", data.tokens[sample()][places[atom][rank]], chip);
      chip.append(data.most > .1 && Math.abs(value) < .01 ? ` ${value < 0 ? "\u2212" : ""}<0.01` : ` ${+value.toPrecision(2)}`);
    });
  });
  find("off").textContent = !off.length ? "" : off.length > MOST ? `${off.length} ${data.word}s are off at every token.` : `Off at every token: ${off.join(", ")}.`;
}
find("signed").hidden = !data.values.flat(3).some(value => value < 0);
show();
