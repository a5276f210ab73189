"use strict";
// The page: what is chosen, how it is drawn, and what pointer, touch and keys do.

const byId = id => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const isText = data.kind === "text", WORD = isText ? "token" : "patch";
const membership = data.map === "membership"; // a map is the same for every token
const MOST_LINES = 200, CHOICES = ["mode", "scale", "off"];

// The page opens at the head that matters most, or where a share of attention is largest.
const state = {pinned: false, key: null, seenHead: null, atom: null, beneath: false,
  mode: "to", scale: "row", over: "none", off: "none", ...data.start};
const EVEN = 5; // full colour is at least this many even shares, so that an even map looks even
const layers = []; // promises of layers, unpacked when a layer is first shown
let layer = null;

// ---- names

function nameOf(token) {
  if (isText) { // long tokens are cut: the page must not move under the pointer
    const words = shown(data.names[token]).trim();
    return `\u201c${words.length > 24 ? `${words.slice(0, 23)}\u2026` : words}\u201d (${token})`;
  }
  return token >= data.special ? `patch (${patchOf(token, data.grid).join(", ")})` : "CLS";
}

const seenFrom = token => // how many tokens this token sees
  Math.min(data.causal ? token + 1 : data.count, data.sees[state.layer]);
const inCircuit = (at, head) => (data.circuit?.nodes ?? []).some(node =>
  node.layer === at && node.kind === 0 && node.number === head);

// ---- values of a head for the token that is asked about

function valuesOf(head) {
  if (state.mode === "from") return layer.column(head, state.query);
  if (state.mode === "reads") return layer.reads(head, representativeOf(state.query, data.count));
  return state.mode === "to" ? layer.row(head, state.query) : layer.cosines(head, state.query);
}

function largestOf(values, head) {
  const alike = state.mode === "alike";
  if (state.scale === "absolute" || (alike && state.scale === "head")) return 1;
  if (state.scale === "head" && state.mode !== "reads") return data.most[state.layer][head];
  // a code is most like itself, and the first token often gets nearly all attention: next to these
  // values, all others would be pale
  const first = membership || (!isText && !data.special) ? null : 0;
  const least = alike || membership ? 1e-30 : Math.min(1, EVEN / seenFrom(state.query));
  return values.reduce((most, value, token) => token === (alike ? state.query : first) && data.count > 1
    ? most : Math.max(most, Math.abs(value)), least);
}

function strongest(values) {
  return values.reduce((best, value, token) =>
    (state.mode === "alike" && token === state.query) || (best !== null && value <= values[best])
      ? best : token, null);
}

const amount = value => membership || state.mode === "alike" ? digits(value)
  : value && value < .0005 ? "<0.1\u00a0%" : percent(value);

// [the largest value for a tile, all in words for the pointer and a screen reader, the rest for the lead]
function factsOf(values) {
  const best = strongest(values) ?? 0, sum = values.reduce((a, b) => a + b, 0);
  const effective = 1 / values.reduce((total, value) => total + value * value, 0);
  const rounded = isFinite(effective) ? effective.toFixed(effective < 9.95 ? 1 : 0) : "0";
  const of = !isText && best < data.special ? "CLS " : isText ? "" : "patch "; // CLS is in no patch of the map
  const most = `${of}${amount(values[best])}`;
  const what = membership ? "membership" : "share";
  if (state.mode === "alike") return [most, `largest cosine ${most}`, ""];
  const rest = !membership && state.mode !== "from" ? `effectively ${rounded} tokens` : `sum ${sum.toFixed(2)}`;
  return [most, `largest ${what} ${most}, ${rest}`, `; ${rest}`];
}

// What a head gives a token; names: those of both tokens, if they are not to be these two's own.
function sentence(head, key, values, names = null) {
  const value = amount(values[key]), who = names ?? nameOf(state.query);
  const whom = names ?? (key === state.query ? "itself" : nameOf(key));
  const where = `L${state.layer}H${head}: `, best = names !== null || key === strongest(values);
  if (state.mode === "alike")
    return `${where}the ${data.alike} of ${who} and ${whom} have the cosine ${value}.`;
  const parts = membership ? data.heads : seenFrom(state.mode === "from" ? key : state.query);
  const most = `${best ? "most, " : ""}${value}`, times = values[key] * parts;
  const words = membership ? `${names ?? nameOf(key)} belongs to this subspace ${best ? "most of all, " : ""}with ${value}`
    : state.mode === "from" ? `${who} gets ${most}, from ${whom}`
    : state.mode === "reads" ? `representative ${representativeOf(state.query, data.count)} reads ${most}, `
      + `from ${names ?? nameOf(key)}`
    : data.map === "shared" ? `${who} shares ${most}, with ${whom}` : `${who} gives ${most}, to ${whom}`;
  return `${where}${words}: ${times.toFixed(times < 10 ? 1 : 0)} times the even share, `
    + `1/${parts} = ${amount(1 / parts)}${factsOf(values)[2]}.`;
}

const longestName = () => Array.from({length: data.count}, (_, token) => nameOf(token))
  .reduce((a, b) => a.length < b.length ? b : a);

// The page must not move under the pointer: words keep the height of the longest that can stand there.
const reserved = new Map(); // for each place: for which kind of words and width
function reserve(element, kind, longest) {
  const now = `${kind} ${element.offsetWidth}`;
  if (reserved.get(element) !== now) {
    const copy = element.cloneNode();
    copy.removeAttribute("aria-live");
    copy.style.minHeight = 0;
    copy.classList.add("changed"); // bold words are wider
    copy.textContent = longest();
    element.after(copy);
    element.style.minHeight = `${Math.ceil(copy.getBoundingClientRect().height)}px`;
    copy.remove();
    reserved.set(element, now);
  }
}

// ---- drawing

function paint(canvas, values, most) {
  if (isText) paintBars(canvas, state.query, values, most);
  else paintMap(canvas, data.grid, values, most);
}

function drawTiles() {
  const every = [];
  [...byId("tiles").children].forEach((tile, head) => {
    const values = every[head] = valuesOf(head), [short, long] = factsOf(values);
    const away = head === state.head && state.off === "head" ? ", off" : "";
    paint(tile.firstChild, values, largestOf(values, head));
    tile.querySelector("b").textContent = `L${state.layer}H${head}`;
    tile.querySelector("small").textContent = short;
    tile.title = long;
    if (data.special) tile.style.setProperty("--cls", Math.min(1, Math.abs(values[0])));
    if (data.without) {
      tile.querySelector("i").textContent = effectOf(head);
      tile.querySelector("i").className = {"+": "lowers", "\u2212": "raises"}[effectOf(head)[0]] ?? "";
    }
    const ringed = inCircuit(state.layer, head);
    tile.classList.toggle("ringed", ringed);
    tile.setAttribute("aria-pressed", head === state.head);
    tile.setAttribute("aria-label",
      `Layer ${state.layer} head ${head}${ringed ? ", in the circuit" : ""}${away}: ${long}`);
  });
  return every;
}

function drawChosen(every) {
  const head = state.head, values = every[head], most = largestOf(values, head);
  byId("chosen-name").textContent = `L${state.layer}H${head}`;
  byId("chosen-words").textContent = membership && state.mode === "to"
    ? `membership of each ${WORD} in this subspace` : `${nameOf(state.query)} ${data.verbs[state.mode]}`;
  const order = Array.from(values.keys()).filter(token => state.mode !== "alike"
    || token !== state.query).sort((a, b) => values[b] - values[a]);
  const best = order.slice(0, isText ? 12 : 8).filter(token => values[token]);
  ranked(byId("keys"), best.map(token => ({name: nameOf(token), words: amount(values[token]),
    share: values[token] / values[best[0]], pick: () => choose({query: token, pinned: true})})));
  if (isText) return drawText(values, most);
  byId("keys-words").textContent = `for L${state.layer}H${head}`;
  paintMap(byId("map"), data.grid, values, most);
  for (const [name, token] of [["large-query", state.query], ["large-key", state.key],
    ["query-mark", state.query]]) mark(byId(name), token, data.grid);
  if (data.special) {
    byId("cls-key").textContent = `CLS ${amount(values[0])}`;
    byId("cls-key").style.setProperty("--share", Math.min(1, Math.abs(values[0]) / most));
    byId("cls-key").classList.toggle("below", values[0] < 0);
    byId("cls").setAttribute("aria-pressed", state.query === 0);
  }
  const signed = state.mode === "alike";
  byId("large").parentElement.classList.toggle("signed", signed);
  byId("bar-words").textContent = `${signed ? amount(-most) : 0} to ${amount(most)}`;
  drawOverlay();
}

function drawOverlay() {
  const found = data.overlays?.[state.layer], isMask = state.over === "masks";
  const isAdded = state.over === "patches", costs = costsNow()?.slice(data.special);
  byId("surface").classList.toggle("faint", Boolean(costs));
  const numbers = costs ? shadesOf(costs) : (isMask ? found?.masks : isAdded ? patchEffects() : found?.components[+state.over]);
  const count = paintPatches(byId("overlay"), data.grid, numbers ?? [], isMask);
  const many = `${count} mask${count === 1 ? "" : "s"}`;
  byId("over-words").textContent = !numbers ? "" : costs ? costWords(costs)
    : isMask ? `MaskCut finds ${many} in the codes of layer ${state.layer}.`
    : isAdded ? "Blue: without this patch the answer is less likely; orange: more likely."
    : `Component ${+state.over + 1} of these codes: blue is above 0, orange below.`;
}

// What each token costs in the rate that is chosen, in nats; undefined if none is.
const costsNow = () => data.costs?.[state.layer][state.over];
const endsOf = costs => [Math.min(...costs), Math.max(...costs)];
const shadesOf = costs => { // from the cheapest to the dearest, 0 to 100
  const [low, high] = endsOf(costs);
  return costs.map(cost => Math.round(100 * (cost - low) / Math.max(high - low, 1e-30)));
};
const costWords = costs => `${state.over === "R" ? "Coding rate" : "The rate in the heads’ subspaces"} after the attention `
  + `of layer ${state.layer}: how much it falls without this ${WORD}, ${endsOf(costs).map(digits).join(" (pale) to ")} nats (dark). `
  + `A dark ${WORD} is least like the others.`;

function drawText(values, most) {
  const costs = costsNow();
  if (byId("over-words")) byId("over-words").textContent = costs ? costWords(costs) : "";
  if (costs) [values, most] = [shadesOf(costs), 100];
  const tokens = [...byId("tokens").querySelectorAll("span")];
  tokens.forEach((token, number) => {
    token.style.setProperty("--share", Math.min(1, Math.abs(values[number]) / most));
    token.classList.toggle("below", values[number] < 0);
    token.classList.toggle("asks", number === state.query);
    token.classList.toggle("pointed", number === state.key);
  });
  const frame = byId("surface").getBoundingClientRect();
  const spot = number => {
    const box = [...tokens[number].getClientRects()].at(-1); // the token's space may be on the line before
    return [(box.left + box.right) / 2 - frame.left, box.top - frame.top + 3];
  };
  const [x0, y0] = spot(state.query), order = Array.from(values.keys());
  const chosen = order.filter(key => key !== state.query && Math.abs(values[key]) > most / 20)
    .sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, MOST_LINES);
  byId("lines").replaceChildren(...(costs ? [] : chosen).map(key => {
    const [x, y] = spot(key), share = Math.min(1, Math.abs(values[key]) / most);
    const bend = Math.min(y, y0) - Math.min(34, 8 + Math.abs(x - x0) / 6 + Math.abs(y - y0) / 8);
    return svg("path", {d: `M${x0} ${y0} C${x0} ${bend} ${x} ${bend} ${x} ${y}`,
      "stroke-width": .8 + 2.6 * share, "stroke-opacity": .25 + .65 * share,
      class: values[key] < 0 ? "below" : "above"});
  }));
}

function drawLens() {
  byId("lens-panel").hidden = !layer.lens;
  if (!layer.lens) return;
  byId("lens-layer").textContent = state.layer;
  const next = data.goesOn[state.query];
  ranked(byId("lens"), layer.lens.of(state.query).map(({place, value}) => ({share: value,
    name: `\u201c${shown(data.answers[place])}\u201d${place === next ? " \u2713" : ""}`,
    words: percent(value)})));
  byId("lens-words").textContent = next === undefined ? "This is the last token." : !data.causal ?
    `The text has \u201c${shown(data.names[state.query])}\u201d here.` : `The text continues with \u201c${shown(data.names[state.query + 1])}\u201d.`;
}

function drawAtoms(below) {
  const panel = Boolean(layer.atoms);
  byId("atoms-panel").hidden = byId("atom-panel").hidden = !panel;
  if (!panel) return;
  const here = layer.atoms.of(state.query).filter(one => one.value > 0).slice(0, 8);
  const total = layer.atoms.total(state.query), most = here[0]?.value ?? 1;
  byId("atoms-words").textContent = `of ${nameOf(state.query)} in layer ${state.layer}`;
  const beneath = state.beneath && state.atom !== null && Boolean(below?.atoms);
  const atom = state.atom ?? here[0]?.place ?? 0, from = beneath ? below : layer;
  ranked(byId("atoms"), here.map(({place, value}) => ({name: `A${place}`, share: value / most,
    words: `${digits(value)} · ${percent(value / total)}`, chosen: place === atom && !beneath, grey: data.without?.atoms && !isTested(place),
    pick: () => choose({atom: place === state.atom && !beneath ? null : place})})));
  byId("atom-name").textContent = `L${state.layer - beneath}A${atom}`;
  const values = from.atoms.where(atom), largest = values.reduce((a, b) => Math.max(a, b), 1e-30);
  const on = values.filter(value => value > 0).length, where = values.indexOf(largest);
  byId("atom-words").textContent = `It is one of the ${from.atoms.ranks} largest atoms in ${on} of `
    + `${data.count} tokens${on ? `; its largest value is ${digits(largest)}, at ${nameOf(where)}` : ""}.`;
  if (!isText) return paintMap(byId("atom-map"), data.grid, values, largest);
  byId("atom-tokens").querySelectorAll("span").forEach((token, number) =>
    token.style.setProperty("--share", values[number] / largest));
}

// The codes of the layer below that match at the token that looks and at the one that it looks at.
function drawWhy(every, below) {
  if (!byId("why-panel")) return;
  const head = state.seenHead ?? state.head, query = state.query, values = every[head];
  const others = [...values.keys()].filter(token => token >= Math.max(1, data.special) && token !== query && values[token] > 0);
  const key = state.key ?? others.reduce((best, token) => values[token] > values[best] ? token : best, others[0]);
  byId("why-panel").hidden = !layer.match || state.mode !== "to" || !(values[key] > 0);
  if (byId("why-panel").hidden) return;
  const score = layer.score(head, query, key), most = strongest(values);
  byId("why-name").textContent = `L${state.layer}H${head} looks at ${nameOf(key)}`;
  byId("why-words").textContent = `${percent(values[key])} of its attention, score ${score.toFixed(2)}`;
  byId("why-most").textContent = most === key ? "" : `Most, ${percent(values[most])}, goes to ${
    most === query ? `${nameOf(most)} itself: its query and key are one code` : nameOf(most)}. Point at a ${WORD} of the map to ask about it.`;
  for (const [side, token, other] of [["query", query, key], ["key", key, query]]) {
    const found = layer.matching(below, head, token, other).slice(0, 5);
    const rest = {name: "all else", part: score - found.reduce((sum, one) => sum + one.part, 0)};
    const largest = Math.max(...[...found, rest].map(one => Math.abs(one.part)), 1e-30);
    byId(`why-${side}-name`).textContent = `${nameOf(token)}, ${side === "query" ? "which looks" : "which it looks at"}`;
    ranked(byId(`why-${side}`), [...found, rest].map(({place, name, part}) => ({name: name ?? `L${state.layer - 1}A${place}`,
      below: part < 0, words: `${part > 0 ? "+" : "\u2212"}${Math.abs(part).toFixed(2)}`, share: Math.abs(part) / largest,
      pick: name ? null : () => choose({atom: place, beneath: true})})));
  }
}

let waiting = false;
function draw() { // at most once a frame
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(async () => {
    const number = state.layer;
    const both = [number, Math.max(0, number - 1)].map(at => layers[at] ??= Layer.load(at, data));
    const [loaded, below] = await Promise.all(both).catch(error => {
      byId("readout").textContent = `This browser cannot unpack the page: ${error.message}`;
      return [];
    });
    waiting = false;
    if (!loaded) return;
    if (number !== state.layer) return draw(); // the slider has moved meanwhile
    layer = loaded;
    drawNow(below);
  });
}

function drawNow(below) {
  if (state.mode === "alike" && !layer.codes) state.mode = "to";
  const every = drawTiles();
  drawChosen(every);
  drawLens();
  drawAtoms(below);
  drawWhy(every, below);
  if (byId("over")) byId("over").value = state.over;
  byId("tiles-words").textContent = data.legends[state.mode].replace("#", seenFrom(state.query));
  byId("layer").value = state.layer;
  byId("layer-number").textContent = state.layer;
  const head = state.seenHead ?? state.head, own = membership && state.mode === "to";
  const key = state.key ?? (own ? state.query : strongest(every[head])) ?? state.query;
  byId("readout").textContent = sentence(head, key, every[head]);
  reserve(byId("readout"), state.mode, () => sentence(head, key, every[head], longestName()));
  if (data.without) drawWithout();
  byId("explorer").classList.toggle("pinned", state.pinned);
  byId("kept").textContent = state.pinned ? `${nameOf(state.query)} is kept` : "";
  for (const node of document.querySelectorAll("#circuit .node"))
    node.classList.toggle("here", [`H${state.head}`, `A${state.atom}`].some(name =>
      node.dataset.name === `L${state.layer}${name}`));
  for (const name of CHOICES) for (const button of document.getElementsByName(name))
    button.checked = button.value === state[name];
  remember();
  performance.mark("drawn");
}

// ---- choosing

function choose(what) {
  if ("atom" in what) state.beneath = false; // whether the atom is of the layer below
  Object.assign(state, what);
  draw();
}

function toLayer(number) {
  choose({layer: Math.max(0, Math.min(data.layers - 1, number)), key: null, atom: null});
}

function toHead(number) {
  choose({head: (number + data.heads) % data.heads, seenHead: null});
}

function ask(query, pinned) {
  choose({query, pinned, key: null});
}

// A click keeps a token; a second click on this token lets it go.
function click(query) {
  ask(query, !(state.pinned && state.query === query));
}

function step(columns, rows) { // moves the token that is asked about
  const wide = isText ? 1 : data.grid[1], to = state.query + columns + rows * wide;
  if (!isText && state.query < data.special) return ask(data.special, true);
  ask(Math.max(0, Math.min(data.count - 1, to)), true);
}

function remember() { // keeps the choice in the page's address, if the page may change its address
  const names = ["layer", "head", ...CHOICES, "over", ...(state.pinned ? ["query"] : [])];
  const kept = `#${names.map(name => `${name}=${state[name]}`).join("&")}`;
  if (kept === location.hash) return; // browsers let an address change 200 times in 10 seconds
  try {
    history.replaceState(null, "", kept);
  } catch { /* a frame without an origin of its own has no address to change */ }
}

function recall() {
  const most = {layer: data.layers, head: data.heads, query: data.count};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (Object.hasOwn(most, name) && /^\d+$/.test(value) && +value < most[name]) {
      state[name] = +value;
      if (name === "query") state.pinned = true;
    }
    const known = name === "over" ? byId(name)?.options ?? []
      : CHOICES.includes(name) ? document.getElementsByName(name) : [];
    if ([...known].some(one => one.value === value)) state[name] = value;
  }
}

// ---- pointer, touch and keys

function tokenAt(event) {
  const token = event.target.closest?.("#tokens span");
  return token ? +token.dataset.number : null;
}

const KEYS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return choose({pinned: false, key: null});
  if (event.key === "[") return toHead(state.head - 1);
  if (event.key === "]") return toHead(state.head + 1);
  const arrow = KEYS[event.key];
  // inputs and menus use the arrow keys themselves; so does a circuit that is wider than its box
  const field = event.target.closest("input, select, .scroller");
  const own = field?.id === "circuit" ? field.scrollWidth > field.clientWidth : field;
  if (!arrow || (own && !event.shiftKey)) return;
  // up and down scroll the page, unless the picture or the text has the focus
  if (!event.shiftKey && arrow[1] && !event.target.closest("#surface")) return;
  event.preventDefault();
  if (event.shiftKey) step(...arrow);
  else toLayer(state.layer + arrow[0] - arrow[1]);
}

function listen() {
  const surface = byId("surface");
  const at = event => isText ? tokenAt(event) : patchAt(event, surface, data.grid);
  surface.addEventListener("pointermove", event => {
    const token = at(event);
    if (event.pointerType !== "touch" && !state.pinned && token !== null && token !== state.query)
      ask(token, false);
  });
  surface.addEventListener("click", event => {
    const token = at(event);
    if (token !== null) click(token);
  });
  byId("layer").addEventListener("input", event => toLayer(+event.target.value));
  byId("over")?.addEventListener("change", event => choose({over: event.target.value}));
  byId("cls")?.addEventListener("click", () => click(0));
  byId("save")?.addEventListener("click", () => {
    const [image, map] = byId("large").children;
    const scale = Math.max(1, Math.ceil(448 / image.naturalWidth));
    const [width, height] = [scale * image.naturalWidth, scale * image.naturalHeight];
    saveCanvas(width, height, context => {
      context.filter = "grayscale(1) opacity(.42)";
      context.drawImage(image, 0, 0, width, height);
      context.filter = "none";
      context.imageSmoothingEnabled = false;
      context.drawImage(map, 0, 0, width, height);
    }, `L${state.layer}H${state.head}.png`);
  });
  for (const name of CHOICES) for (const button of document.getElementsByName(name))
    button.addEventListener("click", event => { // keys send clicks too, and keep the focus
      if (event.detail) button.blur(); // the arrow keys are for layers again
      choose({[name]: button.value});
    });
  document.addEventListener("keydown", key);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  byId("scheme")?.addEventListener("change", draw);
  addEventListener("resize", draw);
  addEventListener("hashchange", () => { recall(); draw(); });
}

// Shows the key under the pointer, on a map or on the bars of a text.
function pointKeys(element, canvas, head) {
  const at = event => {
    if (!isText) return patchAt(event, canvas, data.grid);
    const box = canvas.getBoundingClientRect(), place = (event.clientX - box.left) / box.width;
    return place >= 0 && place < 1 ? Math.floor(place * data.count) : null;
  };
  const show = event => choose({key: at(event), seenHead: head});
  element.addEventListener("pointermove", show);
  if (head === null) element.addEventListener("click", show); // a finger does not hover
  element.addEventListener("pointerleave", () => choose({key: null, seenHead: null}));
}

function build() {
  for (const image of document.querySelectorAll("img.faint")) image.src = byId("surface").firstChild.src;
  for (let head = 0; head < data.heads; head++) {
    const canvas = make("canvas"), words = make("span", {}, [make("b"),
      ...(data.without ? [make("i", {title: "points of the answer's probability"})] : []), " ", make("small")]);
    const ofCls = make("span", {className: "of-cls", textContent: "CLS"});
    const tile = make("button", {type: "button", className: "tile"}, [canvas, ...(data.special ? [ofCls] : []), words]);
    tile.addEventListener("click", () => {
      toHead(head);
      if (data.without && state.off === "none") choose({off: "head"});
    });
    pointKeys(tile, canvas, head);
    byId("tiles").append(tile);
  }
  if (isText) ["tokens", "atom-tokens"].forEach(name => tokenSpans(byId(name), data.names));
  else pointKeys(byId("large"), byId("map"), null);
  if (data.without) {
    buildMost();
    buildHeads();
  }
  if (data.special) {
    byId("cls-key").addEventListener("pointerenter", () => choose({key: 0}));
    byId("cls-key").addEventListener("pointerleave", () => choose({key: null}));
  }
  if (!data.circuit) return;
  byId("circuit-panel").hidden = false;
  const {all, edges, note} = data.circuit;
  byId("circuit-note").textContent = note + (!all ? " (no edges)"
    : edges.length < all ? ` (the ${edges.length} largest of ${all} edges)` : "");
  if (all) byId("circuit").append(circuitDrawing(data.circuit, node => {
    toLayer(node.layer);
    choose(node.kind ? {atom: node.number} : {head: node.number});
  }));
}

document.addEventListener("DOMContentLoaded", () => {
  build();
  recall();
  listen();
  draw();
});
window.explorer = {state, values: head => Array.from(valuesOf(head ?? state.head))};
