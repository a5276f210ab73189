"""How sharply each head attends."""

from torch import Tensor, nn

from crate_interp.measures import attention_entropy, effective_support, top_mass
from crate_interp.probes.probe import Acts, Probe

_STATISTICS = {
    "entropy": ("nats", 0.0, None, "Entropy of attention, mean over queries: ln(number of tokens) is uniform, 0 is one token."),
    "entropy_cls": ("nats", 0.0, None, "Entropy of the CLS token's attention; low where the head singles out a few tokens."),
    "top1_cls": ("share of attention", 0.0, 1.0, "Mass on the token the CLS token attends to most."),
    "top5_cls": ("share of attention", 0.0, 1.0, "Mass on the five tokens the CLS token attends to most."),
    "support_cls": ("tokens", 1.0, None, "How many tokens the CLS token attends to, 1 / sum p^2."),
}  # fmt: skip


def attention() -> Probe:
    """Entropy over all queries, and entropy, top-1 mass, top-5 mass and effective support of the CLS query, per head."""
    return Probe(name="attention", points=("attn.hook_pattern",), measure=_measure, statistics=_STATISTICS)


def _measure(block: nn.Module, acts: Acts) -> dict[str, Tensor]:
    pattern = acts["attn.hook_pattern"]  # [batch, head, query, key]
    cls = pattern[:, :, :1]
    entropy = attention_entropy(pattern)  # [batch, head, query]
    return {
        "entropy": entropy.mean(dim=-1),
        "entropy_cls": entropy[..., 0],
        "top1_cls": top_mass(cls, 1)[..., 0],
        "top5_cls": top_mass(cls, min(5, pattern.shape[-1]))[..., 0],
        "support_cls": effective_support(cls)[..., 0],
    }
