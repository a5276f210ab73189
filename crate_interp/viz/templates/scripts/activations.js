// The values of one atom over an image: a cell for each patch, and CLS beside the menus.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);
const over = find("over"), [layers, atoms] = [find("layer"), find("atom")];
const before = data.names.length - data.grid[0] * data.grid[1];  // tokens that are no patch

for (const [menu, names, first] of [[layers, data.layers, data.first[0]], [atoms, data.atoms, data.first[1]]]) {
  names.forEach((name, place) => menu.add(new Option(name, place)));
  menu.value = first;
  menu.addEventListener("input", show);
}
over.style.gridTemplateColumns = `repeat(${data.grid[1]}, 1fr)`;
const cells = data.names.map((name, place) => {
  const cell = place < before ? find("cls") : document.createElement("span");
  cell.tabIndex = place < before ? -1 : 0;
  for (const kind of ["pointerenter", "focus"]) cell.addEventListener(kind, () => say(place));
  if (place >= before) over.append(cell);
  return cell;
});

const MOST = 24, each = find("each");  // small maps of atoms that are shown at once
let order = []; // the atoms of the small maps, the largest of the layer first
const maps = data.atoms.slice(0, MOST).map((_, place) => {
  const button = document.createElement("button"), map = document.createElement("canvas"), name = document.createElement("b"), words = document.createElement("small");
  button.type = "button";
  map.style.backgroundImage = over.style.backgroundImage;
  button.append(map, name, words);
  button.addEventListener("click", () => { atoms.value = order[place]; show(); });
  each.append(button);
  return [button, map, name, words];
});
const veil = (value, most) => over.style.backgroundImage && value >= 0
  ? `rgb(0 0 0 / ${84 * (1 - value / most)}%)` : `rgb(${value < 0 ? "226 112 40" : "58 134 200"} / ${100 * Math.abs(value) / most}%)`;

function draw(map, now, most) {
  const pen = map.getContext("2d");
  [map.height, map.width] = data.grid;
  now.slice(before).forEach((value, patch) => {
    pen.fillStyle = veil(value, most);
    pen.fillRect(patch % map.width, Math.floor(patch / map.width), 1, 1);
  });
}

// CLS may be far above all patches, which would leave their map black
const mostOf = now => Math.max(...now.slice(before).map(Math.abs)) || 1;

function values() {
  return data.values[+layers.value][+atoms.value];
}

function say(place) {
  find("live").textContent = `L${data.layers[layers.value]}A${data.atoms[atoms.value]} at ${data.names[place]}: ${values()[place]}.`;
}

function show() {
  const now = values(), most = mostOf(now);
  now.forEach((value, place) => {
    const ink = value < 0 ? "var(--other)" : "var(--accent)";
    cells[place].style.background = place >= before ? veil(value, most)
      : `color-mix(in srgb, ${ink} ${Math.round(45 * Math.min(1, Math.abs(value) / most))}%, var(--card))`;
  });
  const tops = data.values[+layers.value].map(row => row.some(value => value) ? mostOf(row) : 0);
  order = tops.map((_, atom) => atom).sort((a, b) => tops[b] - tops[a]);
  maps.forEach(([button, map, name, words], place) => {
    const top = tops[order[place]], chosen = order[place] === +atoms.value;
    draw(map, data.values[+layers.value][order[place]], mostOf(data.values[+layers.value][order[place]]));
    name.textContent = data.atoms[order[place]];
    words.textContent = `${+top.toPrecision(3)}`;
    button.hidden = !top && !chosen;
    button.setAttribute("aria-pressed", String(chosen));
  });
  const off = data.atoms.filter((name, place) => !tops[place]), on = now.filter(value => value).length;
  find("off").textContent = !off.length ? "" : off.length > MOST ? `${off.length} are off everywhere in this layer.` : `Off everywhere in this layer: ${off.join(", ")}.`;
  say(now.indexOf(Math.max(...now)));
  find("live").textContent = `On at ${on === now.length ? `all ${on} tokens: the picture says where it is more, not where it is on` : `${on} of ${now.length} tokens`}. Largest: ${find("live").textContent}`;
}
find("signed").hidden = !data.values.flat(2).some(value => value < 0);
show();
