"use strict";
// What is chosen on the page of a graph, how it is drawn, and what pointer, touch and keys do.

const byId = id => document.getElementById(id);
const numbers = new Map(data.nodes.map((node, number) => [node.id, number]));
const into = new Map(); // the sum of the weights of all edges into a node
for (const [source, target, weight] of data.edges)
  if (data.nodes[source].kind !== "bias") into.set(target, (into.get(target) ?? 0) + Math.abs(weight));
// an edge counts as much as the influence that passes through it
const edges = data.edges.map(([source, target, weight, parts]) => ({source: data.nodes[source],
  target: data.nodes[target], weight, parts,
  size: Math.abs(weight) / (into.get(target) ?? 1) * data.nodes[target].influence}));
const start = data.nodes.find(node => node.kind === "target");
const state = {chosen: start, held: false, nodes: 100, edges: 50, pins: [], groups: []};
const HEADS = ["#4477aa", "#ee6677", "#228833", "#aa7711", "#0f8fa8", "#aa3377", "#7a6ad8", "#c05a2e"];
const SKIP = "#888f96";
const colourOf = head => head < 0 ? SKIP : HEADS[head % HEADS.length];
const digits = value => value === null ? "none" : Math.abs(value) >= 1000 || (value && Math.abs(value) < .001)
  ? value.toExponential(1) : String(+value.toPrecision(3));
let plan = null;

function part(name, values, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

// ---- what is shown

function held(things, sizeOf, share) { // the largest that hold a share of the sum
  const order = [...things].sort((a, b) => sizeOf(b) - sizeOf(a));
  const whole = order.reduce((sum, one) => sum + sizeOf(one), 0);
  const shown = new Set();
  let sum = 0;
  for (const one of order) {
    if (sum >= share * whole && shown.size) break;
    shown.add(one);
    sum += sizeOf(one);
  }
  return shown;
}

function visible() {
  const codes = drawn.filter(node => node.kind === "code");
  const nodes = held(codes, node => node.influence, state.nodes / 100);
  for (const node of drawn) if (node.kind !== "code" || state.pins.includes(node)) nodes.add(node);
  const between = edges.filter(edge => nodes.has(edge.source) && nodes.has(edge.target));
  const shown = held(between, edge => edge.size, state.edges / 100), strongest = new Map();
  for (const edge of between) // a code without a line would seem to feed nothing
    if (edge.source.kind === "code" && edge.size > (strongest.get(edge.source)?.size ?? 0)) strongest.set(edge.source, edge);
  return {nodes, edges: new Set([...shown, ...strongest.values()])};
}

// ---- drawing

function curve(from, to) {
  const bend = Math.max(14, Math.abs(from.y - to.y) / 2);
  return data.grid === null ? `M${from.x},${from.y}C${from.x},${from.y - bend} ${to.x},${to.y + bend} ${to.x},${to.y}`
    : `M${from.x},${from.y}Q${(from.x + to.x) / 2},${Math.min(from.y, to.y) - 24} ${to.x},${to.y}`;
}

function draw() {
  const canvas = byId("canvas"), svg = byId("drawing"), shown = visible();
  const room = Math.max(300, canvas.clientWidth - 16);
  plan = data.grid === null ? inTable() : onPictures(room);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${plan.width} ${plan.height}`);
  const scale = Math.max(.75, Math.min(1.5, room / plan.width));
  svg.setAttribute("width", plan.width * scale);
  svg.setAttribute("height", plan.height * scale);
  for (const line of plan.lines) part("line", {...line, class: "rule"}, svg);
  const uri = byId("picture") && `data:image/webp;base64,${byId("picture").textContent}`;
  for (const box of plan.pictures)
    part("image", {...box, href: uri, preserveAspectRatio: "none", opacity: .45}, svg);
  for (const {share, ...box} of plan.shades) // where the answer comes from, over all nodes
    if (share) part("rect", {...box, class: share > 0 ? "shade above" : "shade below", opacity: .6 * Math.abs(share)}, svg);
  for (const {x, y, words, quiet} of plan.words)
    part("text", {x, y, class: quiet ? "muted" : ""}, svg).textContent = words;
  const near = edge => edge.source === state.chosen || edge.target === state.chosen;
  const focus = state.chosen !== null && state.chosen !== start;
  const chosen = data.grid !== null || focus ? edges.filter(near) : [];
  const lines = new Set([...(data.grid === null ? shown.edges : []), ...chosen]
    .filter(edge => shown.nodes.has(edge.source) && shown.nodes.has(edge.target)));
  const most = Math.max(...[...lines].map(edge => edge.size), 1e-30);
  const group = part("g", {}, svg);
  for (const edge of lines) {
    const from = plan.spots.get(edge.source), to = plan.spots.get(edge.target);
    if (!from || !to) continue;
    part("path", {d: curve(from, to), stroke: colourOf(edge.parts[0][0]),
      "stroke-width": .5 + 3.5 * Math.sqrt(edge.size / most), "stroke-opacity": .75,
      "stroke-dasharray": edge.weight < 0 ? "5 3" : "none",
      class: `edge${focus && !near(edge) ? " dim" : ""}`}, group);
  }
  drawNodes(svg, shown, focus);
  for (const {name, nodes} of state.groups) {
    const spots = nodes.map(node => plan.spots.get(node)).filter(Boolean);
    if (!spots.length) continue;
    for (const spot of spots) part("circle", {cx: spot.x, cy: spot.y, r: 9, class: "ring"}, svg);
    part("text", {x: spots[0].x + 11, y: spots[0].y - 8}, svg).textContent = name;
  }
}

function drawNodes(svg, shown, focus) {
  const reached = new Set([state.chosen]);
  for (const edge of edges) {
    if (edge.source === state.chosen) reached.add(edge.target);
    if (edge.target === state.chosen) reached.add(edge.source);
  }
  for (const node of drawn) {
    const spot = plan.spots.get(node);
    if (!spot || !shown.nodes.has(node)) continue;
    const classes = ["node", amount(node) < 0 ? "below" : "above"];
    if (node.kind !== "target" && node.effect === null) classes.push("slope");
    if (node === state.chosen) classes.push("chosen");
    if (state.pins.includes(node)) classes.push("pinned");
    if (focus && !reached.has(node)) classes.push("dim");
    const size = radius(node), seen = {class: classes.join(" "), "data-id": node.id};
    const made = node.kind === "embedding"
      ? part("rect", {...seen, x: spot.x - size, y: spot.y - size, width: 2 * size, height: 2 * size}, svg)
      : part("circle", {...seen, cx: spot.x, cy: spot.y, r: size}, svg);
    part("title", {}, made).textContent = nameOf(node);
  }
}

// ---- words

function nameOf(node) {
  if (node.kind === "target") return data.answer;
  if (node.kind === "bias") return data.exact ? "biases" : "the rest: biases, and what no slope shows";
  const where = `${tokenName(node.pos)}${data.grid === null ? ` (${node.pos})` : ""}`;
  return node.kind === "embedding" ? `input at ${where}` : `L${node.layer}A${node.atom} at ${where}`;
}

// Of the answer, the list has what it really loses without each node, unless slopes add up to it.
const measured = node => node.kind === "target" && !data.exact;

function list(place, found, other, amountOf = edge => edge.weight) {
  byId(place).replaceChildren(...found.slice(0, 9).map(edge => {
    const row = document.createElement("li"), button = document.createElement("button");
    const amount = document.createElement("span"), words = document.createElement("span");
    const head = document.createElement("small"), [first] = edge.parts;
    amount.className = "amount";
    amount.textContent = `${amountOf(edge) > 0 ? "+" : ""}${digits(amountOf(edge))}`;
    words.textContent = `${nameOf(edge[other])}${edge[other].label ? `: ${edge[other].label}` : ""}`;
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = colourOf(first[0]);
    if (edge[other].kind !== "bias" && data.heads) head.append(swatch, first[0] < 0 ? "skip" : `head ${first[0]}`);
    button.append(amount, words, head);
    button.type = "button";
    if (edge[other].kind === "bias") button.disabled = true;
    else button.onclick = () => choose(edge[other], true);
    row.append(button);
    return row;
  }));
  if (!found.length) byId(place).textContent = "nothing in the graph";
}

function describe() {
  const node = state.chosen, bySize = (a, b) => Math.abs(b.weight) - Math.abs(a.weight);
  byId("name").textContent = nameOf(node);
  const words = [];
  if (node.label) words.push(/\(AUC/.test(node.label) ? `Separates best: ${node.label}; .5 is chance.` : `${node.label}.`);
  if (node.kind === "target") words.push(`${digits(node.value)} above ${data.versus}.`);
  if (node.kind === "code") words.push(`Value ${digits(node.value)}.`);
  if (node.kind !== "target") {
    words.push(`Attribution ${digits(node.attribution)}, influence ${digits(node.influence)}.`);
    if (node.effect !== null) words.push(`Without it the answer really changes by ${digits(-node.effect)}.`);
  }
  byId("words").textContent = words.join(" ");
  byId("pin").hidden = node.kind === "target";
  byId("pin").textContent = state.pins.includes(node) ? "Unpin" : "Pin";
  const real = measured(node), amountOf = edge => real ? edge.source.effect ?? 0 : edge.weight;
  const fed = edges.filter(edge => edge.target === node)
    .sort((a, b) => Math.abs(amountOf(b)) - Math.abs(amountOf(a)));
  const biases = real ? [] : fed.filter(edge => edge.source.kind === "bias");
  const codes = fed.filter(edge => edge.source.kind !== "bias").slice(0, 8);
  byId("fed-words").textContent = real ? "(what it loses without each)" : "";
  list("fed", [...codes, ...biases], "source", amountOf);
  byId("examples").replaceChildren(...(data.examples[node.id.split("@")[0]] ?? []).map(([value, words, uri]) => {
    const row = document.createElement("li");
    if (uri) {
      const picture = document.createElement("img");
      Object.assign(picture, {src: uri, alt: words, title: `${words}, ${digits(value)}`, width: 48, height: 48});
      row.append(picture);
    } else row.textContent = `${words} ${digits(value)}`;
    return row;
  }));
  byId("examples-name").hidden = !byId("examples").children.length;
  list("feeds", edges.filter(edge => edge.source === node).sort(bySize), "target");
}

function drawPins() {
  byId("pins").hidden = !state.pins.length && !state.groups.length;
  const button = (words, act) => {
    const row = document.createElement("li"), made = document.createElement("button");
    made.type = "button";
    made.textContent = words;
    made.onclick = act;
    row.append(made);
    return row;
  };
  byId("pinned").replaceChildren(...state.pins.map(node => button(nameOf(node), () => choose(node, true))));
  byId("groups").replaceChildren(...state.groups.map(({name, nodes}) => {
    const sum = nodes.reduce((total, node) => total + node.attribution, 0);
    return button(`${name}: ${nodes.map(node => node.id).join(", ")}; attribution ${digits(sum)}; remove the group`,
      () => { state.groups = state.groups.filter(one => one.name !== name); update(); });
  }));
}

function update() {
  byId("nodes").value = state.nodes;
  byId("edges").value = state.edges;
  byId("nodes-words").textContent = `${state.nodes}\u00a0%`;
  byId("edges-words").textContent = `${state.edges}\u00a0%`;
  draw();
  describe();
  drawPins();
  remember();
}

// ---- the address

function remember() {
  const words = new URLSearchParams();
  if (state.held && state.chosen !== start) words.set("node", state.chosen.id);
  if (state.nodes !== 100) words.set("nodes", state.nodes);
  if (state.edges !== 50) words.set("edges", state.edges);
  if (state.pins.length) words.set("pins", state.pins.map(node => node.id).join(","));
  for (const {name, nodes} of state.groups) words.append("group", `${name}:${nodes.map(node => node.id).join(",")}`);
  try { history.replaceState(null, "", `#${words}`); } catch { /* a frame without an origin */ }
}

function recall() {
  const words = new URLSearchParams(location.hash.slice(1));
  const known = names => (names ?? "").split(",").filter(id => numbers.has(id)).map(id => data.nodes[numbers.get(id)])
    .filter(node => node.kind === "code" || node.kind === "embedding");
  const [node] = known(words.get("node"));
  if (node) Object.assign(state, {chosen: node, held: true});
  for (const name of ["nodes", "edges"]) {
    const value = parseInt(words.get(name) ?? "", 10);
    if (value >= 0 && value <= 100) state[name] = value;
  }
  state.pins = known(words.get("pins"));
  state.groups = words.getAll("group").map(text => {
    const cut = text.lastIndexOf(":");
    return {name: text.slice(0, cut), nodes: known(text.slice(cut + 1))};
  }).filter(group => group.name && group.nodes.length);
}

// ---- pointer and keys

function choose(node, hold) {
  state.chosen = node;
  state.held = hold && node !== start;
  update();
}

function togglePin() {
  const node = state.chosen;
  if (node.kind === "target") return;
  state.pins = state.pins.includes(node) ? state.pins.filter(one => one !== node) : [...state.pins, node];
  update();
}

const under = event => {
  const id = event.target.closest?.(".node")?.dataset.id;
  return id === undefined ? null : data.nodes[numbers.get(id)];
};
byId("drawing").addEventListener("pointermove", event => {
  const node = under(event);
  if (event.pointerType === "mouse" && !state.held && node && node !== state.chosen) choose(node, false);
});
byId("canvas").addEventListener("pointerleave", () => { if (!state.held) choose(start, false); });
byId("drawing").addEventListener("click", event => {
  const node = under(event);
  if (!node || (state.held && node === state.chosen)) choose(start, false);
  else choose(node, true);
});
byId("pin").onclick = togglePin;
byId("group").onclick = () => {
  const name = byId("group-name").value.replaceAll(":", " ").trim();
  if (!name || !state.pins.length) return;
  state.groups = [...state.groups.filter(one => one.name !== name), {name, nodes: state.pins}];
  state.pins = [];
  byId("group-name").value = "";
  update();
};
for (const name of ["nodes", "edges"])
  byId(name).addEventListener("input", () => { state[name] = +byId(name).value; update(); });

function neighbour(step) {
  const row = drawn.filter(node => node.layer === state.chosen.layer && visible().nodes.has(node));
  return row[(row.indexOf(state.chosen) + step + row.length) % row.length];
}

function along(from, to) {
  const found = edges.filter(edge => edge[from] === state.chosen && edge[to].kind !== "bias");
  return found.length ? found.reduce((best, edge) => Math.abs(edge.weight) > Math.abs(best.weight) ? edge : best)[to] : null;
}

document.addEventListener("keydown", event => {
  if (event.target.closest("input, textarea, summary") || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {ArrowLeft: () => neighbour(-1), ArrowRight: () => neighbour(1),
    ArrowUp: () => along("source", "target"), ArrowDown: () => along("target", "source"), Escape: () => start};
  if (event.key in moves) {
    const node = moves[event.key]();
    if (node) choose(node, node !== start);
    event.preventDefault();
  } else if (event.key === "p" || event.key === "P") togglePin();
});
addEventListener("resize", draw);
addEventListener("hashchange", () => { recall(); update(); });

const heads = [...new Set(data.edges.flatMap(edge => edge[3].map(([head]) => head)))].sort((a, b) => a - b);
for (const kind of ["svg", "png"]) byId(`save-${kind}`).addEventListener("click", () =>
  saveDrawing(byId("drawing"), document.title.replace(/[^\w-]+/g, "-"), kind === "png"));
// the whole text, with the tokens that have nodes marked
const withNodes = new Set(data.nodes.map(node => node.pos));
byId("prompt")?.append(...data.tokens.map((words, pos) => {
  const token = document.createElement(withNodes.has(pos) ? "mark" : "span");
  token.textContent = words;
  return token;
}));
byId("legend").append("Edges, by the head that carries most: ", ...heads.map(head => {
  const item = document.createElement("span"), swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = colourOf(head);
  item.append(swatch, head < 0 ? "skip connection " : `${head} `);
  return item;
}), data.grid ? "Shades of the patches: the sum of the slopes of all their codes, over the largest of the layer. " : "", "Dashed edges are below 0. Nodes: blue raises the answer, orange lowers it, by what it really loses without the node; hollow ones by their slope, for no forward without them was run. Squares are the input. A cause that is there several times may have no node: each copy has a small slope.");
recall();
update();
