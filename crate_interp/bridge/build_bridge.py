"""TransformerLens bridges around networks of transformers, by its adapters or ours."""

from collections.abc import Callable
from typing import Any

from torch import nn

from crate_interp.bridge.dinov2 import Dinov2Adapter

# architecture -> the adapter that TransformerLens lacks
OURS: dict[str, Callable[..., Any]] = {
    "Dinov2Model": Dinov2Adapter,
    "Dinov2ForImageClassification": Dinov2Adapter,
    "Dinov2WithRegistersModel": Dinov2Adapter,
    "Dinov2WithRegistersForImageClassification": Dinov2Adapter,
}


def build(
    network: nn.Module, adapter: Callable[..., Any] | None = None, tokenizer: object = None
) -> nn.Module:
    """Returns a TransformerBridge around a network, which is changed: its parts are replaced.

    adapter: the class of the adapter; None: ours, or else TransformerLens' own for the class of the
    network. Nothing is registered anywhere. Raises ValueError for a network that no adapter knows.
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources import (
        build_bridge_config_from_hf,
        build_bridge_from_module,
    )

    net: Any = network
    name, dtype = type(network).__name__, next(network.parameters()).dtype
    net.config._attn_implementation = "eager"  # the others do not say what they attend to
    chosen = adapter or OURS.get(name)
    if chosen is None:
        try:
            return build_bridge_from_module(
                network, name, hf_config=net.config, tokenizer=tokenizer
            )
        except (ValueError, KeyError) as error:
            raise ValueError(f"TransformerLens has no bridge to {name}: {error}") from None
    made = chosen(build_bridge_config_from_hf(net.config, name, name, dtype))
    made.prepare_model(network)
    made.cfg.device = str(next(network.parameters()).device)
    return TransformerBridge(network, made, tokenizer)
