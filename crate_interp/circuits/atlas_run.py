"""ci.atlas: for every dictionary atom, what it fires on, what it changes, and its nearest atoms."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack, cast

import pandas as pd
import torch

from crate_interp.circuits import atom_effects
from crate_interp.circuits.excerpts import excerpts
from crate_interp.circuits.logits import directions, logit_effects, named
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hook_points import check_atoms
from crate_interp.models.hooked import HookedModel, check_gradients
from crate_interp.models.runtimes import with_weights
from crate_interp.questions.answers import Loss, check_logits, loss_on
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Chunk, check_one_length
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.results.result import ENOUGH, Result, by, first, sums
from crate_interp.results.sample_ranges import counted
from crate_interp.stats.intervals import LEVEL, interval_of_sums, signs
from crate_interp.sweeps.atom_statistics import AtomResult, Atoms

_KEYS = ["layer", "atom"]
_LEAST = 8  # samples of which half may be used for exact effects
_FEW = ("logits", "ablations", "directions", "images", "contexts")  # tables of the last pass
_SHOWN = ["layer", "atom", "firing_rate", "first_order", "ablation", "raises", "lowers", "nearest"]


def _atlas(result: Result) -> pd.DataFrame:
    """Returns the main table: each atom's statistics, effects and directions in one row."""
    effects: Any = result.table("effects")
    mean, low, high = interval_of_sums(effects)
    numbers = {"first_order": mean, "first_order_low": low, "first_order_high": high}
    effects = effects[_KEYS].assign(**numbers)
    atoms = result.table("atoms").merge(effects, on=_KEYS)
    tried = result.table("ablations")
    exact = atom_effects.ablated(tried, result.groups_at(tried["sample"]))
    atoms = atoms.merge(exact, on=_KEYS, how="left")
    atoms = atoms.assign(ablated=atoms["ablated"].fillna(0).astype(int))
    sides: Any = result.table("directions")
    if len(result.table("logits")):
        measured = sides[_KEYS].merge(named(result.table("logits")), on=_KEYS, how="left")
        sides = sides.assign(**{side: measured[side] for side in ("raises", "lowers")})
    return atoms.merge(sides, on=_KEYS)


class Atlas(AtomResult):
    """All results about every atom: an AtomResult with effects, neighbours and examples.

    `table()` has a row per layer and atom: the columns of `ci.atoms`, then

    - first_order, first_order_low, first_order_high: the change of a sample's loss if the atom
      is set to 0 at every token, to first order and in nats. The columns hold the mean of this
      change over all samples, and the 95 % interval of the mean;
    - ablation, ablation_low, ablation_high, ablated: the same change, measured by running the model
      without the atom, and the number of samples on which it was measured. For atoms that were not
      ablated, the change is NaN and the number is 0. The atom with the largest effect in its layer
      is chosen on every second sample, and its row has the change on the other samples;
    - raises, lowers: names of classes or tokens whose logits the atom moves most. If the stream is
      a sum (crate-alpha, gpt-baseline, nanochat-crate), the effect on logit t is that of the direct
      path: `<row of W_out, g * w_t>` less the mean over t, with w_t the column of W_U and g the
      weight of the last norm (a logit lens). Effects through later layers are left out. In crate
      and crate-lm each step re-codes the stream, so there is no direct path. There the effect is
      the first-order effect on the logit over the samples of `ablate`, with its 95 %
      interval; effects whose interval contains 0 are left out. Each logit takes its own
      backward. So if there are more than 16 classes or tokens, only the 8 that the model answers
      most often are measured;
    - nearest, nearest_cosine: the atoms of other layers whose columns of D have the largest cosine
      with the atom's column, and the largest of these cosines.

    An effect above 0 means that the loss grows without the atom. Each interval is for one atom by
    itself: of 100 atoms without any effect, about 5 have an interval that excludes 0.
    `table("agreement")` has the rank correlation of both effects in each layer. `table("images")`
    has the images of `table("top")`, and `table("contexts")` the text around its tokens.
    meta["loss"] names the loss.

    In a merged atlas, each effect is the mean over the samples on which either atlas measured it.
    """

    KIND = "atlas"
    MAIN = "atlas"
    STORED = {
        **AtomResult.STORED,
        "effects": sums(*_KEYS),
        "logits": sums(*_KEYS, "logit", "name"),
        "ablations": by("sample", *_KEYS),
        "directions": first,
        "images": by("sample"),
        "contexts": by("sample", "token"),
    }
    DERIVED = {
        **AtomResult.DERIVED,
        "atlas": _atlas,
        "agreement": lambda result: atom_effects.agreement(result.table("ablations")),
    }

    def row(self, layer: int, atom: int) -> dict[str, Any]:
        """Returns the main table's row of one atom. Raises ValueError if there is no such atom."""
        self.top(layer, atom)
        table: Any = self._table("atlas")
        return table[(table["layer"] == layer) & (table["atom"] == atom)].iloc[0].to_dict()

    def merge(self, other: Result) -> Any:
        """Returns the atlas over both atlases' samples, with excerpts of merged top tokens only.

        Raises ValueError as `Result.merge` does.
        """
        merged = super().merge(other)
        places = merged.stored["top"][["sample", "token"]].drop_duplicates()
        keys = {"images": ["sample"], "contexts": ["sample", "token"]}
        shown = {
            name: merged.stored[name].merge(places[key].drop_duplicates(), on=key)
            for name, key in keys.items()
        }
        return Atlas({**merged.stored, **shown}, merged.meta)

    def finding(self) -> str:
        """Returns how many atoms there are, how many are dead, and the effect of the top atom."""
        return f"{super().finding()} {self.tally()} {self.largest()}"

    def tally(self) -> str:
        """Returns how many atoms change the loss if removed, and how many would by chance."""
        exact = self.clear("ablation")[1] > 0
        clear, tested = self.clear("ablation" if exact else "first_order")
        if not tested:
            return f"We can't tell whether any {self.word()} matters: too few {self.few}."
        chance, verb = LEVEL * tested, "changes" if clear == 1 else "change"
        tried = f"{'Only ' * (clear <= chance)}{clear:,} of {tested:,} tested {self.word()}s"
        order = "" if exact else ", to first order"
        return f"{tried} {verb} the loss when removed{order}; chance gives {chance:,.0f}."

    def lead(self, layer: int | None = None) -> tuple[int, int]:
        """Returns (layer, atom) of the atom that `largest` is about."""
        found = self._strongest(layer)
        return int(found["layer"]), int(found["atom"])

    def largest(self, layer: int | None = None) -> str:
        """Returns which atom changes the loss most, if we can tell, and by how much without it.

        We can't tell if the interval of the change holds 0. The atom has the largest exact effect
        on every second sample of `ablate`, and the other samples give its effect. If no atom was
        set to 0 on two samples, it is the atom with the largest first-order effects, by their root
        mean square. layer: only atoms of this layer.
        """
        found, unit, word = self._strongest(layer), self.meta["unit"], self.word()
        ends = self.interval_words(found["low"], found["high"], form="+.2g")
        name, size = f"L{found['layer']}A{found['atom']}", f"{found['effect']:+.2g} nats"
        place = "" if layer is None else f" of layer {layer}"
        chosen, where = "", ", to first order"
        if found["exact"]:
            chosen, where = f", chosen on other {unit},", f" on {counted(found['n'], unit)}"
        if signs(found["low"], found["high"]):
            lead = f"Of the {word}s{place}, {name} matters most to the loss."
        else:
            lead = f"We can't tell which {word}{place} matters most to the loss."
            ends = "too few to tell" if found["n"] < ENOUGH else ends
        return f"{lead} Removing {name}{chosen} changes the loss by {size}{where} ({ends})."

    def _strongest(self, layer: int | None) -> dict[str, Any]:
        """Returns layer, atom, effect, low, high, n of the top atom, and whether it is exact."""
        tried, effects = (self._of_layer(name, layer) for name in ("ablations", "effects"))
        found = atom_effects.strongest(tried, self.groups_at(tried["sample"]))
        if found is not None:
            return found | {"exact": True}
        place = (effects["squares"] / effects["n"]).idxmax()
        row = self.row(*effects.loc[place, _KEYS].astype(int).tolist())
        ends = {"effect": row["first_order"], "n": self.meta["n_samples"], "exact": False}
        return row | ends | {end: row[f"first_order_{end}"] for end in ("low", "high")}

    def _of_layer(self, name: str, layer: int | None) -> Any:
        """Returns a table, or its rows of one layer."""
        table: Any = self._table(name)
        return table if layer is None else table[table["layer"] == layer]

    def clear(self, effect: str) -> tuple[int, int]:
        """Returns how many intervals of an effect exclude 0, and how many intervals there are.

        effect: "first_order" or "ablation". If no atom had an effect, about 5 % of the intervals
        would exclude 0.
        """
        checks.one_of("effect", effect, ("first_order", "ablation"))
        table: Any = self._table("atlas")
        low, high = table[f"{effect}_low"], table[f"{effect}_high"]
        return int((signs(low, high) != 0).sum()), int(low.notna().sum())

    def _notebook_table(self) -> pd.DataFrame:
        table: Any = self._table("atlas")
        return table.sort_values("first_order", key=abs, ascending=False).head(20)[_SHOWN]


@with_weights
@in_full_precision
def atlas(
    model: HookedModel, data: Data, *, top: int = 9, ablate: int = 32, **run: Unpack[Run]
) -> Perhaps[Atlas]:
    """Measures every atom of every layer: statistics, top activations, effects, nearest atoms.

    Statistics and the `top` tokens of each atom come from one pass over `data` (`ci.atoms`).
    Effects are changes of the loss of a sample, in nats, if the atom is set to 0 at every token.
    For images, the loss is the cross-entropy of the label if the data's labels are classes of the
    model, otherwise of the model's own answer. For text, it is the cross-entropy of the next token,
    averaged over a window, or of the masked tokens (crate-bert). Effects are measured

    - to first order, for every atom j on all samples: `sum_t (0 - z_tj) d loss / d z_tj`, with z_tj
      the atom's code at token t. One forward and one backward of a batch give the effects of all
      atoms of all layers;
    - exactly, for 6 atoms of each layer, by running the layers above without the atom, on `ablate`
      samples spread evenly over the data (at most a quarter of the samples, or half of fewer than
      32). The 6 atoms are those with the largest first-order effects on the other samples, by their
      root mean square.

    `table("agreement")` has the rank correlation of both effects in each layer. Look at it before
    you trust first-order effects: if a code far from 0 is removed, the change of the loss may
    differ from what the slope at the code says, even in sign.

    If a forward of a sample costs 1, each sample costs about 6, and each sample of `ablate` a
    further 3 for each layer and 1 for each measured logit. With ablate=0 neither exact
    effects nor effects on logits are measured. Memory does not grow with the number of samples.
    Intervals are over texts, not over windows, whose neighbours are alike.

    The shard that finishes last also measures the `ablate` samples.
    `ci.viz.atlas_pages(atlas, out)` writes an atlas as pages.

    Args:
        model: A hooked model with logits.
        data: As in `ci.sweep`.
        top: How many patches or contexts to show for each atom.
        ablate: On how many samples to run the model without each atom. 0: none.
        run: As in `ci.sweep`.

    Returns:
        A row for each atom: its statistics, effects and nearest atoms; and its strongest tokens.

    Raises:
        ValueError: As `ci.sweep` does, for models without logits (a masked autoencoder, a CLIP),
            for windows of one token, and under torch.inference_mode(), because effects need
            gradients.
    """
    return ask(MakeAtlas(top, ablate), model, data, run_options(atlas, run))


@dataclass(frozen=True)
class MakeAtlas(Question):
    """Measures an atlas. loss: the loss of each sample."""

    top: int
    ablate: int
    loss: Loss = field(default=cast(Loss, None), repr=False)
    result = Atlas

    def settled(self, model: HookedModel, samples: Samples) -> "MakeAtlas":
        """Refuses invalid requests, and fills in what model and samples decide."""
        check_atoms(model.cfg, "an atlas")
        check_logits(model, "an atlas")
        check_gradients("atlas", model)
        checks.count("ablate", self.ablate, least=0)
        checks.count("top", self.top)
        check_one_length(samples, "atlas")
        return replace(self, loss=loss_on(model, samples))

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        settings = Atoms(self.top).facts(model)["settings"]
        return {"loss": self.loss.kind, "settings": settings | {"ablate": self.ablate}}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        effects = partial(atom_effects.effect_sums, loss=self.loss)
        second = Pass("effects", effects, {"effects": Atlas.STORED["effects"]})
        atoms, effects = yield [Atoms(self.top).passes(run.model), second]
        skipped = run.facts["atoms"].get("skipped")
        of_few = partial(
            _of_few, question=self, progress=run.options.progress,
            top=atoms["top"], effects=effects["effects"],
            skipped=set() if skipped is None else {*skipped["sample"].tolist()},
        )  # fmt: skip
        few = {name: Atlas.STORED[name] for name in _FEW}
        return atoms | effects | (yield Pass("few", of_few, few, whole=True))


def _of_few(
    chunk: Chunk,
    question: MakeAtlas,
    progress: bool,
    top: pd.DataFrame,
    effects: pd.DataFrame,
    skipped: set[int],
) -> Tables:
    """Returns the last pass's tables: those of `ablate` samples, of weights and of excerpts."""
    model, samples = chunk.model, chunk.samples
    there = [n for n in range(samples.start, samples.start + samples.n) if n not in skipped]
    # a quarter of the samples costs less than all else together; 8 are needed for an interval
    count = min(question.ablate, max(len(there) // 4, min(len(there) // 2, _LEAST)))
    numbers = [there[place * len(there) // count] for place in range(count)]
    inputs = None
    if numbers:
        inputs = torch.cat([samples.read(number, number + 1) for number in numbers])
        inputs = inputs.to(model.cfg.device)
    with torch.no_grad():
        known = directions(model)
    tried = atom_effects.ablations(model, inputs, numbers, question.loss, effects, progress)
    tables = {
        "logits": logit_effects(model, None if model.cfg.residual else inputs, numbers, samples),
        "ablations": tried,
        "directions": known,
        **excerpts(top, model, samples, progress),
    }
    chunk.advance(samples.n)
    return tables
