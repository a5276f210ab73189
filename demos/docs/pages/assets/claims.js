// Above the folded claims: fields that show those with some words and an answer.
const folds = [...document.querySelectorAll("details.claims")];
const form = document.createElement("p");
form.className = "filter";
form.innerHTML = `<label>Words <input type="search" placeholder="LayerNorm, ViT, eq. 12"></label>
  <label>Answer <select><option value="">any</option><option>yes</option><option>no</option>
  <option>depends</option><option>can't tell</option></select></label>
  <output aria-live="polite"></output>`;
folds[0].before(form);
const [words, answer, left] = form.querySelectorAll("input, select, output");
function show() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const fold of folds) {
    let here = 0;
    for (const row of fold.querySelectorAll("tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = (answer.value && row.cells[1].textContent.trim() !== answer.value)
        || !wanted.every(word => text.includes(word));
      here += !row.hidden;
    }
    count += here;
    const any = wanted.length > 0 || answer.value !== "";
    fold.open = any && here > 0;
    fold.hidden = any && here === 0;
  }
  left.textContent = `${count} shown`;
}
form.addEventListener("input", show);
// The answers get a sign and a colour, in every table whose second column is one.
const signs = {yes: "+", no: "\u2212", depends: "~", "can't tell": "?"};
for (const cell of document.querySelectorAll("tbody td:nth-child(2)")) {
  const sign = signs[cell.textContent.trim()];
  if (sign) {
    cell.className = `answer ${cell.textContent.trim().slice(0, 3)}`;
    cell.dataset.sign = sign;
  }
}
