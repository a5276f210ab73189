"use strict";
// Where nodes stand: in a table of tokens and layers, or in rows of layers, on leaning pictures.

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
const APART = 18; // between two nodes beside a sheet, and at least that in a table
const largestFirst = nodes => [...nodes].sort((a, b) => Math.abs(amount(b)) - Math.abs(amount(a)));
const answerWords = most => `${data.answer.slice(0, most)} ${data.target.toFixed(2)}`.replace("-", "\u2212");

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

// Nodes in cells of tokens and layers, as far apart as there is room for.
function inTable(room, shown) {
  const plans = [48, 40, 34, 28, 24].map(apart => () => tableOf(room, shown, apart));
  for (const plan of plans) if (plan().width <= room) return plan();
  return tableOf(room, shown, room < 520 ? 22 : APART);
}

// {x, y} of each node, words and lines, width and height.
function tableOf(room, shown, apart) {
  const small = room < 520, deep = Math.min(apart, 30); // between two lines of a cell
  const inset = apart / 2 - 7; // a token's words begin below its first node
  const cells = new Map();
  const there = shown.some(node => node.kind !== "target" && node.pos === data.position);
  const place = there ? data.position : Math.max(...shown.map(node => node.pos));
  for (const node of shown) {
    const key = `${node.layer} ${node.kind === "target" ? place : node.pos}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(node);
  }
  const tokens = [...new Set(shown.map(node => node.pos))].filter(pos => pos >= 0).sort((a, b) => a - b);
  const most = small ? 4 : tokens.length < 8 ? 9 : 6; // nodes in a line of a cell
  const across = pos => Math.max(1, ...[...cells].filter(([key]) => +key.split(" ")[1] === pos)
    .map(([, nodes]) => Math.min(most, Math.ceil(Math.sqrt((small ? 1 : 2.5) * nodes.length)))));
  const spots = new Map(), words = [], lines = [];
  const left = new Map(), wide = new Map();
  let x = small ? 36 : 52;
  for (const pos of tokens) {
    wide.set(pos, across(pos));
    left.set(pos, x);
    x += Math.max(wide.get(pos) * apart, inset + Math.min(12, tokenName(pos).length) * 7.2) + (small ? 4 : 7);
  }
  let y = 12;
  for (let layer = data.layers; layer >= -1; layer--) {
    const own = tokens.map(pos => [pos, largestFirst(cells.get(`${layer} ${pos}`) ?? [])]);
    const rows = Math.max(1, ...own.map(([pos, nodes]) => Math.ceil(nodes.length / wide.get(pos))));
    words.push({x: 0, y: y + rows * deep / 2 + 4, quiet: true,
      words: layer === data.layers ? `answer ${answerWords(24)}` : layer < 0 ? "input" : `${small ? "L" : "layer "}${layer}`});
    for (const [pos, nodes] of own)
      nodes.forEach((node, i) => spots.set(node, {
        x: left.get(pos) + apart * (i % wide.get(pos) + .5), y: y + deep * (Math.floor(i / wide.get(pos)) + .5)}));
    y += rows * deep + 9;
    lines.push({x1: 0, x2: x, y1: y, y2: y});
    y += 9;
  }
  for (const pos of tokens) words.push({x: left.get(pos) + inset, y: y + 8, words: tokenName(pos)});
  for (const pos of tokens) words.push({x: left.get(pos) + inset, y: y + 22, words: String(pos), quiet: true});
  return {spots, words, lines, sheets: [], plates: [], tile: [[6, 0], [0, 6]], width: x + 4, height: y + 30};
}

// From which layer on all nodes stand beside the sheets, or null.
function throughSpecial(shown) {
  if (data.grid === null || !data.special) return null;
  const codes = shown.filter(node => node.kind === "code");
  const first = 1 + Math.max(-1, ...codes.filter(node => node.pos >= data.special).map(node => node.layer));
  return codes.some(node => node.layer >= first) ? first : null;
}

// The answer on top, a row for each layer, the input at the bottom. Codes of CLS stand in a box; codes
// of patches stand on a leaning sheet, a patch above itself in all layers. A layer without codes of
// patches has no sheet. `tile` has the sides of a patch, from its middle.
function onSheets(room, shown) {
  const [rows, columns] = data.grid, small = room < 520, margin = small ? 46 : 58;
  const strip = !data.special ? margin : small ? 104 : 190; // the sheets begin to the right of it
  const lean = (small ? .055 : .2) * (room - strip), across = room - strip - lean - 4;
  const spots = new Map(), words = [], sheets = [], plates = [], levels = [];
  for (let layer = data.layers - 1; layer >= -1; layer--) {
    const nodes = shown.filter(node => node.layer === layer), beside = largestFirst(nodes.filter(node => node.pos < data.special));
    const over = nodes.filter(node => node.pos >= data.special), flat = layer >= 0 && !over.length;
    const wide = (flat ? room - 4 : strip - 8) - margin; // of the box
    const perLine = Math.max(1, Math.floor((wide - 6) / APART)), lines = Math.ceil(beside.length / perLine);
    levels.push({layer, beside, over, flat, wide, lines, least: flat && !lines ? 22 : APART * lines + 34});
  }
  const flats = levels.filter(level => level.flat), full = levels.length - 1 - flats.length;
  const left = (small ? 640 : 610) - flats.reduce((sum, level) => sum + level.least, 0);
  const step = Math.max(60, Math.min(150, left / (full + 1.6))), input = (small ? 2.85 : 2) * .8 * step;
  let y = 44;
  for (const {layer, beside, over, flat, wide, lines, least} of levels) {
    const whole = flat ? least : Math.max(least, layer < 0 ? input : step), high = flat ? least : layer < 0 ? input : .8 * step;
    const middle = y + high / 2, first = middle - APART * (lines - 1) / 2, each = Math.ceil(beside.length / Math.max(1, lines));
    const place = (u, v) => ({x: strip + lean * (1 - v) + across * u, y: y + high * v});
    words.push({x: 2, y: middle + (lines ? -3 : 4), quiet: true, words: layer < 0 ? "input" : `layer ${layer}`});
    if (lines) words.push({x: 2, y: middle + 11, quiet: true, words: "at CLS"});
    if (!flat) sheets.push({layer, matrix: [across / columns, 0, -lean / rows, high / rows, strip + lean, y],
      shades: data.places[layer + 1].slice(data.special)});
    if (lines) plates.push({x: margin, y: first - 10, width: flat ? wide : Math.max(20, wide), height: APART * (lines - 1) + 20, rx: 6});
    const apart = Math.max(APART, Math.min(small ? 30 : 96, (wide - 28) / Math.max(1, each - 1)));
    beside.forEach((node, i) => spots.set(node, {x: margin + 16 + apart * (i % each), y: first + APART * Math.floor(i / each)}));
    const placed = [], clear = Math.min(16, Math.sqrt(.4 * across * high / Math.max(1, over.length)));
    for (const node of over) {
      const patch = node.pos - data.special, home = place((patch % columns + .5) / columns, (Math.floor(patch / columns) + .5) / rows);
      const taken = spot => spot.y < y || spot.y > y + high || placed.some(other => Math.hypot(other.x - spot.x, other.y - spot.y) < clear);
      let turn = 0, spot = home; // codes of a layer go around until no other is near them
      while (node.kind === "code" && turn < 600 && taken(spot)) {
        turn++;
        spot = {x: home.x + 5 * Math.sqrt(turn) * Math.cos(2.4 * turn), y: home.y + 4 * Math.sqrt(turn) * Math.sin(2.4 * turn)};
      }
      placed.push(spot);
      spots.set(node, spot);
    }
    y += layer < 0 ? Math.max(input, least) : whole;
  }
  const target = shown.find(node => node.kind === "target");
  spots.set(target, {x: margin + 16, y: 20});
  words.push({x: 2, y: 24, quiet: true, words: "answer"}, {x: margin + 32, y: 24, words: answerWords(40)});
  return {spots, words, sheets: sheets.toReversed(), plates, lines: [], width: room, height: y + 4,
    tile: [[across / columns / 2, 0], [-lean / rows / 2, input / rows / 2]]};
}
