// The page of a layer: j and k go from atom to atom, / jumps to an atom, a patch shows its image.
const find = id => document.getElementById(id);
const whole = find("whole"), jump = find("jump"), button = find("more");
const [image, box, words] = whole ? whole.querySelectorAll("img, i, p") : [];

function inWords(sample, token) {
  if (!token) return `image ${sample}: the CLS token, which stands for the whole image`;
  const place = token - 1, columns = data.grid[1];
  return `image ${sample}, row ${Math.floor(place / columns)}, column ${place % columns}`;
}

function bar(most, value) {
  const element = made("em", "", Number(value.toPrecision(3)));
  element.style.setProperty("--share", value / most);
  return element;
}

function patches(atom, name) {
  const strip = made("div", "strip-of");
  strip.setAttribute("role", "group");
  strip.setAttribute("aria-label", `where ${name} was largest`);
  atom.tokens.forEach(([sample, token, value], rank) => {
    const item = made("span"), cut = patch(sample, token);
    Object.assign(cut.dataset, {s: sample, t: token});
    cut.setAttribute("role", "img");
    cut.setAttribute("aria-label", inWords(sample, token));
    cut.tabIndex = rank ? -1 : 0;
    item.append(cut, bar(atom.tokens[0][2], value));
    strip.append(item);
  });
  return strip;
}

function contexts(atom) {
  const list = made("ol", "contexts");
  for (const [, , value, ...parts] of atom.tokens) {
    const item = made("li");
    item.append(made("small", "", Number(value.toPrecision(3))),
      context(parts, (value / atom.tokens[0][2]).toFixed(2)));
    list.append(item);
  }
  return list;
}

function told(atom) {
  const line = made("p");
  if (atom.state === "dead") {
    line.append("Never on in this data.");
    return line;
  }
  const clear = atom.low > 0 || atom.high < 0, onCls = atom.tokens.filter(each => !each[1]).length;
  const few = !clear && atom.ablated > 0 && atom.ablated < 32, ends = `${interval(atom.effect, atom.low, atom.high)} nats`;
  const size = few ? `${signed(atom.effect)} nats` : ends;
  if (few) line.title = ends;
  const where = atom.ablated ? ` on ${atom.ablated} ${data.unit}${few ? ", too few to tell" : ""}` : ", to first order";
  line.append(`On in ${share(atom.fires)} of tokens${atom.state ? ` (${atom.state})` : ""}. `,
    made("b", clear ? "effect" : "effect unclear", clear ? `Without it the loss ${atom.effect > 0 ? "rises" : "falls"}`
      : "We can't tell whether the loss changes without it"), ` (${size}${where}).`);
  if (onCls && !data.text) {
    const first = atom.tokens[0][1] ? "" : " Its largest token is CLS.";
    line.append(`${first} ${onCls} of its ${atom.tokens.length} top tokens `
      + `${onCls === 1 ? "is" : "are"} CLS.`);
  }
  return line;
}

const NAMES = ["atom", "fires", "effect", "low", "high", "ablated", "state",
  "raises", "lowers", "near", "tokens", "heights"];

// how often the atom's value lies in each octave, as bars; from 2^low to the largest
function histogram(atom) {
  const bars = [...atom.heights].map(Number), on = bars.flatMap((height, place) => height ? place : []);
  if (!on.length) return "";
  const [from, to] = [on[0], on.at(-1)], label = place => Number((2 ** (data.octave + place)).toPrecision(2));
  const found = made("div", "octaves");
  found.setAttribute("role", "img");
  found.setAttribute("aria-label", `values from ${label(from)} to ${label(to + 1)}, by octave`);
  found.append(made("small", "", label(from)));
  for (const height of bars.slice(from, to + 1)) {
    const one = made("i");
    one.style.height = `${height / 9 * 100}%`;
    found.append(one);
  }
  found.append(made("small", "", label(to + 1)));
  return found;
}

function article(row) {
  const atom = Object.fromEntries(NAMES.map((name, place) => [name, row[place]]));
  const found = made("article"), head = made("h3"), link = made("a");
  const name = `L${data.layer}A${atom.atom}`;
  found.id = `a${atom.atom}`;
  link.href = `#${found.id}`;
  link.title = `${data.word} ${atom.atom} of layer ${data.layer}`;
  link.textContent = name;
  head.append(link);
  found.append(head, told(atom));
  if (atom.tokens.length) found.append(data.text ? contexts(atom) : patches(atom, name));
  const facts = made("div", "facts");
  facts.append(histogram(atom));
  const moves = ["raises", "lowers"].filter(way => atom[way]).map(way => `${way} the logit of ${minus(atom[way])}`);
  if (data.named && !moves.length && atom.effect !== null) moves.push(`logits: can't tell which ${data.text ? "token" : "class"} it moves`);
  if (moves.length) facts.append(made("p", "", moves.join("; ")));
  const near = made("p", "quiet", "nearest: ");
  atom.near.forEach(([layer, other, cosine], rank) => {
    const there = made("a", "", `L${layer}A${other}`);
    there.href = `layer-${layer}.html#a${other}`;
    near.append(rank ? ", " : "", there, ` ${cosine}`);
  });
  facts.append(near);
  found.append(facts);
  return found;
}

function see(cut) {
  const {s: sample, t: token} = cut.dataset;
  image.src = `images/${+sample}.webp`;
  image.alt = words.textContent = inWords(sample, +token);
  box.hidden = !+token;
  if (!box.hidden) {
    const [rows, columns] = data.grid, place = +token - 1;
    box.style.cssText = `left: ${place % columns / columns * 100}%; width: ${100 / columns}%;`
      + `top: ${Math.floor(place / columns) / rows * 100}%; height: ${100 / rows}%`;
  }
  whole.hidden = false;
  const at = cut.getBoundingClientRect(), size = whole.getBoundingClientRect();
  const room = at.bottom + size.height + 16 < innerHeight;
  whole.style.left = `${Math.max(6, Math.min(at.left, innerWidth - size.width - 6))}px`;
  whole.style.top = `${room ? at.bottom + 8 : Math.max(6, at.top - size.height - 8)}px`;
}

if (whole) {
  const over = event => {
    const cut = event.target.closest?.(".strip-of i");
    if (cut) see(cut); else whole.hidden = true;
  };
  document.addEventListener("pointerover", over);
  document.addEventListener("focusin", over);
  document.addEventListener("scroll", () => { whole.hidden = true; }, {passive: true});
}

// layers/layer-L.js calls this with the other atoms of the layer
let wanted = "";
function more(atoms) {
  find("atoms").append(...atoms.map(article));
  button.hidden = true;
  if (wanted) go(find(wanted));
}

function load() {
  if (button.hidden) return;
  const script = made("script");
  script.src = `layers/layer-${data.layer}.js`;
  document.body.append(script);
}

function go(found) {
  if (!found) return;
  wanted = "";
  found.scrollIntoView({block: "start"});
  (found.querySelector(".strip-of i") ?? found.querySelector("a"))?.focus({preventScroll: true});
  history.replaceState(null, "", `#${found.id}`);
}

// goes to an atom, which may still be in the other file
function reach(id) {
  if (find(id)) return go(find(id));
  wanted = id;
  load();
}

function current(articles) {
  const inside = document.activeElement.closest("article");
  return inside ? articles.indexOf(inside) : articles.findIndex(a => `#${a.id}` === location.hash);
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === jump) {
    if (event.key === "Escape") jump.blur();
    if (event.key !== "Enter") return;
    const found = /^\s*(?:L(\d+))?A?(\d+)\s*$/i.exec(jump.value);
    if (!found) return;
    const layer = +(found[1] ?? data.layer);
    if (layer === data.layer) reach(`a${+found[2]}`);
    else location.href = `layer-${layer}.html#a${+found[2]}`;
    return;
  }
  const step = {j: 1, k: -1}[event.key], articles = [...document.querySelectorAll("article")];
  if (step) go(articles[Math.max(0, Math.min(articles.length - 1, current(articles) + step))]);
  if (event.key === "/") { event.preventDefault(); jump.focus(); }
  const cut = document.activeElement.closest(".strip-of i");
  if (cut && event.key.startsWith("Arrow")) {
    const all = [...cut.closest(".strip-of").querySelectorAll(".strip-of i")];
    const next = all[all.indexOf(cut) + {ArrowRight: 1, ArrowLeft: -1}[event.key]];
    if (next) { event.preventDefault(); next.focus(); }
  }
  if (event.key === "Escape" && whole) whole.hidden = true;
});

const linked = () => { if (/^#a\d+$/.test(location.hash)) reach(location.hash.slice(1)); };
addEventListener("hashchange", linked);
button.addEventListener("click", load);
find("atoms").append(...data.atoms.map(article));
button.hidden = data.count === data.atoms.length;
button.textContent = `Show the other ${(data.count - data.atoms.length).toLocaleString("en")} ${data.word}s`;
linked();
