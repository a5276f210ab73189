"""AttentionReason: why a head looks there, as tables and as sentences."""

from typing import Any

import pandas as pd

from crate_interp.circuits.circuit import head_name
from crate_interp.core.safe_text import plain
from crate_interp.results.result import Result, first

STREAM, BIAS, OTHERS = -1, -2, -3  # in place of the number of an atom
MODEL, UNTRAINED = "model", "untrained"
TAKEN_OUT = (3, 10, 30)  # how many atoms are taken out at once
WEIGHED = ("query", "key")
KINDS = ("strongest", "largest", "rotated", "random")


def _per_cent(share: float) -> str:
    words = f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"
    return words if share >= 1e-4 else "under 0.01 %"


def piece_name(layer: int, atom: int) -> str:
    """Returns the name of a piece of the stream, such as "L0A12"."""
    return {STREAM: "the rest", BIAS: "biases"}.get(atom, f"L{layer}A{atom}")


class AttentionReason(Result):
    """Why a head looks from one token at another: the score, as a sum over pairs of atoms.

    `table()`, "pairs": query_layer, query_atom, key_layer, key_atom, query_value, key_value, part.
    The parts add up to `meta["score"]`, the score before the softmax. An atom of -1 stands for the
    rest of the stream (what no atom wrote), -2 for biases; -3 is the last row, all further pairs.
    value: the code of the atom at that token, times nanochat's residual factors; of a
    representative, the mean over its tokens.
    "pieces": side, layer, atom, value, part: the parts summed over the other side; each side adds
    up to the score. "effects": network, side, k, kind, attention, low, high, answer: real forwards
    without k atoms at the query, at the key, or at both. kind: "nothing" (k = 0); "strongest", the
    atoms with the largest parts; "largest", those with the largest codes; "random" active atoms,
    the mean of 10 draws and their lowest and highest; "rotated", the coordinates of the stream with
    the largest parts along random orthonormal axes. attention: the pattern from query to key.
    answer: the logit of the model's answer less the mean of all. network: "model", or "untrained"
    for a network of random weights and its own strongest atoms. "picture": webp, rows, columns.
    """

    KIND = "attention_reason"
    MAIN = "pairs"
    STORED = dict.fromkeys(("pairs", "pieces", "effects", "picture"), first)
    ALONE = "a reason explains one score of one sample, and reasons do not merge."

    def sentences(self) -> list[str]:
        """Returns what the strongest atoms of the key carry, what others carry, and the score.

        Of the counts up to ten it is the one for which the strongest atoms and the best of the
        others lie furthest apart.
        """
        table: Any = self._table("effects").query(f"network == '{MODEL}' and side == 'key'")
        meta, runs = self.meta, table.pivot(index="k", columns="kind", values="attention")
        query, key = (plain(meta[side]) for side in WEIGHED)
        head, share = head_name(meta["layer"], meta["head"]), _per_cent(meta["attention"])
        if runs.empty:
            few = "Too few atoms are on to take some out."
            return [f"{head}: {query} gives {key} {share} of its attention.", few]
        apart = runs["strongest"] - runs.drop(columns="strongest").min(axis=1)
        k = int(apart[apart.index <= TAKEN_OUT[1]].abs().idxmax())
        left, low = runs.loc[k], table[table["k"] == k].set_index("kind")["low"]
        words = {
            "largest": "largest atoms",
            "rotated": "best random axes",
            "random": "random atoms",
        }
        rival = min(words, key=lambda kind: left[kind])
        ratio = left[rival] / max(left["strongest"], 1e-30)
        more = "more" if ratio < 0.95 else "less" if ratio > 1.05 else "as much"
        said = {kind: _per_cent(share) for kind, share in left.items()}
        atoms: Any = self._table("pieces").query("side == 'key' and atom >= 0").nlargest(k, "part")
        names = list(map(piece_name, atoms["layer"], atoms["atom"]))
        names[2 if k > TAKEN_OUT[0] else k :] = [f"{k - 2} others"] * (k > TAKEN_OUT[0])
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        lead = (
            f"{head}: {query} looks at {key} because of {listed}: without them {share} falls to "
            f"{said['strongest']}."
        )
        if left["strongest"] >= low["random"]:  # no less than without random atoms
            why = f"{head}: {k} atoms don't explain why {query} looks at {key}"
            lead = f"{why}: without them it is {said['strongest']}, from {share}."
        elif left["rotated"] < 0.95 * left["strongest"]:
            lead = (
                f"{head}: random axes explain better than atoms why {query} gives {key} {share}. "
                f"Without {k} atoms {said['strongest']} is left."
            )
        even = f"Even attention would give it {_per_cent(meta['even'])}."
        if meta.get("most", key) != key:  # results of earlier versions do not say
            even = f"Most, {_per_cent(meta['most_share'])}, goes to {plain(meta['most'])}. {even}"
        start = [lead, even]
        if meta["attention"] < meta["even"]:
            start = [f"{head} hardly looks from {query} at {key}: {share}. {even}", lead]
        return [
            start[0],
            f"{start[1]} The {k} {words[rival]} carry {more}: without them {said[rival]} is left.",
            f"Without {k} random atoms of the key {said['random']} is left, without the {k} "
            f"largest {said['largest']}. The score is {meta['score']:.2f}, and pairs of atoms give "
            f"{meta['score_of_atoms']:.2f} of it. The rest comes from biases and from what no atom "
            "wrote into the stream. The scale of the norm is held as it is. We tell of "
            f"{k} atoms: of 3 and 10 the count at which atoms and the next best differ most.",
        ]

    def legend(self) -> str:
        """Returns the meaning of the columns of the table of pairs."""
        return (
            "part: what a pair of atoms adds to the score before the softmax. value: the code. "
            "Atom -1 is the rest of the stream, -2 the biases, -3 all further pairs."
        )

    def _notebook_table(self) -> pd.DataFrame:
        return self._table("pairs").head(20)
