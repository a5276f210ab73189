"""SegmentResult: how well each layer and head segments, with intervals, beside what chance has."""

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from crate_interp.files import write_text
from crate_interp.segmentation.scores import WAYS

CELL = {"other_image": "mask of another image", "random": "random order", "untrained": "untrained"}
FILES = ("scores.csv", "heads.csv", "images.csv", "segment.json")


@dataclass(frozen=True)
class SegmentResult:
    """What an evaluation of segmentation found.

    `scores`: a row per rule, resolution, way and layer (empty where the head is fixed over all layers; `head_layer` and `head` say
    which where both halves agree), with 95 % bootstrap intervals over images, and beside it the score of the same maps on the mask
    of the next image, with their patches in random order, of the untrained network, of all foreground and of a centred map.
    `heads`: a row per rule, resolution, layer and head. `images`: a row per image with an object: its score by the fixed head, mass
    rule, tokens. `meta`: where it comes from.
    """

    scores: pd.DataFrame
    heads: pd.DataFrame
    images: pd.DataFrame
    meta: dict[str, Any]

    def layers(self, rule: str = "mass", resolution: str = "token") -> pd.DataFrame:
        """The rows of `scores` of one rule ("mass" or "top") and resolution ("token" or "pixel"); ValueError for another."""
        table: Any = self.scores
        found = table[(table["rule"] == rule) & (table["resolution"] == resolution)]
        if not len(found):
            raise ValueError(
                f"rule={rule!r}, resolution={resolution!r}: give 'mass' or 'top', 'token' or 'pixel'."
            )
        return found.reset_index(drop=True)

    def cells(
        self, rule: str = "mass", resolution: str = "token"
    ) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text: layers down, ways across; value, then in brackets the chance levels that CELL names."""
        table: Any = self.layers(rule, resolution)
        rows = []
        for layer in range(self.meta["n_layers"]):
            here = table[table["layer"] == layer].set_index("way")
            rows.append([str(layer), *(_cell(here.loc[way]) for way in WAYS)])
        return ["layer", *WAYS], rows

    def overall(self, rule: str = "mass", resolution: str = "token") -> dict[str, Any]:
        """The row of the head fixed over all layers, as a dictionary."""
        table: Any = self.layers(rule, resolution)
        return table[table["layer"].isna()].iloc[0].to_dict()

    def __repr__(self) -> str:
        row = self.overall()
        return (
            f"SegmentResult of {self.meta['model'] or 'a model'} on {row['n']} images: fixed head {row['value']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}], mask of another image {number(row['other_image'])}, centre {row['centre']:.3f}"
        )

    def _repr_html_(self) -> str:
        header, rows = self.cells()
        told = f"{repr(self)}; score ({', '.join(CELL.values())})"
        return f"<p>{html.escape(told)}</p>" + pd.DataFrame(rows, columns=header).to_html(
            index=False
        )

    def save(self, folder: str | Path) -> Path:
        """Writes scores.csv, heads.csv, images.csv and segment.json into `folder`, the last one last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in zip(FILES, (self.scores, self.heads, self.images), strict=False):
            write_text(folder / name, table.to_csv(index=False))
        write_text(folder / FILES[-1], json.dumps(self.meta, indent=2) + "\n")
        return folder


def _cell(row: Any) -> str:
    head = "" if pd.isna(row["head"]) else f" head {int(row['head'])}"
    return f"{row['value']:.3f}{head} ({', '.join(number(row[name]) for name in CELL)})"


def number(value: float) -> str:
    """Three decimals, or a dash for what was not measured."""
    return "-" if pd.isna(value) else f"{value:.3f}"
