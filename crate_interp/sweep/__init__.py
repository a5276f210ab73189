"""Probes over a data set, as a stream: numbers are kept, activations let go."""

from crate_interp.sweep.result import SweepResult
from crate_interp.sweep.run import probe, sweep

__all__ = ["SweepResult", "probe", "sweep"]
