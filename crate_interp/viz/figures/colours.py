"""The colours of figures. On a page they become those of its scheme, light or dark."""

# drawn in these, a line reads on white; pages/colours.css has both schemes
INK = "#0a0b0c"
TRAINED = "#1f66a3"
UNTRAINED = "#a8500f"
CHANCE = "#59616a"
FIRST, SECOND = TRAINED, UNTRAINED  # the sides of a comparison, where untrained is dashed

# a colour of a figure -> what stands for it in the SVG of a page
ON_A_PAGE = {
    INK: "currentColor",
    TRAINED: "var(--accent)",
    UNTRAINED: "var(--other)",
    CHANCE: "var(--muted)",
}
