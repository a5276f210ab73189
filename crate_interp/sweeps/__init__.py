"""Sweeps: probes measure a model on streamed data, and keep numbers but not activations."""

from crate_interp.sweeps.atom_statistics import AtomResult, atoms
from crate_interp.sweeps.linear_probes import LinearProbeResult, linear_probe
from crate_interp.sweeps.probe_cache import probe
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import sweep
from crate_interp.sweeps.stores.activation_store import open_store
from crate_interp.sweeps.stores.writing import store

__all__ = [
    "AtomResult", "LinearProbeResult", "SweepResult", "atoms", "linear_probe", "open_store",
    "probe", "store", "sweep",
]  # fmt: skip
