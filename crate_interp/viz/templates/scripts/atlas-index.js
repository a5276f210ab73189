// The index of an atlas: cards of atoms, sorted and filtered. `data.atoms` has a row for each atom.
"use strict";
const data = JSON.parse(document.getElementById("atoms").textContent);
const atoms = data.atoms.map((row, place) => {
  const [layer, atom, fires, effect, low, high, exact, state, raises, lowers, cls, texts] = row;
  return {layer, atom, fires, effect, low, high, exact, state, raises, lowers, cls, texts, place,
    name: `L${layer}A${atom}`, clear: low > 0 || high < 0};
});
const find = id => document.getElementById(id);
const orders = {
  effect: (a, b) => a.place - b.place,
  often: (a, b) => b.fires - a.fires,
  seldom: (a, b) => a.fires - b.fires,
  place: (a, b) => a.layer - b.layer || a.atom - b.atom,
};
const kinds = {
  all: () => true, clear: a => a.clear, exact: a => a.exact, cls: a => a.cls[0] === 1,
  dead: a => a.state === "dead", dense: a => a.state === "dense",
};

function made(tag, kind, words) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (words !== undefined) element.textContent = words;
  return element;
}

const signed = value => (value > 0 ? "+" : "") + Number(value.toPrecision(2));
const share = value => `${(100 * value).toFixed(value < .0995 ? 1 : 0)} %`;

function pictures(atom) {
  const strip = made("span", "strip-of"), sheet = Math.floor(atom.atom / data.block);
  strip.style.setProperty("--sheet", `url("patches/L${atom.layer}-${sheet}.webp")`);
  strip.style.setProperty("--row", atom.atom % data.block);
  atom.cls.forEach((cls, rank) => {
    const patch = made("i", cls ? "cls" : "");
    patch.style.setProperty("--rank", rank);
    strip.append(patch);
  });
  return strip;
}

function context([before, at, after]) {
  const line = made("span", "line", before);
  line.append(made("mark", "", at), after);
  return line;
}

function card(atom) {
  const item = made("li", "card"), link = made("a"), head = made("span", "head");
  link.href = `layer-${atom.layer}.html#a${atom.atom}`;
  head.append(made("b", "name", atom.name),
    made("span", "quiet", atom.state === "dead" ? "never fires" :
      `fires in ${share(atom.fires)}${atom.state ? ", " + atom.state : ""}`));
  link.append(head);
  if (data.text) atom.texts.forEach(text => link.append(context(text)));
  else if (atom.cls.length) link.append(pictures(atom));
  if (atom.effect !== null) {
    const low = atom.low === null ? "-\u221e" : signed(atom.low);
    const high = atom.high === null ? "\u221e" : signed(atom.high);
    const ends = atom.low === null && atom.high === null ? "" : ` (${low} to ${high})`;
    const how = atom.exact ? "" : ", first order";
    link.append(made("span", atom.clear ? "effect" : "effect unclear",
      `${signed(atom.effect)} nats${ends}${how}`));
  }
  const logits = [["raises", atom.raises], ["lowers", atom.lowers]].filter(pair => pair[1]);
  for (const [word, names] of logits)
    link.append(made("span", "quiet", `${word} ${names.split(", ")[0]}`));
  item.append(link);
  return item;
}

let count = data.shown;
function chosen() {
  const words = find("search").value.trim().toLowerCase();
  const layer = find("layer").value;
  const fits = atom => (layer === "" || atom.layer === +layer) && kinds[find("kind").value](atom)
    && (!words || atom.name.toLowerCase() === words || atom.name.toLowerCase().startsWith(words)
      || `${atom.raises} ${atom.lowers} ${atom.texts.join(" ")}`.toLowerCase().includes(words));
  return atoms.filter(fits).sort(orders[find("order").value]);
}

function show() {
  const found = chosen();
  find("cards").replaceChildren(...found.slice(0, count).map(card));
  const seen = Math.min(count, found.length);
  find("count").textContent = `${seen.toLocaleString("en")} of ${found.length.toLocaleString("en")} atoms`;
  find("more").hidden = found.length <= count;
}

for (const id of ["layer", "kind", "order", "search"])
  find(id).addEventListener("input", () => { count = data.shown; show(); });
find("more").addEventListener("click", () => { count += data.shown; show(); });
document.addEventListener("keydown", event => {
  const typing = event.target.closest("input, select");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !typing) { event.preventDefault(); find("search").focus(); }
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || !"jk".includes(event.key)) return;
  const links = [...document.querySelectorAll(".card a")];
  const at = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, at + (event.key === "j" ? 1 : -1)))]?.focus();
});
show();
