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

function values() {
  return data.values[+layers.value][+atoms.value];
}

function say(place) {
  find("live").textContent = `L${data.layers[layers.value]}A${data.atoms[atoms.value]} at ${data.names[place]}: ${values()[place]}.`;
}

function show() {
  const now = values(), most = Math.max(...now.map(Math.abs)) || 1;
  const picture = over.style.backgroundImage ? "transparent" : "var(--card)";
  now.forEach((value, place) => {
    const ink = value < 0 ? "var(--other)" : "var(--accent)";
    const [deepest, ground] = place < before ? [45, "var(--card)"] : [85, picture]; // CLS is a word
    cells[place].style.background =
      `color-mix(in srgb, ${ink} ${Math.round(deepest * Math.abs(value) / most)}%, ${ground})`;
  });
  say(now.indexOf(Math.max(...now)));
}
show();
