"""The shard and the device of this process among several, as torchrun's variables say."""

import os
import re
from typing import NamedTuple

import torch


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


def device_of_rank() -> str:
    """Returns this process's GPU, "cuda:N" for LOCAL_RANK N, or "cpu" without GPUs.

    If this process sees fewer GPUs than there are ranks (for example, only its own GPU), N is taken
    modulo the number of visible GPUs.
    """
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
