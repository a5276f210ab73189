"use strict";
// Where nodes stand: in a table of tokens and layers, or on a leaning picture for each layer.

const byId = id => document.getElementById(id);
const make = (name, values, ...inside) => {
  const made = Object.assign(document.createElement(name), values);
  made.append(...inside);
  return made;
};
const data = JSON.parse(document.getElementById("data").textContent);
const drawn = data.nodes.filter(node => node.kind !== "bias");
// What a node adds to the answer: by a real forward without it, or its slope where there is none.
const amount = node => node.effect ?? node.attribution;
const largest = Math.max(...drawn.filter(node => node.kind === "code")
  .map(node => Math.abs(amount(node))), 1e-30);
const STEP = 14;

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
function inTable(room, shown) {
  const small = room < 520, apart = small ? STEP : 17;
  const cells = new Map();
  const place = Math.max(...shown.map(node => node.pos));
  for (const node of shown) {
    const key = `${node.layer} ${node.kind === "target" ? place : node.pos}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(node);
  }
  const tokens = [...new Set(shown.map(node => node.pos))].filter(pos => pos >= 0).sort((a, b) => a - b);
  const most = tokens.length < 8 ? 9 : small ? 5 : 6; // nodes in a line of a cell
  const across = pos => Math.max(1, ...[...cells].filter(([key]) => +key.split(" ")[1] === pos)
    .map(([, nodes]) => Math.min(most, Math.ceil(Math.sqrt(2.5 * nodes.length)))));
  const spots = new Map(), words = [], lines = [];
  const left = new Map(), wide = new Map();
  let x = small ? 36 : 52;
  for (const pos of tokens) {
    wide.set(pos, across(pos));
    left.set(pos, x);
    x += Math.max(wide.get(pos) * apart, Math.min(12, tokenName(pos).length) * 7.2) + (small ? 4 : 7);
  }
  let y = 12;
  for (let layer = data.layers; layer >= -1; layer--) {
    const own = tokens.map(pos => [pos, cells.get(`${layer} ${pos}`) ?? []]);
    const rows = Math.max(1, ...own.map(([pos, nodes]) => Math.ceil(nodes.length / wide.get(pos))));
    words.push({x: 0, y: y + rows * apart / 2 + 4, quiet: true,
      words: layer === data.layers ? `answer ${data.answer.slice(0, 24)}` : layer < 0 ? "input" : `L${layer}`});
    for (const [pos, nodes] of own)
      nodes.forEach((node, i) => spots.set(node, {
        x: left.get(pos) + apart * (i % wide.get(pos) + .5), y: y + apart * (Math.floor(i / wide.get(pos)) + .5)}));
    y += rows * apart + 9;
    lines.push({x1: 0, x2: x, y1: y, y2: y});
    y += 9;
  }
  for (const pos of tokens) words.push({x: left.get(pos), y: y + 8, words: tokenName(pos)});
  for (const pos of tokens) words.push({x: left.get(pos), y: y + 22, words: String(pos), quiet: true});
  return {spots, words, lines, sheets: [], plates: [], tile: [[6, 0], [0, 6]], width: x + 4, height: y + 30};
}

// Nodes on a leaning sheet for each layer, the input at the bottom, the answer on top, CLS beside it.
// A patch is above itself in all layers. `tile` has the sides of a patch, from its middle.
function onSheets(room, shown) {
  const [rows, columns] = data.grid, strip = !data.special ? 60 : room < 520 ? 92 : 170;
  const lean = .23 * (room - strip), across = room - strip - lean - 4;
  const step = Math.max(60, Math.min(100, 560 / (data.layers + 1))), deep = .8 * step, input = 1.7 * deep;
  const spots = new Map(), words = [], sheets = [], plates = [];
  const perLine = Math.floor((strip - 20) / STEP);
  for (let layer = -1; layer < data.layers; layer++) {
    const y = 44 + (data.layers - 1 - layer) * step, high = layer < 0 ? input : deep;
    const place = (u, v) => ({x: strip + lean * (1 - v) + across * u, y: y + high * v});
    const nodes = shown.filter(node => node.layer === layer), beside = nodes.filter(node => node.pos < data.special);
    sheets.push({layer, matrix: [across / columns, 0, -lean / rows, high / rows, strip + lean, y],
      shades: data.places[layer + 1].slice(data.special)});
    words.push({x: strip, y: y + 11, quiet: true, words: layer < 0 ? "input" : `layer ${layer}`});
    const lines = Math.ceil(beside.length / perLine), apart = Math.min(STEP, (step - 22) / Math.max(1, lines - 1));
    const top = y + (deep - apart * (lines - 1)) / 2; // of what stands beside the sheet
    if (lines && layer < 0) words.push({x: 2, y: top + 26, quiet: true, words: "CLS"});
    if (lines) plates.push({x: 1, y: top - 10, width: strip - 12, height: apart * (lines - 1) + 20, rx: 6});
    beside.forEach((node, i) => spots.set(node, {x: 12 + STEP * (i % perLine), y: top + apart * Math.floor(i / perLine)}));
    const placed = [];
    for (const node of nodes.filter(node => node.pos >= data.special)) {
      const patch = node.pos - data.special, middle = place((patch % columns + .5) / columns, (Math.floor(patch / columns) + .5) / rows);
      let turn = 0, spot = middle; // codes of a layer go around until no other is below them
      while (node.kind === "code" && turn < 400 && placed.some(other => Math.hypot(other.x - spot.x, other.y - spot.y) < 9)) {
        turn++;
        spot = {x: middle.x + 5 * Math.sqrt(turn) * Math.cos(2.4 * turn), y: middle.y + 4 * Math.sqrt(turn) * Math.sin(2.4 * turn)};
      }
      placed.push(spot);
      spots.set(node, spot);
    }
  }
  const target = shown.find(node => node.kind === "target");
  spots.set(target, {x: 16, y: 18});
  words.push({x: 32, y: 22, words: data.answer.slice(0, 40)});
  return {spots, words, sheets, plates, lines: [], width: room, height: 48 + data.layers * step + input,
    tile: [[across / columns / 2, 0], [-lean / rows / 2, input / rows / 2]]};
}
