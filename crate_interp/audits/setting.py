"""The settings of an audit, and which of them hold for a sample."""

from collections.abc import Set
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Setting:
    """The settings of an audit.

    eps: the main eps; grid: all eps. draws: how often the update is shuffled. part: the numbers of
    the samples that have nulls, the grid and the star; limited: of those among them that have
    ceilings, operators, constructions and random output maps too. has_cls: whether token 0 is CLS.
    star: whether to measure also with orthonormal U, and also on patches without CLS, but not with
    both changes at once. tokens: on how many tokens of each sample the lasso is solved.
    """

    eps: float
    grid: tuple[float, ...]
    nulls: tuple[str, ...]
    draws: int
    part: Set[int]
    limited: Set[int]
    has_cls: bool
    causal: bool
    star: bool
    tokens: int
    seed: int

    def kind(self, sample: int) -> tuple[bool, bool]:
        """Returns whether a sample has nulls, and whether it has limits."""
        return sample in self.part, sample in self.limited

    def at(self, sample: int) -> "Setting":
        """Returns the settings of the sample with this number."""
        if sample in self.limited:
            return self
        if sample in self.part:
            return replace(self, limited=frozenset())
        return replace(self, limited=frozenset(), grid=(self.eps,), nulls=(), star=False)
