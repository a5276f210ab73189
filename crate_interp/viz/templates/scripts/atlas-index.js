// The index of an atlas: cards of atoms, sorted and filtered. `data.atoms` has a row for each atom.
const atoms = data.atoms.map((row, place) => {
  const [layer, atom, fires, effect, low, high, exact, state, raises, lowers, places, texts, agree] = row;
  return {layer, atom, fires, effect, low, high, exact, state, raises, lowers, places, texts, place, agree,
    name: `L${layer}A${atom}`, clear: low > 0 || high < 0};
});
const find = id => document.getElementById(id);
const useful = atom => atom.state || atom.agree === null || atom.fires < .001 ? -2 : atom.agree;
const orders = {
  agree: (a, b) => useful(b) - useful(a) || a.place - b.place,
  effect: (a, b) => a.place - b.place,
  often: (a, b) => b.fires - a.fires,
  seldom: (a, b) => a.fires - b.fires,
  place: (a, b) => a.layer - b.layer || a.atom - b.atom,
};
const kinds = {
  all: () => true, clear: a => a.clear, exact: a => a.exact,
  cls: a => !data.text && a.places[0]?.[1] === 0,
  dead: a => a.state === "dead", dense: a => a.state === "dense",
};

function pictures(atom) {
  const strip = made("span", "strip-of");
  strip.append(...atom.places.map(([sample, token]) => patch(sample, token)));
  return strip;
}

function card(atom) {
  const item = made("li", "card"), link = made("a"), head = made("span", "head");
  link.href = `layer-${atom.layer}.html#a${atom.atom}`;
  head.append(made("b", "name", atom.name),
    made("span", "quiet", atom.state === "dead" ? "never on" :
      `on in ${share(atom.fires)} of tokens${atom.state ? ", " + atom.state : ""}`));
  link.append(head);
  if (data.text) atom.texts.forEach(text => link.append(context(text)));
  else if (atom.places.length) link.append(pictures(atom));
  if (atom.agree !== null) link.append(made("span", "agree", `its inputs agree: ${Math.abs(atom.agree) < .005 ? "<0.01" : atom.agree.toFixed(2).replace("-", "\u2212")} of 1`));
  if (atom.effect !== null) {
    const words = `${interval(atom.effect, atom.low, atom.high)} nats${atom.exact ? "" : ", to first order"}`;
    const line = made("span", atom.clear ? "effect" : "effect unclear",
      atom.clear ? `change of the loss without it: ${words}` : "loss without it: can't tell");
    line.title = words;
    link.append(line);
  }
  const logits = [["raises", atom.raises], ["lowers", atom.lowers]].filter(pair => pair[1]);
  for (const [word, names] of logits)
    link.append(made("span", "quiet", `${word} the logit of ${minus(names)}`));
  if (data.named && !logits.length && atom.effect !== null)
    link.append(made("span", "quiet", `logits: can't tell which ${data.text ? "token" : "class"} it moves`));
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
  find("count").textContent = `${seen.toLocaleString("en")} of ${found.length.toLocaleString("en")} ${data.word}s`;
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
