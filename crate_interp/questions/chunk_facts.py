"""The tables that every chunk has, whatever is measured, and what a result's meta takes of them."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from crate_interp.data.picture_contents import contents
from crate_interp.results import sample_ranges
from crate_interp.results.result import Merge, by, sums

Tables = dict[str, pd.DataFrame]


def _whole(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    both = pd.concat([mine, theirs], ignore_index=True)
    row = {"start": both["start"].min(), "stop": both["stop"].max()}
    return pd.DataFrame([row | {"seconds": both["seconds"].sum()}])


# The tables that every chunk has. chunk: the samples of a chunk, and the seconds that it took.
# counts: sums for the meta. skipped: samples that could not be decoded. pictures: what the files of
# samples held when they were read. groups: the groups of the samples of a stream.
OF_A_CHUNK: dict[str, Merge] = {
    "chunk": _whole, "counts": sums("name"), "skipped": by("sample"), "pictures": by("sample"),
    "groups": by("sample"),
}  # fmt: skip


def with_facts(
    tables: Tables, meta: Mapping[str, Any], *others: Tables
) -> tuple[Tables, dict[str, Any]]:
    """Returns the tables that a result stores, and the meta with samples, counts and seconds added.

    others: the tables of the other passes; their seconds are included.
    Raises ValueError if no sample could be decoded.
    """
    own = {name: table for name, table in tables.items() if name not in OF_A_CHUNK}
    every = (tables, *others)
    row: Any = tables["chunk"].iloc[0]
    start, stop = int(row["start"]), int(row["stop"])
    skipped = tables["skipped"].to_dict("records") if "skipped" in tables else []
    if len(skipped) == stop - start:
        raise ValueError(
            f"none of the {stop - start} samples can be decoded. First error: {skipped[0]['why']}"
        )
    count = stop - start - len(skipped)
    known = contents(tables["pictures"], start, stop, count) if "pictures" in tables else {}
    if "groups" in tables:
        known |= sample_ranges.grouped(tables["groups"]["group"])
    facts = {
        "data": [meta["data"][0] | {"start": start, "stop": stop} | known],
        "n_samples": count,
        "seconds": round(sum(float(one["chunk"]["seconds"].iloc[0]) for one in every), 3),
    }
    if "counts" in tables:
        pairs = zip(tables["counts"]["name"], tables["counts"]["value"], strict=True)
        facts["counts"] = {name: int(v) if float(v).is_integer() else float(v) for name, v in pairs}
    return own, {**meta, **facts} | ({"skipped": skipped} if skipped else {})
