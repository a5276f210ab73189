"""The colours of figures; pages replace them by the colours of the light or dark scheme."""

# lines in these colours are legible on white; styles/colours.css has the colours of pages
INK = "#0a0b0c"
TRAINED = "#1f66a3"
UNTRAINED = "#a8500f"
CHANCE = "#59616a"
FIRST, SECOND = TRAINED, UNTRAINED  # the two sides of a comparison; untrained curves are dashed

# colour of a figure -> its replacement in the SVG of a page
ON_A_PAGE = {
    INK: "currentColor",
    TRAINED: "var(--accent)",
    UNTRAINED: "var(--other)",
    CHANCE: "var(--muted)",
}
