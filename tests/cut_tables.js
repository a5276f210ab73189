// The tables that reach further right than what holds them, all folds opened; an empty list is right.
() => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const cut = [];
  for (const table of document.querySelectorAll(".md-content table")) {
    let holder = table.parentElement;
    while (holder.parentElement && getComputedStyle(holder).overflowX === "visible") holder = holder.parentElement;
    const right = table.getBoundingClientRect().right, least = holder.getBoundingClientRect().right;
    if (right > Math.min(least, innerWidth) + 1 || table.scrollWidth > table.clientWidth + 1)
      cut.push(`${table.textContent.trim().slice(0, 60)} reaches ${Math.round(right)} px of ${Math.round(least)}`);
  }
  return cut;
}
