"use strict";
// The answer without a head, an atom or a patch: all were computed when the page was made.

const off = data.without;

// How far the probability of the answer moves without a part, in points.
function pointsOf(row) {
  const points = Math.round((row[0] - off.own[0]) / 100);
  return `${points > 0 ? "+" : points < 0 ? "\u2212" : ""}${Math.abs(points)}`;
}

const effectOf = head => pointsOf(off.heads[state.layer][head]);

const nameAt = (at, head) => `L${at}H${head}`;

// A cell for each head, as strong as its effect on the answer: blue raises it, orange lowers it.
function buildHeads() {
  const most = Math.max(1, ...off.heads.flat().map(([own]) => Math.abs(own - off.own[0])));
  off.heads.forEach((rows, at) => {
    byId("every-head").append(make("b", {textContent: `L${at}`}), ...rows.map((row, head) => {
      const words = `${nameAt(at, head)}: ${pointsOf(row)} points without it`;
      const cell = make("button", {type: "button", title: words, className: row[0] > off.own[0] ? "below" : "",
        style: {"--share": Math.sqrt(Math.abs(row[0] - off.own[0]) / most)}});
      cell.dataset.name = nameAt(at, head);
      cell.setAttribute("aria-label", words);
      cell.addEventListener("click", () => choose({layer: at, head, off: "head", key: null, atom: null}));
      return cell;
    }));
  });
}

// Buttons that go to the head, the atom and the patch without which the answer moves most.
function buildMost() {
  const kinds = {
    head: off.heads.flatMap((rows, at) => rows.map((row, head) => [row, nameAt(at, head), {layer: at, head}])),
    atom: Object.entries(off.atoms).flatMap(([at, rows]) => Object.entries(rows).map(([atom, row]) =>
      [row, `L${at}A${atom}`, {layer: +at, atom: +atom}])),
    patch: off.patches.map((row, patch) => {
      const query = patch + data.special;
      return [row, nameOf(query), {query, pinned: true, over: "patches"}];
    })};
  for (const [kind, rows] of Object.entries(kinds)) {
    if (!rows.length) continue;
    const change = ([row]) => Math.abs(row[0] - off.own[0]);
    const [row, name, place] = rows.reduce((best, one) => change(one) > change(best) ? one : best);
    const words = `${kind === "patch" ? "" : `${kind} `}${name} ${pointsOf(row)}`;
    const button = make("button", {type: "button", textContent: words});
    button.addEventListener("click", () => choose({...place, off: kind, key: null}));
    byId("most").append(button);
  }
}

const answerName = number => `\u201c${shown(off.names[number]).trim()}\u201d`;

// The part that is chosen: its name, and its row [own share, likeliest answer, its share], if it has one.
function chosenPart() {
  if (state.off === "head")
    return [`head L${state.layer}H${state.head}`, off.heads[state.layer][state.head]];
  if (state.off === "patch")
    return [nameOf(state.query), off.patches[state.query - data.special]];
  const atom = state.atom ?? layer.atoms.of(state.query)[0]?.place ?? 0;
  const at = state.layer - (state.beneath && state.atom !== null);
  return [`atom L${at}A${atom}`, off.atoms[at]?.[atom]];
}

const isTested = atom => Boolean(off.atoms[state.layer]?.[atom]);

function answerWithout(name, row) {
  const [own, best] = off.own;
  if (state.off === "none") return `The answer is ${answerName(best)}, ${tenths(own)}.`;
  if (!row) return state.off === "patch" ? "Point at a patch to cover it with the mean colour."
    : `${name.replace("atom ", "")} was not tested.`;
  const [left, top, share] = row, now = `${left < own ? "falls to" : left > own ? "rises to" : "stays at"} ${tenths(left)}`;
  return top === best
    ? `Without ${name} the answer is still ${answerName(best)}; its probability ${now}.`
    : `Without ${name} the answer becomes ${answerName(top)}, ${tenths(share)}; ${answerName(best)} ${now}.`;
}

// The longest sentence that the kind of part that is off can give.
function longestWithout() {
  const {head = [], atom = [], patch = []} = {head: off.heads.flat(), patch: off.patches,
    atom: Object.values(off.atoms).flatMap(Object.values)};
  const rows = {head, atom, patch}[state.off] ?? [];
  const name = state.off === "patch" ? longestName() : `${state.off} L${data.layers - 1}${state.off === "head" ? "H" : "A"}`
    + (state.off === "head" ? data.heads - 1 : Math.max(...Object.values(off.atoms).flatMap(Object.keys)));
  return rows.map(row => answerWithout(name, row)).reduce((a, b) => a.length < b.length ? b : a, "");
}

const tenths = share => `${(share / 100).toFixed(1)}\u00a0%`; // near 10 % two answers often round alike

// A bar for the model's answer, with a tick where it was, and one for the answer that takes its place.
function drawVersus(row) {
  const [own, best] = off.own, [left, top, share] = row ?? [own, best, own];
  const rows = [[best, left, own], ...(top === best ? [] : [[top, share, null]])];
  byId("versus").replaceChildren(...rows.flatMap(([answer, after, before]) => {
    const bar = make("span", {className: `amount${answer === best ? "" : " new"}`, style: {"--share": after / 1e4}});
    if (before !== null && before !== after) bar.append(make("i", {style: {"--at": before / 1e4}}));
    const words = before === null || before === after ? tenths(after) : `${tenths(before)} \u2192 ${tenths(after)}`;
    return [make("bdi", {textContent: answerName(answer)}), bar, make("span", {textContent: words})];
  }));
}

function drawWithout() {
  const words = byId("without-words"), [name, row] = state.off === "none" ? [] : chosenPart();
  byId("explorer").classList.toggle("headless", state.off === "head");
  for (const cell of byId("every-head").children)
    if (cell.dataset.name) cell.setAttribute("aria-pressed", cell.dataset.name === nameAt(state.layer, state.head));
  words.classList.toggle("changed", state.off !== "none" && Boolean(row) && row[1] !== off.own[1]);
  words.textContent = answerWithout(name, row);
  reserve(words, state.off, longestWithout);
  drawVersus(row);
}

// How much each patch adds to the probability of the answer, in 1/100 of the largest change.
function patchEffects() {
  const changes = off.patches.map(([left]) => off.own[0] - left);
  const most = Math.max(1, ...changes.map(Math.abs));
  return changes.map(change => Math.round(100 * change / most));
}
