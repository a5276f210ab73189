// The page of a layer: j and k go from atom to atom, / jumps to an atom, a patch shows its image.
"use strict";
const grid = JSON.parse(document.getElementById("grid").textContent);
const articles = [...document.querySelectorAll("article")];
const whole = document.getElementById("whole"), jump = document.getElementById("jump");
const [image, box, words] = whole ? whole.querySelectorAll("img, i, p") : [];

function inWords(patch) {
  const {s: sample, t: token} = patch.dataset;
  if (token === "0") return `image ${sample}: the CLS token, which stands for the whole image`;
  if (!grid[1]) return `image ${sample}, token ${token}`;
  return `image ${sample}, row ${Math.floor((token - 1) / grid[1])}, column ${(token - 1) % grid[1]}`;
}

function see(patch) {
  image.src = `images/${+patch.dataset.s}.webp`;
  image.alt = words.textContent = inWords(patch);
  const place = +patch.dataset.t - 1;
  box.hidden = place < 0 || !grid[1];
  if (!box.hidden) {
    const [rows, columns] = grid;
    box.style.cssText = `left: ${place % columns / columns * 100}%; width: ${100 / columns}%;`
      + `top: ${Math.floor(place / columns) / rows * 100}%; height: ${100 / rows}%`;
  }
  whole.hidden = false;
  const at = patch.getBoundingClientRect(), size = whole.getBoundingClientRect();
  const room = at.bottom + size.height + 16 < innerHeight;
  whole.style.left = `${Math.max(6, Math.min(at.left, innerWidth - size.width - 6))}px`;
  whole.style.top = `${room ? at.bottom + 8 : Math.max(6, at.top - size.height - 8)}px`;
}

// opens the atom that the address names, which may be folded away
const linked = () => { if (location.hash) go(document.getElementById(location.hash.slice(1))); };
addEventListener("hashchange", linked);

if (whole) {
  for (const patch of document.querySelectorAll(".strip-of i")) {
    patch.setAttribute("role", "img");
    patch.setAttribute("aria-label", inWords(patch));
    patch.tabIndex = patch.parentElement.previousElementSibling ? -1 : 0;
  }
  const over = event => {
    const patch = event.target.closest?.(".strip-of i");
    if (patch) see(patch); else whole.hidden = true;
  };
  document.addEventListener("pointerover", over);
  document.addEventListener("focusin", over);
  document.addEventListener("scroll", () => { whole.hidden = true; }, {passive: true});
}

function go(article) {
  if (!article) return;
  const fold = article.closest("details");
  if (fold) fold.open = true;
  article.scrollIntoView({block: "start"});
  (article.querySelector(".strip-of i") ?? article.querySelector("a"))?.focus({preventScroll: true});
  history.replaceState(null, "", `#${article.id}`);
}

function current() {
  const inside = document.activeElement.closest("article");
  return inside ? articles.indexOf(inside) : articles.findIndex(a => `#${a.id}` === location.hash);
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === jump) {
    if (event.key === "Escape") jump.blur();
    if (event.key !== "Enter") return;
    const found = /^\s*(?:L(\d+))?A?(\d+)\s*$/i.exec(jump.value);
    const layer = found?.[1] ?? jump.dataset.layer;
    if (found && layer !== jump.dataset.layer) location.href = `layer-${+layer}.html#a${+found[2]}`;
    else if (found) go(document.getElementById(`a${+found[2]}`));
    return;
  }
  const step = {j: 1, k: -1}[event.key];
  if (step) go(articles[Math.max(0, Math.min(articles.length - 1, current() + step))]);
  if (event.key === "/") { event.preventDefault(); jump.focus(); }
  const patch = document.activeElement.closest(".strip-of i");
  if (patch && event.key.startsWith("Arrow")) {
    const all = [...patch.closest(".strip-of").querySelectorAll(".strip-of i")];
    const next = all[all.indexOf(patch) + {ArrowRight: 1, ArrowLeft: -1}[event.key]];
    if (next) { event.preventDefault(); next.focus(); }
  }
  if (event.key === "Escape" && whole) whole.hidden = true;
});
linked();
