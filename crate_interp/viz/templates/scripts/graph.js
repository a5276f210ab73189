"use strict";
// What is chosen on the page of a graph, how it is drawn, and what pointer, touch and keys do.

const numbers = new Map(data.nodes.map((node, number) => [node.id, number]));
const into = new Map(); // the sum of the weights of all edges into a node
for (const [source, target, weight] of data.edges)
  if (data.nodes[source].kind !== "bias") into.set(target, (into.get(target) ?? 0) + Math.abs(weight));
// an edge counts as much as the influence that passes through it
const edges = data.edges.map(([source, target, weight, parts]) => ({source: data.nodes[source],
  target: data.nodes[target], weight, parts,
  size: Math.abs(weight) / (into.get(target) ?? 1) * data.nodes[target].influence}));
const start = data.nodes.find(node => node.kind === "target");
const SHARES = {nodes: 70, edges: data.grid ? 40 : 30}; // what the sliders begin with: few enough to follow
// groups: those of graph_groups.js until `own`, when the reader has changed them
const state = {chosen: start, held: false, ...SHARES, pins: [], groups: [], own: false, marked: ""};
const HEADS = ["#4477aa", "#ee6677", "#228833", "#aa7711", "#0f8fa8", "#aa3377", "#7a6ad8", "#c05a2e"];
const SKIP = "#888f96";
const colourOf = head => head < 0 ? SKIP : HEADS[head % HEADS.length];
const digits = value => value === null ? "none" : Math.abs(value) >= 1000 || (value && Math.abs(value) < .001)
  ? value.toExponential(1) : String(+value.toPrecision(3));
const picture = byId("picture") && `data:image/webp;base64,${byId("picture").textContent}`;
const nodeOf = id => data.nodes[numbers.get(id)];
let plan = null, shown = null, widest = 1;

// The path from the input to the answer through which most influence passes: each edge takes its
// share of what goes into its target. {edges from the input upwards, nodes, share of the influence}
// A path that carries less than RING is not drawn: no single path makes the answer.
const RING = .01;
const path = (() => {
  const best = new Map([[start, 1]]), next = new Map();
  for (const node of [...drawn].sort((a, b) => b.layer - a.layer))
    for (const edge of edges.filter(one => one.target === node && one.source.kind !== "bias" && best.has(node))) {
      const share = best.get(node) * Math.abs(edge.weight) / into.get(numbers.get(node.id));
      if (share > (best.get(edge.source) ?? 0)) { best.set(edge.source, share); next.set(edge.source, edge); }
    }
  const first = [...next.keys()].filter(node => node.layer < 0)
    .reduce((a, b) => a && best.get(a) >= best.get(b) ? a : b, null), found = [];
  if ((best.get(first) ?? 0) < RING) return {edges: [], nodes: [], share: best.get(first) ?? 0};
  for (let node = first; next.has(node); node = found.at(-1).target) found.push(next.get(node));
  return {edges: found, nodes: found.length ? [first, ...found.map(edge => edge.target)] : [], share: best.get(first) ?? 0};
})();

function part(name, values, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

// ---- what is shown

function held(things, sizeOf, share) { // the largest that hold a share of the sum
  const order = [...things].sort((a, b) => sizeOf(b) - sizeOf(a));
  if (share >= 1) return new Set(order);
  const whole = order.reduce((sum, one) => sum + sizeOf(one), 0), shown = new Set();
  let sum = 0;
  for (const one of order) {
    if (sum >= share * whole) break;
    shown.add(one);
    sum += sizeOf(one);
  }
  return shown;
}

function visible() {
  const nodes = held(drawn.filter(node => node !== start), node => node.influence, state.nodes / 100);
  const passing = !nodes.has(state.chosen) && state.chosen !== start && !state.pins.includes(state.chosen);
  const marked = state.groups.find(group => group.name === state.marked)?.nodes ?? [];
  // the panel and the list of groups describe no node that is not there
  for (const node of [start, state.chosen, ...state.pins, ...path.nodes, ...marked]) nodes.add(node);
  const between = edges.filter(edge => nodes.has(edge.source) && nodes.has(edge.target));
  const most = held(between, edge => edge.size, state.edges / 100);
  for (const edge of path.edges) most.add(edge);
  const inputs = [...nodes].filter(node => node.kind === "embedding");
  for (const node of [...inputs, ...mostOfLayers(nodes)]) for (const end of ["source", "target"]) { // a line in, a line out
    const ends = between.filter(edge => edge[end] === node);
    if (ends.length) most.add(ends.reduce((best, edge) => edge.size > best.size ? edge : best));
  }
  return {nodes, passing, edges: most};
}

// ---- drawing

function drawEdges(lines, most, parent) {
  const isOn = edge => path.edges.includes(edge); // the strongest path lies on top
  for (const edge of [...lines].sort((a, b) => isOn(a) - isOn(b))) {
    const from = plan.spots.get(edge.source), to = plan.spots.get(edge.target);
    const bend = Math.max(14, Math.abs(from.y - to.y) / 2);
    part("path", {d: `M${from.x},${from.y}C${from.x},${from.y - bend} ${to.x},${to.y + bend} ${to.x},${to.y}`,
      stroke: colourOf(edge.parts[0][0]), "stroke-width": .9 + 3.5 * Math.sqrt(edge.size / most) + isOn(edge),
      "stroke-dasharray": data.trusted && edge.weight < 0 ? "5 3" : "none", class: isOn(edge) ? "edge path" : "edge"}, parent);
  }
}

function drawSheet({layer, matrix, shades}, svg) {
  const [rows, columns] = data.grid, whole = {width: columns, height: rows};
  const sheet = part("g", {class: "sheet", "data-layer": layer, transform: `matrix(${matrix})`}, svg);
  part("image", {...whole, href: picture, preserveAspectRatio: "none"}, sheet);
  if (data.trusted) shades.forEach((share, patch) => { // where the answer comes from, over all nodes
    if (share) part("rect", {x: patch % columns, y: Math.floor(patch / columns), width: 1, height: 1,
      class: share > 0 ? "above" : "below", "fill-opacity": .6 * Math.abs(share)}, sheet);
  });
  part("rect", {...whole, class: "rim", "vector-effect": "non-scaling-stroke"}, sheet);
}

function drawNode(node, svg) {
  const {x, y} = plan.spots.get(node), size = radius(node);
  const look = {class: "node", "data-id": node.id};
  const [[a, b], [c, d]] = plan.tile.map(side => side.map(length => length * Math.min(1, size / 7 + .15)));
  const made = node.kind !== "embedding" ? part("circle", {...look, cx: x, cy: y, r: size}, svg)
    : part("path", {...look, d: `M${x - a - c},${y - b - d}L${x + a - c},${y + b - d} ${x + a + c},${y + b + d} ${x - a + c},${y - b + d}Z`}, svg);
  part("title", {}, made).textContent = nameOf(node);
}

function draw() { // all but what depends on the chosen node
  const canvas = byId("canvas"), svg = byId("drawing"), room = Math.max(300, canvas.clientWidth - 16);
  shown = visible();
  const there = drawn.filter(node => shown.nodes.has(node));
  plan = data.grid === null ? inTable(room, there) : onSheets(room, there);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${plan.width} ${plan.height}`);
  const scale = Math.max(.75, Math.min(1.2, room / plan.width));
  svg.setAttribute("width", plan.width * scale);
  svg.setAttribute("height", plan.height * scale);
  for (const line of plan.lines) part("line", {...line, class: "rule"}, svg);
  for (const plate of plan.plates) part("rect", {...plate, class: "plate"}, svg);
  for (const sheet of plan.sheets.toReversed()) drawSheet(sheet, svg);
  const first = throughSpecial(there);
  byId("through").hidden = first === null || first === data.layers;
  byId("through").textContent = first === 0 ? "Above the input everything runs through CLS." : `From layer ${first} on everything runs through CLS.`;
  widest = Math.max(...[...shown.edges].map(edge => edge.size), 1e-30);
  drawEdges(shown.edges, widest, part("g", {class: "all"}, svg));
  part("g", {class: "near"}, svg);
  for (const {x, y, words, quiet} of plan.words)
    part("text", {x, y, "paint-order": "stroke", class: quiet ? "muted" : ""}, svg).textContent = words;
  const touch = {r: 12 / Math.min(1, scale), class: "touch"};
  for (const node of there) part("circle", {...touch, cx: plan.spots.get(node).x, cy: plan.spots.get(node).y, "data-of": node.id}, svg);
  for (const node of there) drawNode(node, svg);
  part("g", {class: "labels"}, svg);
  const places = new Set([...shown.nodes].filter(node => node !== start).map(node => node.pos));
  for (const token of byId("prompt").querySelectorAll("[data-pos]"))
    token.classList.toggle("has", places.has(+token.dataset.pos));
  mark();
}

// The code of the largest effect in each layer.
function mostOfLayers(nodes) {
  const most = new Map(), size = node => Math.abs(amount(node));
  for (const node of nodes) if (node.kind === "code" && !(size(most.get(node.layer) ?? node) > size(node))) most.set(node.layer, node);
  return [...most.values()];
}

function mark() { // what is chosen, what it is linked to, and the marked group
  const svg = byId("drawing"), focus = state.chosen !== start, group = state.groups.find(one => one.name === state.marked);
  const near = edges.filter(edge => (edge.source === state.chosen || edge.target === state.chosen)
    && shown.nodes.has(edge.source) && shown.nodes.has(edge.target));
  const reached = new Set(focus ? near.flatMap(edge => [edge.source, edge.target]) : group?.nodes);
  svg.classList.toggle("focus", focus || group !== undefined);
  svg.querySelector(".near").replaceChildren();
  if (focus) drawEdges(near, Math.max(widest, ...near.map(edge => edge.size)), svg.querySelector(".near"));
  const joined = new Set([...shown.edges].flatMap(edge => [edge.source, edge.target]));
  const named = focus ? [...near].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, 4)
    .flatMap(edge => [edge.source, edge.target]) : [...mostOfLayers(shown.nodes).filter(node => Math.abs(amount(node)) > largest / 10), ...largestFirst(shown.nodes).filter(node => Math.abs(amount(node)) >= largest / 2)];
  svg.querySelector(".labels").replaceChildren();
  const boxes = [], free = box => boxes.every(other => box.x + box.width < other.x || other.x + other.width < box.x
    || box.y + box.height < other.y || other.y + other.height < box.y);
  for (const node of new Set(focus ? [state.chosen, ...named] : named)) if (node.kind === "code" && shown.nodes.has(node)) {
    const {x, y} = plan.spots.get(node);
    const label = part("text", {x: x + 5, y: y - radius(node) - 2, "paint-order": "stroke"}, svg.querySelector(".labels"));
    const words = plainLabel(node).length < 16 ? plainLabel(node) : "";
    label.textContent = `L${node.layer}A${node.atom}${words && " "}${words}${focus || node.effect === null ? "" : ` ${signed(+node.effect.toPrecision(2))}`}`;
    if (label.getBBox().x + label.getBBox().width > plan.width - 4) Object.entries({x: x - 5, "text-anchor": "end"})
      .forEach(([name, value]) => label.setAttribute(name, value));
    if (!free(label.getBBox())) label.setAttribute("y", y + radius(node) + 12); // below its circle
    if (!free(label.getBBox())) label.remove(); // the panel has it; the chosen code comes first
    else boxes.push(label.getBBox());
  }
  for (const sheet of svg.querySelectorAll(".sheet"))
    sheet.classList.toggle("chosen", focus && +sheet.dataset.layer === state.chosen.layer);
  for (const made of svg.querySelectorAll(".node")) {
    const node = nodeOf(made.dataset.id), on = {below: amount(node) < 0, above: amount(node) >= 0,
      slope: node !== start && node.effect === null, chosen: node === state.chosen, pinned: state.pins.includes(node),
      member: group?.nodes.includes(node), path: !focus && !group && path.nodes.includes(node),
      loose: !focus && !group && node !== start && !joined.has(node), dim: (focus || group) && node !== state.chosen && !reached.has(node)};
    for (const [name, is] of Object.entries(on)) made.classList.toggle(name, Boolean(is));
  }
  for (const token of byId("prompt").querySelectorAll("[data-pos]"))
    token.classList.toggle("chosen", focus && +token.dataset.pos === state.chosen.pos);
}

// ---- words

const placeName = pos => `${tokenName(pos)}${data.grid === null ? ` (${pos})` : ""}`;

function nameOf(node) {
  if (node.kind === "target") return data.answer;
  if (node.kind === "bias") return data.exact ? "biases" : "the rest: biases, and what no slope shows";
  const where = placeName(node.pos);
  return node.kind === "embedding" ? `input at ${where}` : `L${node.layer}A${node.atom} at ${where}`;
}

// In a list beside a node, the token is said only where it is another one.
const home = () => state.chosen !== start ? state.chosen.pos : data.grid === null ? data.count - 1 : data.special ? 0 : -1;
const besideName = node => node.kind === "code" && node.pos === home() ? `L${node.layer}A${node.atom}` : nameOf(node);
const signed = value => `${value > 0 ? "+" : ""}${digits(value)}`.replace(/^-/, "\u2212"); // plus: the node raises the answer

// A label with an AUC near chance is no name; the words about a code still say it, beside its AUC.
const NAMED = .7;
const labelOf = node => node.label === "no name" ? "" : node.label;
const plainLabel = node => +(/\(AUC ([\d.]+)/.exec(node.label)?.[1] ?? 1) < NAMED ? "" : labelOf(node).replace(/ \(AUC.*/, "");

// Of the answer, the list has what it really loses without each node, unless slopes add up to it.
const measured = node => node.kind === "target" && !data.exact;
const losses = drawn.filter(node => node !== start && node.effect !== null && (node.kind === "code" || node.pos >= (data.special ?? 0)))
  .map(node => ({source: node, target: start, weight: node.effect, parts: [[null]]}));

function list(place, found, other) {
  const most = Math.max(...found.map(edge => Math.abs(edge.weight)), 1e-30);
  byId(place).replaceChildren(...found.slice(0, 9).map(edge => {
    const node = edge[other], [first] = edge.parts, swatch = make("span", {className: "swatch"});
    swatch.style.background = colourOf(first[0]);
    const head = node.kind !== "bias" && data.heads && edge.target !== start ? [swatch, first[0] < 0 ? "direct" : `H${first[0]}`] : [];
    const bar = make("span", {className: edge.weight < 0 ? "part below" : "part"});
    bar.style.setProperty("--part", `${100 * Math.abs(edge.weight) / most}%`);
    return make("li", {}, make("button", {type: "button", disabled: node.kind === "bias", onclick: () => choose(node, true)},
      make("span", {className: "amount", textContent: signed(edge.weight)}), bar,
      make("span", {textContent: `${besideName(node)}${plainLabel(node) && ": "}${plainLabel(node)}`}), make("small", {}, ...head)));
  }));
  if (!found.length) byId(place).append(make("li", {textContent: "No code of the graph."}));
}

function describe() {
  const node = state.chosen, bySize = (a, b) => Math.abs(b.weight) - Math.abs(a.weight);
  byId("graph").classList.toggle("held", state.held);
  byId("name").textContent = nameOf(node);
  const words = [];
  if (labelOf(node)) words.push(/\(AUC/.test(node.label) ? `Separates best: ${node.label}; .5 is chance.` : `${node.label}.`);
  if (node.kind === "target") words.push(`${digits(node.value)} above ${data.versus === null ? "the mean of all logits" : `\u201c${data.versus}\u201d`}. Point at a circle, or tap it, to see what feeds it.`);
  if (node.kind === "code") words.push(`Value ${digits(node.value)}.`);
  if (node.kind !== "target") {
    words.push(`Influence ${digits(node.influence)}. Attribution (a slope) ${signed(node.attribution)}.`);
    if (node.effect !== null) words.push(`Effect ${signed(node.effect)}: without it the answer really ${node.effect < 0 ? "gains" : "loses"} this much of its logit.`);
  }
  byId("words").textContent = words.join(" ");
  byId("disagree").hidden = !(node.kind !== "target" && node.effect * node.attribution < 0);
  byId("pin").hidden = node.kind === "target";
  byId("pin").textContent = state.pins.includes(node) ? "Unpin" : "Pin";
  const real = measured(node);
  const fed = (real ? losses : edges.filter(edge => edge.target === node)).sort(bySize);
  const biases = real ? [] : fed.filter(edge => edge.source.kind === "bias");
  const codes = fed.filter(edge => edge.source.kind !== "bias").slice(0, 8);
  const looks = data.looks.filter(([layer, , query, key]) => node.kind === "code" && layer === node.layer && query === node.pos
    && codes.some(edge => edge.source.pos === key));
  byId("looks-part").hidden = !looks.length;
  byId("looks").replaceChildren(...looks.slice(0, 4).map(([, head, query, key, pairs, score]) => make("li", {},
    make("b", {textContent: `H${head} looks from ${placeName(query)} to ${placeName(key)}: score ${digits(+score.toPrecision(3))}`}),
    ...pairs.slice(0, 3).map(([here, there, part]) => make("div", {textContent:
      `${here} with ${there}: ${signed(part)} (${digits(+(100 * part / score).toPrecision(2)).replace("-", "\u2212")}\u00a0%)`})))));
  byId("fed-name").textContent = real ? "What it rests on" : "Fed by";
  byId("fed-words").textContent = real ? "how far the logit falls without each" : "";
  byId("path-part").hidden = node !== start || !path.share;
  byId("feeds-part").hidden = node === start;
  list("fed", [...codes, ...biases], "source");
  byId("examples").replaceChildren(...(data.examples[node.id.split("@")[0]] ?? []).map(([value, words, uri]) => !uri
    ? make("li", {}, `${digits(value)}: ${words}`)
    : make("li", {}, make("img", {src: uri, alt: words, title: words, width: 52, height: 52}), digits(value))));
  byId("examples-name").hidden = !byId("examples").children.length;
  list("feeds", edges.filter(edge => edge.source === node).sort(bySize), "target");
}

function update() {
  byId("nodes").value = state.nodes;
  byId("edges").value = state.edges;
  byId("nodes-words").textContent = `${state.nodes}\u00a0%`;
  byId("edges-words").textContent = `${state.edges}\u00a0%`;
  draw();
  describe();
  listGroups();
  remember();
}

// ---- the address

function remember() {
  const words = new URLSearchParams();
  if (state.held && state.chosen !== start) words.set("node", state.chosen.id);
  for (const name in SHARES) if (state[name] !== SHARES[name]) words.set(name, state[name]);
  if (state.pins.length) words.set("pins", state.pins.map(node => node.id).join(","));
  if (state.marked) words.set("marked", state.marked);
  const own = state.groups.map(({name, nodes}) => `${name}:${nodes.map(node => node.id).join(",")}`);
  if (state.own) for (const group of own.length ? own : [""]) words.append("group", group);
  if (`#${words}` === (location.hash || "#")) return; // browsers limit how often an address changes
  try { history.replaceState(null, "", `#${words}`); } catch { /* a frame without an origin */ }
}

function recall() {
  const words = new URLSearchParams(location.hash.slice(1));
  const known = names => (names ?? "").split(",").filter(id => numbers.has(id)).map(nodeOf)
    .filter(node => node.kind === "code" || node.kind === "embedding");
  const [node] = known(words.get("node"));
  Object.assign(state, {chosen: node ?? start, held: node !== undefined, own: words.has("group"), marked: words.get("marked") ?? ""});
  for (const name in SHARES) {
    const value = parseInt(words.get(name) ?? "", 10);
    state[name] = value >= 0 && value <= 100 ? value : SHARES[name];
  }
  state.pins = known(words.get("pins"));
  state.groups = !state.own ? likeNodes() : words.getAll("group").map(text => {
    const cut = text.lastIndexOf(":");
    return {name: text.slice(0, cut), nodes: known(text.slice(cut + 1))};
  }).filter(group => group.name && group.nodes.length);
  if (state.own || state.pins.length) byId("pins").open = true;
}

// ---- pointer and keys

function choose(node, hold) {
  const changes = !shown.nodes.has(node) || (shown.passing && node !== state.chosen);
  Object.assign(state, {chosen: node, held: hold});
  if (changes) draw();
  else mark();
  describe();
  remember();
  if (hold) byId("name").scrollIntoView({block: "nearest"});
  const spot = byId("drawing").querySelector(`[data-id="${node.id}"]`)?.getBoundingClientRect(), card = byId("card");
  if (hold && spot && getComputedStyle(card).position === "fixed") // a sheet at the foot of a phone hides no chosen node
    scrollBy(0, Math.max(0, spot.bottom + 24 - card.getBoundingClientRect().top));
}

function togglePin() {
  const node = state.chosen;
  if (node === start) return;
  state.pins = state.pins.includes(node) ? state.pins.filter(one => one !== node) : [...state.pins, node];
  if (state.pins.length) byId("pins").open = true;
  update();
}

const under = event => { // the nearest node of those whose targets lie under the pointer
  const away = touch => {
    const {x, y, width, height} = touch.getBoundingClientRect();
    return Math.hypot(event.clientX - x - width / 2, event.clientY - y - height / 2);
  };
  const near = document.elementsFromPoint(event.clientX, event.clientY).filter(made => made.matches(".touch"));
  return near.length ? nodeOf(near.reduce((best, touch) => away(touch) < away(best) ? touch : best).dataset.of) : null;
};
byId("drawing").addEventListener("pointermove", event => {
  const node = under(event);
  if (event.pointerType === "mouse" && !state.held && node && node !== state.chosen) choose(node, false);
});
byId("canvas").addEventListener("pointerleave", () => { if (!state.held) choose(start, false); });
byId("drawing").addEventListener("click", event => {
  const node = under(event);
  choose(node ?? start, node !== null);
});
byId("pin").onclick = togglePin;
byId("close").onclick = () => choose(start, false);
for (const name of ["nodes", "edges"])
  byId(name).addEventListener("input", () => { state[name] = +byId(name).value; update(); });

function neighbour(step) {
  const at = node => plan.spots.get(node), row = drawn.filter(node => node.layer === state.chosen.layer && shown.nodes.has(node))
    .sort((a, b) => at(a).y - at(b).y || at(a).x - at(b).x);
  return row[(row.indexOf(state.chosen) + step + row.length) % row.length];
}

function along(from, to) {
  const found = edges.filter(edge => edge[from] === state.chosen && shown.nodes.has(edge[to]));
  return found.length ? found.reduce((best, edge) => Math.abs(edge.weight) > Math.abs(best.weight) ? edge : best)[to] : null;
}

document.addEventListener("keydown", event => {
  if (event.target.closest("input, textarea, summary") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!state.held && !byId("canvas").contains(document.activeElement)) return; // else the arrows scroll
  const moves = {ArrowLeft: () => neighbour(-1), ArrowRight: () => neighbour(1),
    ArrowUp: () => along("source", "target"), ArrowDown: () => along("target", "source"), Escape: () => start};
  if (event.key in moves) {
    const node = moves[event.key]();
    if (node) choose(node, node !== start);
    event.preventDefault();
  } else if (event.key === "p" || event.key === "P") togglePin();
});
addEventListener("resize", draw);
addEventListener("hashchange", () => { if (/=|^$/.test(location.hash)) { recall(); update(); } }); // not at "#sure"

const heads = [...new Set(data.edges.flatMap(edge => edge[3].map(([head]) => head)))].sort((a, b) => a - b);
for (const kind of ["svg", "png"]) byId(`save-${kind}`).addEventListener("click", () =>
  saveDrawing(byId("drawing"), document.title.replace(/[^\w-]+/g, "-"), kind === "png"));
// the whole text or picture, with the tokens that have nodes marked
function showWhole() {
  const whole = byId("prompt");
  if (!picture) {
    whole.classList.toggle("apart", !data.tokens.some(words => /\s/.test(words))); // numbers, for example
    for (const words of data.tokens) whole.append(make("span", {textContent: words}));
    return [...whole.children].forEach((token, pos) => { token.dataset.pos = pos; });
  }
  const [rows, columns] = data.grid;
  whole.append(make("img", {src: picture, alt: "The whole picture"}));
  const over = part("svg", {viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none"}, whole);
  for (let patch = 0; patch < rows * columns; patch++)
    part("rect", {x: patch % columns, y: Math.floor(patch / columns), width: 1, height: 1,
      "data-pos": patch + data.special, "vector-effect": "non-scaling-stroke"}, over);
}

showWhole();
byId("path").append(...[...path.nodes].reverse().map(node =>
  make("li", {}, make("button", {type: "button", disabled: node === start, onclick: () => choose(node, true)}, nameOf(node)))));
const shareWords = `${+(100 * path.share).toPrecision(2)}\u00a0% of all influence`;
if (!path.edges.length) byId("ringed").remove();
byId("path-words").textContent = path.edges.length ? `It carries ${shareWords}, and is ringed.`
  : `No path is drawn: the strongest carries ${shareWords}. Very many small paths make the answer together.`;
byId("heads")?.append(...heads.flatMap(head => {
  const swatch = make("span", {className: "swatch"});
  swatch.style.background = colourOf(head);
  return make("span", {className: "entry"}, swatch, head < 0 ? "direct (no head)" : `head ${head}`);
}));
recall();
update();
byId("canvas").scrollLeft = plan.spots.get(start).x * byId("drawing").clientWidth / plan.width - byId("canvas").clientWidth / 2;
