"""Audits the embedded models and prints the table of the README.

python demos/tables.py, which is `make tables`. The results are kept in runs/tables.
"""

import crate_interp as ci

MODELS = {
    "crate-tiny-fashion": "embedded:fashion",
    "crate-tiny-pictures": "embedded:pictures",
    "crate-tiny-lm": "embedded:held-out-text",
}
SHOWN = ("compresses", "gradient", "output_map", "descends", "solves")
HEADER = ("model", "claim", "yes", "no", "depends", "other", "value", "excess", "share")


def rows(name: str, result: ci.AuditResult) -> list[list[str]]:
    """Returns the rows of the table about one model.

    other: layers by construction, or where we can't tell. value, excess, share: the lowest and the
    highest over layers, and over frames where there are frames, at the asked eps.
    """
    table = result.table("overview").set_index("name")
    found = []
    for claim in SHOWN:
        row = table.loc[claim]
        other = {"by construction": row["by construction"], "can't tell": row["undecided"]}
        words = ", ".join(f"{count} {word}" for word, count in other.items() if count)
        counts = [str(row[word]) for word in ("kept", "broken", "depends")]
        numbers = [row[word] for word in ("value", "excess", "share")]
        found.append([name, row["claim"], *counts, words, *numbers])
    return found


def markdown(lines: list[list[str]]) -> str:
    """Returns lines as a table of Markdown."""
    text = [HEADER, tuple("---" for _ in HEADER), *map(tuple, lines)]
    return "\n".join("| " + " | ".join(cells).replace("|  |", "| |") + " |" for cells in text)


def main() -> None:
    lines: list[list[str]] = []
    for name, data in MODELS.items():
        result = ci.audit(ci.load(name), data)
        result.save(f"runs/tables/{name}")
        lines += rows(name, result)
        print(result.headline())
        heads = result.table("heads")["cosine"]
        lean = f"{(heads < 0).sum()} of {len(heads)} heads"
        print(f"W_O,k and U_k^T have a negative cosine in {lean}.", end="\n\n")
    print(markdown(lines))


if __name__ == "__main__":
    main()
