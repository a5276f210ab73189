"use strict";
// Numbers of the page and pictures of them: unpacking, attention from codes, maps, bars, circuits.
// No function here depends on what is chosen on the page.

// the value of each of the 65,536 numbers in 16 bits: sign, 5 bits of exponent, 10 of fraction
const HALVES = Float32Array.from({length: 65536}, (_, bits) => {
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (!exponent) return sign * 2 ** -24 * fraction;
  return sign * 2 ** (exponent - 15) * (1 + fraction / 1024);
});

// The bytes of a packed part: base64, then deflate. null if the page does not carry it.
async function bytesOf(id) {
  const part = document.getElementById(id);
  if (!part) return null;
  const text = atob(part.textContent.trim()), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const opened = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(opened).arrayBuffer());
}

// Numbers in 16 bits, all low bytes before all high bytes.
function fromPlanes(bytes) {
  if (!bytes) return null;
  const count = bytes.length / 2, numbers = new Float32Array(count);
  for (let i = 0; i < count; i++) numbers[i] = HALVES[bytes[i] | bytes[count + i] << 8];
  return numbers;
}

// Ranked numbers of each token: places and values `[token, rank]`, totals `[token]`.
function fromRanked(bytes, count) {
  if (!bytes) return null;
  const ranks = (bytes.length / 4 - count) / 2 / count, many = count * ranks;
  const places = new Uint32Array(bytes.buffer, 0, many);
  const values = new Float32Array(bytes.buffer, 4 * many, many);
  const totals = new Float32Array(bytes.buffer, 8 * many, count);
  const of = token => Array.from({length: ranks}, (_, rank) =>
    ({place: places[token * ranks + rank], value: values[token * ranks + rank]}));
  // the value of one place in each token, 0 if the place is not among the token's largest
  const where = place => Float32Array.from({length: count}, (_, token) =>
    of(token).find(one => one.place === place)?.value ?? 0);
  const stored = [...new Set(places)].sort((a, b) => a - b);
  return {ranks, of, where, stored, total: token => totals[token]};
}

const REPRESENTATIVES = 64, SIDE = 8;

// The representative in whose cell a token lies: 8 x 8 cells over the square of all tokens but the
// last, which lies in none and gets the last cell.
function representativeOf(token, count) {
  const side = Math.round(Math.sqrt(count - 1)), at = Math.min(token, count - 2);
  const cell = place => Math.floor(place * SIDE / side);
  return cell(Math.floor(at / side)) * SIDE + cell(at % side);
}

// One layer: rows and columns of attention, and cosines of codes.
class Layer {
  constructor(parts, sizes) {
    Object.assign(this, sizes); // heads, count, causal
    this.codes = fromPlanes(parts.codes);
    this.keys = fromPlanes(parts.keys) ?? this.codes;
    this.rows = parts.rows; // steps of a row's largest share, if codes do not give the attention
    this.largest = fromPlanes(parts.largest);
    this.contract = fromPlanes(parts.contract); // what each representative reads, `[head, rep, token]`
    this.atoms = fromRanked(parts.atoms, this.count);
    this.lens = fromRanked(parts.lens, this.count);
    this.match = fromPlanes(parts.match); // codes that atoms of the layer below give `[head, atom, d_head]`
    this.scale = fromPlanes(parts.scale);
    this.width = this.codes ? this.codes.length / this.heads / this.count : 0;
    this.sums = []; // for each head and row: the logarithm of the sum of exp(score)
    this.norms = [];
  }

  static async load(number, sizes) {
    const names = ["codes", "keys", "rows", "largest", "contract", "atoms", "lens", "match", "scale"];
    const bytes = await Promise.all(names.map(name => bytesOf(`${name}-${number}`)));
    return new Layer(Object.fromEntries(names.map((name, i) => [name, bytes[i]])), sizes);
  }

  place(head, token) {
    return (head * this.count + token) * this.width;
  }

  dot(left, right, head, i, j) {
    const a = this.place(head, i), b = this.place(head, j);
    let sum = 0;
    for (let d = 0; d < this.width; d++) sum += left[a + d] * right[b + d];
    return sum;
  }

  score(head, query, key) {
    if (this.causal && key > query) return -Infinity;
    return this.dot(this.codes, this.keys, head, query, key) / Math.sqrt(this.width);
  }

  // softmax_j(<q_query, k_j> / sqrt(p)): what a token attends to
  row(head, query) {
    const share = new Float32Array(this.count);
    if (this.contract) return this.shared(head, query);
    if (this.rows) { // memberships have one row for all queries
      const queries = this.largest.length / this.heads, at = head * queries + query % queries;
      return share.map((_, key) => this.rows[at * this.count + key] * this.largest[at] / 255);
    }
    const scores = Float64Array.from(share, (_, key) => this.score(head, query, key));
    const sum = sumOf(scores);
    return share.map((_, key) => Math.exp(scores[key] - sum));
  }

  // What the largest atoms of a token add to the score with another token; below: the layer below.
  matching(below, head, token, other) {
    const stored = below.atoms.stored, from = this.place(head, other);
    return below.atoms.of(token).filter(one => one.value).map(({place, value}) => {
      const at = (head * stored.length + stored.indexOf(place)) * this.width;
      let sum = 0;
      for (let d = 0; d < this.width; d++) sum += this.match[at + d] * this.codes[from + d];
      return {place, part: value * sum / this.scale[token]};
    }).sort((a, b) => Math.abs(b.part) - Math.abs(a.part));
  }

  // what a representative reads
  reads(head, rep) {
    const start = (head * REPRESENTATIVES + rep) * this.count;
    return this.contract.slice(start, start + this.count);
  }

  // a token's row of A^T A, divided by its sum: the tokens that share its representatives
  shared(head, query) {
    const row = new Float32Array(this.count);
    let sum = 0;
    for (let rep = 0; rep < REPRESENTATIVES; rep++) {
      const start = (head * REPRESENTATIVES + rep) * this.count, own = this.contract[start + query];
      sum += own;
      for (let key = 0; key < this.count; key++) row[key] += own * this.contract[start + key];
    }
    return row.map(value => value / Math.max(sum, 1e-30));
  }

  // the share of each token's attention that goes to `key`: a column of the pattern
  column(head, key) {
    const share = new Float32Array(this.count);
    if (this.rows) return share.map((_, query) => this.row(head, query)[key]);
    this.sums[head] ??= Float64Array.from(share, (_, query) =>
      sumOf(Float64Array.from(share, (_, other) => this.score(head, query, other))));
    return share.map((_, query) => Math.exp(this.score(head, query, key) - this.sums[head][query]));
  }

  // the cosine of one token's code with every token's, in the subspace of the head
  cosines(head, token) {
    const dot = (i, j) => this.dot(this.codes, this.codes, head, i, j);
    this.norms[head] ??= Float64Array.from({length: this.count}, (_, i) => Math.sqrt(dot(i, i)));
    const norm = this.norms[head];
    return Float32Array.from(norm, (own, j) => dot(token, j) / Math.max(own * norm[token], 1e-30));
  }
}

// The logarithm of the sum of exp(score).
function sumOf(scores) {
  const most = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  return most + Math.log(scores.reduce((sum, score) => sum + Math.exp(score - most), 0));
}

// ---- words and drawing

function shown(name) { // a token whose white space can be seen
  const words = name.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  return words.trim() ? words : words.replaceAll(" ", "\u2423") || "\u2205";
}

function digits(value) {
  const size = Math.abs(value), sign = value < 0 ? "\u2212" : "";
  if (size && size < .0005) return `${sign}<0.001`;
  return sign + (size < 10 ? size.toFixed(3) : size.toPrecision(3));
}

const percent = share => `${(100 * share).toFixed(share < .0995 ? 1 : 0)}\u00a0%`;

function make(kind, properties = {}, children = []) {
  const element = document.createElement(kind);
  const {style, aria, ...own} = properties;
  for (const [name, value] of Object.entries(style ?? {})) element.style.setProperty(name, value);
  for (const [name, value] of Object.entries(aria ?? {}))
    element.setAttribute(name === "role" ? name : `aria-${name}`, value);
  Object.assign(element, own);
  element.append(...children);
  return element;
}

function svg(kind, attributes, children = []) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The red, green and blue of one of the page's colours in the scheme that is on.
const colour = name => getComputedStyle(byId("explorer").querySelector(`.ink-${name}`)).color
  .match(/[\d.]+/g).slice(0, 3).map(Number);

// Paints a map of patches: larger values are more opaque; above and below 0 have two colours.
function paintMap(canvas, [rows, columns], values, most) {
  const pen = canvas.getContext("2d");
  canvas.width = columns;
  canvas.height = rows;
  const pixels = pen.createImageData(columns, rows), inks = [colour("accent"), colour("other")];
  for (let i = 0; i < rows * columns; i++) {
    const value = values[i + data.special];
    pixels.data.set(inks[value < 0 ? 1 : 0], 4 * i);
    pixels.data[4 * i + 3] = Math.round(255 * Math.min(1, Math.abs(value) / most));
  }
  pen.putImageData(pixels, 0, 0);
}

// Paints masks, or a component (in 1/100 of its largest), on a picture; returns the count of masks.
function paintPatches(canvas, [rows, columns], numbers, isMask) {
  const side = 24, pen = canvas.getContext("2d"), first = new Map();
  canvas.width = columns * side;
  canvas.height = rows * side;
  const inks = [colour("accent"), colour("other"), colour("ink")];
  numbers.forEach((number, patch) => {
    if (!number) return;
    const x = patch % columns * side, y = Math.floor(patch / columns) * side;
    const ink = inks[isMask ? number - 1 : +(number < 0)];
    pen.fillStyle = `rgb(${ink.join(" ")} / ${isMask ? .6 : .85 * Math.abs(number) / 100})`;
    pen.fillRect(x, y, side, side);
    if (isMask && !first.has(number)) first.set(number, [x, y]);
  });
  pen.font = `bold ${side * .7}px system-ui, sans-serif`;
  for (const [number, [x, y]] of first) { // the number of a mask is on its first patch
    pen.fillStyle = "#000";
    pen.fillRect(x, y, side, side);
    pen.fillStyle = "#fff";
    pen.fillText(number, x + .3 * side, y + .75 * side);
  }
  return first.size;
}

// Paints the tokens of a text as bars from left to right; the marked token is underlined.
function paintBars(canvas, marked, values, most) {
  const wide = Math.max(1, Math.floor(240 / values.length)), tall = 48;
  const pen = canvas.getContext("2d"), inks = [colour("accent"), colour("other")];
  canvas.width = wide * values.length;
  canvas.height = tall;
  values.forEach((value, token) => {
    const height = Math.max(value ? 1 : 0, tall * Math.min(1, Math.abs(value) / most));
    pen.fillStyle = `rgb(${inks[value < 0 ? 1 : 0]})`;
    pen.fillRect(token * wide, tall - height, Math.max(1, wide - (wide > 3)), height);
  });
  pen.fillStyle = `rgb(${colour("muted")})`;
  pen.fillRect(marked * wide, tall - 2, Math.max(2, wide), 2);
}

// A list of bars. rows: {name, share, words, pick, chosen, grey}
function ranked(list, rows) {
  list.replaceChildren(...rows.map(row => {
    const bar = make("span", {className: row.below ? "amount below" : "amount", style: {"--share": Math.min(1, row.share)}});
    const name = make("bdi", {textContent: row.name});
    const words = [name, bar, make("span", {textContent: row.words})];
    const className = row.grey ? "grey" : "";
    const inner = row.pick ? make("button", {type: "button", className, onclick: row.pick,
      aria: {pressed: String(Boolean(row.chosen))}}, words) : make("div", {}, words);
    return make("li", {}, [inner]);
  }));
}

// Makes spans of the tokens of a text, with its line ends. Token ids get spaces between them.
function tokenSpans(place, names) {
  const apart = names.every(name => /^\d+$/.test(name));
  place.classList.toggle("apart", apart);
  names.forEach((name, number) => {
    const token = make("span", {textContent: shown(name)});
    token.dataset.number = number;
    place.append(token);
    if (apart) place.append(" ");
    if (name.includes("\n")) place.append(make("br"));
  });
}

// The token of the patch under the pointer, or null.
function patchAt(event, element, [rows, columns]) {
  const box = element.getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top) / box.height * rows);
  const column = Math.floor((event.clientX - box.left) / box.width * columns);
  const inside = row >= 0 && row < rows && column >= 0 && column < columns;
  return inside ? data.special + row * columns + column : null;
}

function patchOf(token, [, columns]) { // [row, column]
  return [Math.floor((token - data.special) / columns), (token - data.special) % columns];
}

// Puts a frame around the patch of a token; CLS has none.
function mark(element, token, grid) {
  element.hidden = token === null || token < data.special;
  if (element.hidden) return;
  const [row, column] = patchOf(token, grid), [rows, columns] = grid;
  const box = {left: column / columns, top: row / rows, width: 1 / columns, height: 1 / rows};
  for (const [side, share] of Object.entries(box)) element.style[side] = `${100 * share}%`;
}

// A circuit: a column for each layer's heads and atoms, and an edge as wide as its weight.
function circuitDrawing({nodes, edges}, pick) {
  const [wide, tall, across, down, above] = [64, 34, 118, 46, 40];
  const columns = [...new Set(nodes.map(node => 2 * node.layer + node.kind))].sort((a, b) => a - b);
  const rows = columns.map(place => nodes.filter(node => 2 * node.layer + node.kind === place));
  const most = Math.max(...rows.map(column => column.length));
  const spots = new Map();
  rows.forEach((column, x) => column.forEach((node, y) =>
    spots.set(node.name, [2 + x * across, above + (y + (most - column.length) / 2) * down])));
  const largest = Math.max(...edges.map(edge => Math.abs(edge[2])), 1e-30);
  const lines = edges.map(([source, target, weight]) => {
    const [x0, y0] = spots.get(source), [x1, y1] = spots.get(target), middle = tall / 2;
    const share = Math.abs(weight) / largest, bend = (x1 - x0 - wide) / 2;
    const lift = x1 - x0 > across ? -above : 0; // around the nodes of the columns in between
    const path = `M${x0 + wide} ${y0 + middle} C${x0 + wide + bend} ${y0 + middle + lift} `
      + `${x1 - bend} ${y1 + middle + lift} ${x1} ${y1 + middle}`;
    const title = svg("title", {}, [`${source} to ${target}: ${weight.toPrecision(3)}`]);
    return svg("path", {d: path, class: weight < 0 ? "below" : "above",
      "stroke-width": .8 + 3.2 * share, "stroke-opacity": .3 + .6 * share}, [title]);
  });
  const boxes = nodes.map(node => {
    const [x, y] = spots.get(node.name);
    const box = svg("rect", {x, y, width: wide, height: tall, rx: 8});
    const text = svg("text", {x: x + wide / 2, y: y + 22, "text-anchor": "middle"}, [node.name]);
    if (node.number === null) return svg("g", {class: "end"}, [box, text]);
    const words = `${node.name}: go to layer ${node.layer}`;
    const group = svg("g", {class: "node", tabindex: 0, role: "button",
      "aria-label": words, "data-name": node.name}, [box, text]);
    group.addEventListener("click", () => pick(node));
    group.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(node); }
    });
    return group;
  });
  const width = 4 + (columns.length - 1) * across + wide;
  const height = above + 2 + (most - 1) * down + tall;
  return svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`}, [...lines, ...boxes]);
}
