// Attention of a layer's heads: the matrix of one head, and what the query under the pointer looks at.
"use strict";
const data = JSON.parse(document.getElementById("pattern").textContent);
const count = data.tokens.length, steps = Uint8Array.from(atob(data.bytes), c => c.charCodeAt(0));
const find = id => document.getElementById(id);
const canvas = find("matrix"), scale = find("scale"), live = find("live");
let head = data.first, cell = null;  // cell: [query, key] under the pointer
let pinned = false;
const pictured = find("tokens").classList.contains("over");

const share = (h, q, k) => k === data.top[h][q] ? data.largest[h][q] : steps[(h * count + q) * count + k] / 255 * data.second[h][q];
const keys = q => data.causal ? q + 1 : count;  // how many keys a query sees
const scales = {  // the value of a colour, from 0 to 1, and the words at the end of the colour bar
  row: {of: (h, q, k) => share(h, q, k) / (data.largest[h][q] || 1), end: () => "the row's largest"},
  even: {of: (h, q, k) => share(h, q, k) * keys(q) / most(h), end: h => `${+most(h).toPrecision(2)} × the even share${data.grid ? " and more" : ""}`},
  share: {of: (h, q, k) => share(h, q, k) / Math.max(...data.largest[h]),
    end: h => Math.max(...data.largest[h]).toPrecision(2)},
};
const DARK = 55;  // per cent of black over what is not looked at: the picture must stay readable
const EVEN = 5;  // of even shares: more than that has full colour in an image, where CLS gives itself nearly all
function most(h) {
  const largest = Math.max(1, ...data.largest[h].map((value, q) => value * keys(q)));
  return data.grid ? Math.min(EVEN, largest) : largest;
}

// The share that has full colour on the tokens, or on the patches: CLS, before them, does not count.
function full(h, q) {
  if (!data.grid) return data.largest[h][q] || 1;
  const first = count - data.grid[0] * data.grid[1], patches = [...Array(count - first).keys()];
  return Math.max(Math.min(1, EVEN / count), ...patches.map(patch => share(h, q, patch + first)));
}

function rgb(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return colour;
}

// one pixel for each pair; what a causal query cannot see stays clear
function paint(target, h) {
  const [r, g, b] = rgb("--accent"), pen = target.getContext("2d");
  target.width = target.height = count;
  const picture = pen.createImageData(count, count), value = scales[scale.value].of;
  for (let q = 0; q < count; q++)
    for (let k = 0; k < keys(q); k++)
      picture.data.set([r, g, b, Math.round(20 + 235 * Math.min(1, value(h, q, k)))], 4 * (q * count + k));
  pen.putImageData(picture, 0, 0);
}

// over how many tokens a query spreads its attention: 1 / the sum of share²
function spread(h, q) {
  let sum = 0;
  for (let k = 0; k < keys(q); k++) sum += share(h, q, k) ** 2;
  return (1 / sum).toFixed(1 / sum < 9.95 ? 1 : 0);
}

// Below each head: of an image over how many tokens the outlined token spreads, of a text a mean token.
function caption(q) {
  const counts = data.grid ? data.heads.map((_, h) => spread(h, q)) : data.spread;
  const least = Math.min(...counts);
  document.querySelectorAll("#heads small").forEach((words, h) => {
    words.textContent = `${counts[h]} tokens${+counts[h] === least ? ", fewest" : ""}`;
  });
}

// what a query looks at, as a small map of the patches: bright is most
function peek(target, h, q) {
  const [rows, columns] = data.grid, first = count - rows * columns, top = full(h, q), pen = target.getContext("2d");
  target.width = columns;
  target.height = rows;
  for (let patch = 0; patch < rows * columns; patch++) {
    pen.fillStyle = `rgb(0 0 0 / ${DARK * (1 - Math.min(1, share(h, q, patch + first) / top))}%)`;
    pen.fillRect(patch % columns, Math.floor(patch / columns), 1, 1);
  }
}

function shade(element, value) {
  const strength = Math.round(100 * Math.min(1, value));
  const over = element.parentElement.classList.contains("over") && element.previousElementSibling;
  element.style.background = over ? `rgb(0 0 0 / ${DARK * (1 - strength / 100)}%)`
    : `color-mix(in srgb, var(--accent) ${Math.round(strength * .45)}%, var(--card))`;
}

function show() {
  document.querySelectorAll("#heads button").forEach((button, place) =>
    button.setAttribute("aria-pressed", String(place === head)));
  paint(canvas, head);
  find("end").textContent = scales[scale.value].end(head);
  find("of").textContent = data.heads[head];
  point();
}

// what one query looks at, on the tokens or the patches, and in words
function point() {
  const [q, k] = cell ?? [data.grid ? 0 : count - 1, null], top = full(head, q);
  find("row").style.cssText = `top: ${100 * q / count}%; height: ${100 / count}%`;
  const marked = k ?? (head === data.first ? data.named : null);  // the token that the page's first line names
  find("column").style.cssText = marked === null ? "display: none" : `left: ${100 * marked / count}%; width: ${100 / count}%`;
  find("column").classList.toggle("named", k === null);
  if (pictured) document.querySelectorAll("#heads canvas").forEach((small, h) => peek(small, h, q));
  document.querySelectorAll("#tokens > *").forEach((element, place) => {
    shade(element, place < keys(q) ? share(head, q, place) / top : 0);
    element.classList.toggle("asks", place === q);
    element.classList.toggle("looked", place === k);
  });
  const order = [...Array(keys(q)).keys()].sort((a, b) => share(head, q, b) - share(head, q, a));
  const patches = data.grid ? count - data.grid[0] * data.grid[1] : count;
  const called = place => !data.grid ? `\u201c${data.tokens[place].trim()}\u201d (${place})`
    : place < patches ? data.tokens[place] : `patch (${data.tokens[place].replace(",", ", ")})`;
  const percent = value => `${+(100 * value).toPrecision(2)}\u00a0%`;
  const said = place => `${place === q ? "itself" : called(place)}, ${percent(share(head, q, place))}`;
  if (data.grid) find("query").textContent = called(q);
  caption(q);
  let words = `${data.heads[head]}: ${called(q)} looks most at ${order.slice(0, 3).map(said).join("; then at ")}`;
  if (k !== null && k < keys(q)) {
    const even = share(head, q, k) * keys(q);
    words = `${data.heads[head]}: ${called(q)} gives ${called(k)} ${percent(share(head, q, k))}, `
      + `${even.toPrecision(2)} times its even share, rank ${order.indexOf(k) + 1} of ${keys(q)}`;
  } else if (k !== null) words = `${called(q)} does not see ${called(k)}, which comes later`;
  live.textContent = `${words}.`;
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  const at = (position, start, size) => Math.max(0, Math.min(count - 1, Math.floor((position - start) / size * count)));
  return [at(event.clientY, box.top, box.height), at(event.clientX, box.left, box.width)];
}

canvas.addEventListener("pointermove", event => { if (!pinned) { cell = place(event); point(); } });
canvas.addEventListener("pointerdown", event => { pinned = !pinned || event.pointerType === "touch"; cell = place(event); point(); });
canvas.addEventListener("keydown", event => {
  const step = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1]}[event.key];
  if (event.key === "Escape") { pinned = false; cell = null; point(); }
  if (!step) return;
  event.preventDefault();
  const [q, k] = cell ?? [count - 1, count - 1];
  cell = [q + step[0], k + step[1]].map(v => Math.max(0, Math.min(count - 1, v)));
  pinned = true;
  point();
});
find("tokens").addEventListener("pointerover", event => {
  const at = [...find("tokens").children].indexOf(event.target);
  if (at >= 0 && !pinned) { cell = [at, null]; point(); }
});

function label(list, words) {
  words.forEach(word => {
    const item = document.createElement("li");
    item.textContent = word;
    list.append(item);
  });
}
if (count <= 48) {
  label(find("queries"), data.tokens);
  label(find("keys"), data.tokens);
} else document.querySelector(".attention").classList.add("many");
data.heads.forEach((name, place) => {
  const button = document.createElement("button"), small = document.createElement("canvas");
  button.type = "button";
  small.setAttribute("aria-hidden", "true");
  button.append(small, document.createTextNode(name), document.createElement("small"));
  button.addEventListener("click", () => { head = place; show(); });
  find("heads").append(button);
});
data.tokens.forEach(word => {
  const element = document.createElement("span");
  element.textContent = data.grid ? "" : word.replace(/\n/g, "\u21b5");
  element.title = word;
  find("tokens").append(element);
});
if (data.grid) find("tokens").style.setProperty("--columns", data.grid[1]);
function all() {
  if (!pictured) document.querySelectorAll("#heads canvas").forEach((small, place) => paint(small, place));
  show();
}
scale.addEventListener("input", all);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
find("scheme").addEventListener("input", all);
all();
