"use strict";
// Where nodes stand: in a table of tokens and layers, or on the patches of a picture for each layer.

const data = JSON.parse(document.getElementById("data").textContent);
const drawn = data.nodes.filter(node => node.kind !== "bias");
// What a node adds to the answer: by a real forward without it, or its slope where there is none.
const amount = node => node.effect ?? node.attribution;
const largest = Math.max(...drawn.filter(node => node.kind === "code")
  .map(node => Math.abs(amount(node))), 1e-30);
const STEP = 14, LABEL = 44;

const radius = node => node.kind === "target" ? 9
  : 2.5 + 4.5 * Math.sqrt(Math.min(1, Math.abs(amount(node)) / largest));

function tokenName(pos) {
  if (data.grid === null) {
    const words = (data.tokens[pos] ?? String(pos)).replaceAll("\n", "\u21b5").replaceAll(" ", "\u00b7");
    return words.length > 12 ? `${words.slice(0, 11)}\u2026` : words;
  }
  if (pos < data.special) return "CLS";
  const patch = pos - data.special;
  return `patch (${Math.floor(patch / data.grid[1])}, ${patch % data.grid[1]})`;
}

// Nodes in cells of tokens and layers: {x, y} of each node, words and lines, width and height.
function inTable() {
  const cells = new Map(), target = drawn.find(node => node.kind === "target");
  const place = Math.max(...drawn.map(node => node.pos));
  for (const node of drawn) {
    const key = `${node.layer} ${node.kind === "target" ? place : node.pos}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(node);
  }
  const tokens = [...new Set(drawn.map(node => node.pos))].filter(pos => pos >= 0).sort((a, b) => a - b);
  const across = pos => Math.max(1, ...[...cells].filter(([key]) => +key.split(" ")[1] === pos)
    .map(([, nodes]) => Math.min(8, Math.ceil(Math.sqrt(2.5 * nodes.length)))));
  const spots = new Map(), words = [], lines = [];
  const left = new Map(), wide = new Map();
  let x = LABEL + 8;
  for (const pos of tokens) {
    wide.set(pos, across(pos));
    left.set(pos, x);
    x += Math.max(wide.get(pos) * STEP, Math.min(12, tokenName(pos).length) * 7.2) + 12;
  }
  let y = 12;
  for (let layer = data.layers; layer >= -1; layer--) {
    const own = tokens.map(pos => [pos, cells.get(`${layer} ${pos}`) ?? []]);
    const rows = Math.max(1, ...own.map(([pos, nodes]) => Math.ceil(nodes.length / wide.get(pos))));
    words.push({x: 0, y: y + rows * STEP / 2 + 4, quiet: true,
      words: layer === data.layers ? "answer" : layer < 0 ? "input" : `L${layer}`});
    for (const [pos, nodes] of own)
      nodes.forEach((node, i) => spots.set(node, {
        x: left.get(pos) + STEP * (i % wide.get(pos) + .5), y: y + STEP * (Math.floor(i / wide.get(pos)) + .5)}));
    y += rows * STEP + 9;
    lines.push({x1: 0, x2: x, y1: y, y2: y});
    y += 9;
  }
  for (const pos of tokens) words.push({x: left.get(pos), y: y + 8, words: tokenName(pos)});
  for (const pos of tokens) words.push({x: left.get(pos), y: y + 22, words: String(pos), quiet: true});
  return {spots, words, lines, pictures: [], shades: [], width: x + 4, height: y + 30, target};
}

// Nodes on the patches of a picture for each layer, the answer last.
function onPictures(room) {
  const [rows, columns] = data.grid, each = Math.max(2, Math.min(4, Math.floor(room / 210)));
  const side = Math.min(260, (room - 12 * each) / each), high = side * rows / columns;
  const spots = new Map(), words = [], pictures = [], shades = [];
  const strip = Math.max(1, ...Array.from({length: data.layers + 1}, (_, i) =>
    drawn.filter(node => node.layer === i - 1 && node.pos >= 0 && node.pos < data.special).length));
  const perLine = Math.max(1, Math.floor((side - 40) / STEP));
  const below = data.special ? Math.ceil(strip / perLine) * STEP + 6 : 0;
  const panel = high + below + 34;
  for (let place = 0; place <= data.layers + 1; place++) {
    const layer = place - 1, x = (place % each) * (side + 12), y = Math.floor(place / each) * panel;
    const nodes = drawn.filter(node => node.layer === layer);
    words.push({x, y: y + 14, quiet: true, words: layer === data.layers ? "answer"
      : layer < 0 ? "input" : `layer ${layer}`});
    if (layer === data.layers) {
      spots.set(nodes[0], {x: x + 14, y: y + 40});
      words.push({x: x + 30, y: y + 44, words: data.answer.slice(0, 28)});
      continue;
    }
    pictures.push({x, y: y + 20, width: side, height: high});
    data.places[place].slice(data.special).forEach((share, patch) => shades.push({share,
      x: x + side / columns * (patch % columns), y: y + 20 + high / rows * Math.floor(patch / columns),
      width: side / columns, height: high / rows}));
    const here = new Map();
    let special = 0;
    for (const node of nodes) {
      if (node.pos < data.special) {
        spots.set(node, {x: x + 36 + STEP * (special % perLine + .5),
          y: y + high + 30 + STEP * Math.floor(special / perLine)});
        special++;
        continue;
      }
      const patch = node.pos - data.special, count = here.get(patch) ?? 0;
      here.set(patch, count + 1);
      const turn = count * 2.4, away = 10 * Math.sqrt(count);
      spots.set(node, {x: x + side / columns * (patch % columns + .5) + away * Math.cos(turn),
        y: y + 20 + high / rows * (Math.floor(patch / columns) + .5) + away * Math.sin(turn)});
    }
    if (special) words.push({x, y: y + high + 34, words: "CLS"});
  }
  const lines = Math.ceil((data.layers + 2) / each);
  return {spots, words, lines: [], pictures, shades, width: room, height: lines * panel};
}
