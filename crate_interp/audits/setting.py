"""The settings of an audit, and which of them hold for a sample."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Setting:
    """The settings of an audit.

    eps: the main eps; grid: all eps. draws: how often the update is shuffled. part: how many
    samples, counted from the first, have nulls, the grid and the star; limited: how many have
    ceilings, operators and constructions too. has_cls: whether token 0 is CLS. star: whether to
    measure also with orthonormal U, and also on patches without CLS, but not with both changes at
    once. tokens: on how many tokens of each sample the lasso is solved.
    """

    eps: float
    grid: tuple[float, ...]
    nulls: tuple[str, ...]
    draws: int
    part: int
    limited: int
    has_cls: bool
    causal: bool
    star: bool
    tokens: int
    seed: int

    @property
    def ends(self) -> tuple[int, int]:
        """Returns the indices of the first sample without limits, and the first without nulls."""
        return self.limited, self.part

    def at(self, sample: int) -> "Setting":
        """Returns the settings of the sample at an index of the data."""
        if sample < self.limited:
            return self
        if sample < self.part:
            return replace(self, limited=0)
        return replace(self, limited=0, grid=(self.eps,), nulls=(), star=False)
