"""Compression: the coding rates of the stream before and after MSSA."""

from functools import partial
from typing import Any

from torch import Tensor

from crate_interp.measures import coding_rate, official_coding_rate
from crate_interp.measures.rates import head_codes, rate_of_codes
from crate_interp.probes.probe import Acts, Probe
from crate_interp.probes.shared import mid_codes, orthonormal_basis

_STATISTICS = {
    "rate_pre": ("nats", 0.0, None, "R of Z^l: what the layer's input costs as one Gaussian; lower is more compressed."),
    "rate_mid": ("nats", 0.0, None, "R of Z^{l+1/2}, after MSSA: theory wants it to stay high while R^c falls."),
    "subspace_rate_pre": ("nats", 0.0, None, "R^c of Z^l against the layer's own subspaces, summed over heads."),
    "subspace_rate_mid": ("nats", 0.0, None, "R^c of Z^{l+1/2}: MSSA compressed where it lies below R^c of Z^l."),
    "subspace_rate_pre_head": ("nats", 0.0, None, "R^c of Z^l against the subspace of one head."),
    "subspace_rate_mid_head": ("nats", 0.0, None, "R^c of Z^{l+1/2} against the subspace of one head."),
    "reduction_pre": ("nats", None, None, "R - R^c of Z^l: the rate reduction, which theory wants large."),
    "reduction_mid": ("nats", None, None, "R - R^c of Z^{l+1/2}: MSSA helped where it lies above that of Z^l."),
    "official_rate": ("nats", 0.0, None, "The number the authors' script plots as R^c: codes of LN(Z^l), every token at length one."),
    "official_rate_head": ("nats", 0.0, None, "The authors' number for one head."),
}  # fmt: skip


def compression(eps: float = 0.1) -> Probe:
    """Coding rates R, R^c, R - R^c of Z^l and Z^{l+1/2} and the official number, on the stream as it is, all tokens,
    U as stored; eps as in the paper. Z^L is measured too, as layer n_layers, with rate_pre only."""
    if not eps > 0:
        raise ValueError(f"eps={eps}: give a number above 0, such as 0.1.")
    return Probe(
        name="compression",
        points=("hook_resid_pre", "attn.hook_u", "hook_resid_mid"),
        measure=partial(_measure, eps=eps),
        statistics=_STATISTICS,
        final=partial(_final, eps=eps),
        settings={"eps": eps},
    )


def _measure(block: Any, acts: Acts, eps: float) -> dict[str, Tensor]:
    u = block.attn.U
    _, triangle = orthonormal_basis(block, acts)
    codes = {
        "pre": head_codes(acts["hook_resid_pre"], u),
        "mid": mid_codes(block, acts) @ triangle,  # Z U_k = Z Q_k R_k; the alignment probe needs Z Q_k too
    }
    answer: dict[str, Tensor] = {}
    for half, z in (("pre", acts["hook_resid_pre"]), ("mid", acts["hook_resid_mid"])):
        rate = coding_rate(z, eps)
        per_head = rate_of_codes(codes[half], z, u, eps)
        total = per_head.sum(dim=-1)
        answer |= {
            f"rate_{half}": rate,
            f"subspace_rate_{half}": total,
            f"subspace_rate_{half}_head": per_head,
            f"reduction_{half}": rate - total,
        }
    official = official_coding_rate(acts["attn.hook_u"].transpose(1, 2))  # [batch, head]
    return answer | {"official_rate": official.sum(dim=-1), "official_rate_head": official}


def _final(z: Tensor, eps: float) -> dict[str, Tensor]:
    return {"rate_pre": coding_rate(z, eps)}
