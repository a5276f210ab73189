"""Probes over a data set, as a stream: numbers are kept, activations let go."""

from crate_interp.sweep.atoms import AtomResult, atoms
from crate_interp.sweep.linear import linear_probe
from crate_interp.sweep.result import SweepResult
from crate_interp.sweep.run import probe, sweep

__all__ = ["AtomResult", "SweepResult", "atoms", "linear_probe", "probe", "sweep"]
