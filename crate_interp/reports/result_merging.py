"""ci.merge: the result of a run, made of the chunks in its folder without model and data."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crate_interp.audits import run as audits
from crate_interp.audits.result import AuditResult
from crate_interp.circuits.atlases.atlas_run import ATLAS_RULES, Atlas, atlas_result
from crate_interp.circuits.compositions import Composition, composition_result
from crate_interp.circuits.head_ablation import HEAD_RULES, head_result
from crate_interp.circuits.head_ablation_result import HeadAblation
from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.results.result import Result
from crate_interp.saes.result import SaeResult
from crate_interp.saes.run import SAE_RULES, sae_result
from crate_interp.segmentation import run as segmentation
from crate_interp.segmentation.result import SegmentResult
from crate_interp.surgeries.result import SurgeryResult
from crate_interp.surgeries.run import surgery_result
from crate_interp.sweeps.atom_statistics import AtomResult, atom_result
from crate_interp.sweeps.ledgers.chunk_files import Tables
from crate_interp.sweeps.ledgers.ledger import RUN, Ledger, settings_of
from crate_interp.sweeps.linear_probes import LinearProbeResult, linear_result
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import sweep_result
from crate_interp.sweeps.runs.chunked_pass import Rules
from crate_interp.sweeps.runs.chunked_run import digest_of_run, finished
from crate_interp.sweeps.token_features import POOLED


@dataclass(frozen=True)
class Kind:
    """How the chunks of a run become a result.

    rules: how the tables of a stage merge, by its name; that of "untrained-0", "untrained-1", ...
    is "untrained". finish: returns the result of the folded tables of each stage, and the meta.
    """

    result: type[Result]
    rules: Mapping[str, Rules]
    finish: Callable[[Mapping[str, Tables], dict[str, Any]], Result]

    def rules_of(self, stage: object) -> Rules | None:
        """Returns the rules of a stage, or None if there is none of this name."""
        name = re.fullmatch(r"([a-z]+)(-[0-9]{1,9})?", stage) if isinstance(stage, str) else None
        return None if name is None else self.rules.get(name[1])


KINDS: dict[str, Kind] = {
    "sweep": Kind(SweepResult, {"sweep": SweepResult.STORED}, sweep_result),
    "audit": Kind(AuditResult, audits.RULES, audits.audit_result),
    "segmentation": Kind(SegmentResult, segmentation.RULES, segmentation.segment_result),
    "atoms": Kind(AtomResult, {"atoms": AtomResult.STORED}, atom_result),
    "atlas": Kind(Atlas, ATLAS_RULES, atlas_result),
    "linear_probe": Kind(LinearProbeResult, {"features": POOLED}, linear_result),
    "composition": Kind(Composition, {"composition": Composition.STORED}, composition_result),
    "head_ablation": Kind(HeadAblation, HEAD_RULES, head_result),
    "surgery": Kind(SurgeryResult, {"surgery": SurgeryResult.STORED}, surgery_result),
    "saes": Kind(SaeResult, SAE_RULES, sae_result),
}
_ANEW = "Run the same command again with resume=False (--restart)."


def merge(folder: str | Path) -> Any:
    """Returns the result of a run whose chunks are all in its folder, and saves it there.

    folder: what `out` named. Neither the model nor the data is read: the result is the one that
    the last of the processes would have returned, with the same bits.

    Raises ValueError if the folder holds no run, and if chunks are missing or damaged, with the
    number of each.
    """
    out = Path(folder)
    run = settings_of(out)
    kind, rules = _known(out, run)
    ledger = Ledger(out)
    gone = [words for name in rules for words in _gone(ledger, name)]
    if gone:
        missing, damaged = (
            ", ".join(words for way, words in gone if way == state)
            for state in ("missing", "damaged")
        )
        parts = [f"missing: {missing}"] * bool(missing) + [f"damaged: {damaged}"] * bool(damaged)
        raise ValueError(
            f"{str(out)!r} does not hold all chunks of its run. {'; '.join(parts)}. Run the same "
            "command again, which measures these alone."
        )
    meta = {**run["settings"], "command": plain(shlex.join(sys.argv), 1000)}
    finish = partial(_finish, kind=kind, out=out)
    return finished(kind.result, ledger, rules, meta | {"run": digest_of_run(run)}, finish)


def _finish(found: Mapping[str, Tables], meta: dict[str, Any], kind: Kind, out: Path) -> Result:
    try:
        return kind.finish(found, meta)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        # of settings or a table that this version does not write
        raise ValueError(f"{_damaged(out)}: {type(error).__name__} ({error}). {_ANEW}") from error


def _known(out: Path, run: Mapping[str, Any]) -> tuple[Kind, dict[str, Rules]]:
    """Returns the kind of a run and the rules of its stages.

    Raises ValueError for a run.json of another origin.
    """
    name, stages = run.get("kind"), run.get("stages")
    checks.one_of(f"kind in {str(out / RUN)!r}", name, tuple(KINDS))
    kind, found = KINDS[str(name)], {}
    for stage in stages if isinstance(stages, list) else ():
        own = kind.rules_of(stage)
        if own is not None:
            found[stage] = own
    if not found or stages != list(found) or not isinstance(run.get("settings"), dict):
        raise ValueError(f"{_damaged(out)}: its stages are {plain(repr(stages), 80)}. {_ANEW}")
    return kind, found


def _damaged(out: Path) -> str:
    return f"{str(out / RUN)!r} is damaged, or of another version"


def _gone(ledger: Ledger, stage: str) -> list[tuple[str, str]]:
    """Returns ("missing" or "damaged", which chunks) of a stage."""
    chunks = ledger.missing(stage)
    if chunks is None:
        return [("missing", f"all of {stage}")]
    damaged = [chunk for chunk in chunks if ledger.path(stage, chunk).name in ledger.damaged]
    missing = [chunk for chunk in chunks if chunk not in damaged]
    found = (("missing", missing), ("damaged", damaged))
    return [(way, f"{stage} {_numbers(own)}") for way, own in found if own]


def _numbers(chunks: list[int]) -> str:
    """Returns numbers in ascending order as text, such as "3, 7-12"."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ", ".join(f"{one}-{last}" if one < last else f"{one}" for one, last in runs)
