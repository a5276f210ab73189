"""The shard of this process among several: "i/n", or from torchrun's environment variables."""

import os
import re
from typing import NamedTuple


class Shard(NamedTuple):
    """Process number `place` (from 0) of `total`; it takes every total-th chunk."""

    place: int
    total: int

    def __str__(self) -> str:
        return f"{self.place}/{self.total}"


WHOLE = Shard(0, 1)


def shard_of(shard: str | None) -> Shard:
    """Returns the shard that "i/n" names; None takes i and n from RANK and WORLD_SIZE.

    If these variables are unset, this process takes all chunks.

    Raises ValueError unless 0 <= i < n.
    """
    if shard is None:
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None or size is None:
            return WHOLE
        shard, where = f"{rank}/{size}", " (RANK and WORLD_SIZE of the environment)"
    else:
        where = ""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard) if isinstance(shard, str) else None
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(
            f"shard={shard!r}{where}: give 'i/n' with i from 0 to n - 1, such as '0/4' for the "
            "first of four."
        )
    return Shard(int(match[1]), int(match[2]))
