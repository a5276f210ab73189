"use strict";
// Groups of nodes: those with like inputs and outputs to begin with, and what the reader makes of them.

const LIKE = .4; // the least cosine with a group's first node

// Sums of the weights between each code and other nodes, as a unit vector: into it, or out of it.
function directions(from, to) {
  const found = new Map(drawn.map(node => [node, new Map()]));
  for (const edge of edges) if (edge[from].kind !== "bias") found.get(edge[to])?.set(edge[from], edge.weight);
  for (const vector of found.values()) {
    const length = Math.hypot(...vector.values());
    for (const [node, weight] of vector) vector.set(node, weight / length);
  }
  return found;
}

function regionOf(nodes) { // where most of the nodes are
  const places = [...new Set(nodes.map(node => node.pos))].sort((a, b) => a - b);
  if (places.length === 1) return tokenName(places[0]);
  if (data.grid === null) return `tokens ${places[0]} to ${places.at(-1)}`;
  const patches = places.filter(pos => pos >= data.special).map(pos => pos - data.special), [rows, columns] = data.grid;
  const third = (numbers, size) => Math.min(2, Math.floor(3 * numbers.reduce((sum, one) => sum + one + .5, 0) / numbers.length / size));
  const row = ["top", "middle", "bottom"][third(patches.map(patch => Math.floor(patch / columns)), rows)];
  return `patches, ${row} ${["left", "middle", "right"][third(patches.map(patch => patch % columns), columns)]}`;
}

function nameGroup(nodes, taken) { // by layer and the commonest label, or by layer and place
  const labels = new Map();
  for (const words of nodes.map(plainLabel).filter(Boolean)) labels.set(words, (labels.get(words) ?? 0) + 1);
  const [words, count] = [...labels].reduce((best, one) => one[1] > best[1] ? one : best, ["", 0]);
  const name = `L${nodes[0].layer} ${2 * count > nodes.length ? words : regionOf(nodes)}`.replaceAll(":", " ").slice(0, 36);
  let number = 1;
  while (taken.has(number > 1 ? `${name} ${number}` : name)) number++;
  return number > 1 ? `${name} ${number}` : name;
}

// Codes of a layer whose weights have a cosine of LIKE or more with those of a first code, in and out.
// The codes with most influence come first, so that the groups are the same at every opening.
function likeNodes() {
  const sides = [directions("source", "target"), directions("target", "source")], groups = [];
  const left = new Set(drawn.filter(node => node.kind === "code").sort((a, b) => b.influence - a.influence));
  const cosine = (a, b) => [...a].reduce((sum, [node, weight]) => sum + weight * (b.get(node) ?? 0), 0);
  for (const first of left) {
    const nodes = [...left].filter(node => node === first || (node.layer === first.layer
      && sides.every(side => cosine(side.get(first), side.get(node)) >= LIKE)));
    for (const node of nodes) left.delete(node);
    if (nodes.length > 1) groups.push({name: nameGroup(nodes, new Set(groups.map(group => group.name))), nodes});
  }
  return groups;
}

function change(groups) {
  Object.assign(state, {groups, own: true});
  if (!groups.some(group => group.name === state.marked)) state.marked = "";
  update();
}

const cleaned = words => words.replaceAll(":", " ").trim();
function rename(group, name) {
  if (!name || state.groups.some(one => one.name === name)) return listGroups();
  if (state.marked === group.name) state.marked = name;
  change(state.groups.map(one => one === group ? {name, nodes: group.nodes} : one));
}

function listGroups() {
  byId("pinned").replaceChildren(...state.pins.map(node =>
    make("li", {}, make("button", {type: "button", textContent: nameOf(node), onclick: () => choose(node, true)}))));
  byId("group-line").hidden = !state.pins.length;
  byId("groups").replaceChildren(...state.groups.map(group => {
    const measured = group.nodes.filter(node => node.effect !== null), marked = group.name === state.marked;
    const sum = measured.reduce((total, node) => total + node.effect, 0);
    const some = measured.length < group.nodes.length ? `, ${measured.length} measured` : "";
    const mark = make("button", {type: "button", textContent: marked ? "Unmark" : "Mark", ariaPressed: marked, onclick: () => {
      state.marked = marked ? "" : group.name;
      Object.assign(state, {chosen: start, held: false});
      update();
      if (state.marked) byId("canvas").scrollIntoView({block: "nearest"});
    }});
    const name = make("input", {value: group.name, maxLength: 40, size: 20, ariaLabel: "Name of the group"});
    name.onchange = () => rename(group, cleaned(name.value));
    return make("li", {title: group.nodes.map(nameOf).join(", ")}, mark, name,
      make("span", {textContent: `${group.nodes.length} nodes${some}; effects add up to ${digits(sum)}`}),
      make("button", {type: "button", textContent: "Dissolve", onclick: () => change(state.groups.filter(one => one !== group))}));
  }));
}

byId("group").onclick = () => {
  const name = cleaned(byId("group-name").value);
  if (!name || !state.pins.length) return;
  const group = {name, nodes: state.pins};
  byId("group-name").value = "";
  Object.assign(state, {pins: [], marked: name});
  change([...state.groups.filter(one => one.name !== name), group]);
};
