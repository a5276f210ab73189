"""Small random networks of transformers, as they are and behind a bridge of ours."""

import copy
import functools

import torch
import transformers

import crate_interp as ci
from crate_interp.bridge.adapter import build
from selection import few_of

LAYERS, HEADS, D_HEAD, WIDE, CLASSES, VOCAB, POS = 2, 2, 11, 13, 7, 31, 5
D = HEADS * D_HEAD
_SHARED = dict(
    num_hidden_layers=LAYERS, num_attention_heads=HEADS, attn_implementation="eager", hidden_size=D
)
_IMAGES = dict(_SHARED, image_size=15, patch_size=5, num_channels=3, num_labels=CLASSES)
_LLAMA = dict(hidden_size=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB)
_GPT2 = dict(n_embd=D, n_layer=LAYERS, n_head=HEADS, n_positions=POS, n_inner=WIDE)
# kind -> (class of the network, of its config, values of the config, tokens before the patches)
KINDS = {
    "vit": ("ViTForImageClassification", "ViT", _IMAGES | dict(intermediate_size=WIDE), 1),
    "deit": ("DeiTForImageClassification", "DeiT", _IMAGES | dict(intermediate_size=WIDE), 2),
    "dinov2": ("Dinov2Model", "Dinov2", _IMAGES | dict(mlp_ratio=2, layerscale_value=0.3), 1),
    "registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegisters",
        _IMAGES | dict(mlp_ratio=2, layerscale_value=0.3, use_swiglu_ffn=True),
        5,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2",
        _GPT2 | dict(vocab_size=VOCAB, attn_implementation="eager"),
        0,
    ),
    "llama": (
        "LlamaForCausalLM",
        "Llama",
        _SHARED | _LLAMA | dict(intermediate_size=WIDE, max_position_embeddings=POS),
        0,
    ),
}
# those that the fast tests take
SOME = few_of(KINDS, ("vit", "dinov2", "gpt2"))
IMAGES = ("vit", "deit", "dinov2", "registers")
PLAIN = dict(mean=[0.0] * 3, std=[1.0] * 3, resize=(15, 15))


def network(kind, seed=0, dtype=torch.float64):
    """A random network in which no parameter is zero or one and attention is not even."""
    name, config, values, _ = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = getattr(transformers, name)(getattr(transformers, f"{config}Config")(**values))
        with torch.no_grad():
            for value in net.parameters():
                value.normal_(std=0.3)
    return net.to(dtype).eval().requires_grad_(False)


@functools.cache
def pair(kind):
    """A network as transformers made it, and the same weights behind a bridge."""
    plain = network(kind)
    return plain, ci.from_bridge(build(copy.deepcopy(plain)), **(PLAIN if kind in IMAGES else {}))


def inputs(kind, n=3, dtype=torch.float64):
    drawn = torch.Generator().manual_seed(1)
    if kind in IMAGES:
        return torch.randn(n, 3, 15, 15, generator=drawn, dtype=dtype)
    return torch.randint(0, VOCAB, (n, POS), generator=drawn)


@functools.cache
def outputs(kind):
    """What transformers itself returns, attention and hidden states with it."""
    plain, _ = pair(kind)
    key = "pixel_values" if kind in IMAGES else "input_ids"
    return plain(**{key: inputs(kind)}, output_attentions=True, output_hidden_states=True)


def layers_of(kind, net):
    inner = {"vit": "vit.layers", "deit": "deit.layers", "dinov2": "encoder.layer"}
    more = {"registers": "dinov2_with_registers.encoder.layer", "gpt2": "transformer.h"}
    return net.get_submodule((inner | more | {"llama": "model.layers"})[kind])


@functools.cache
def inside(kind):
    """(stream after attention, what the last map of the MLP reads) of each layer, by torch hooks.

    They hang on the network that was never bridged.
    """
    plain, _ = pair(kind)
    norms = {"dinov2": "norm2", "registers": "norm2", "gpt2": "ln_2"}
    norm = norms.get(kind, "post_attention_layernorm" if kind == "llama" else "layernorm_after")
    last = {"gpt2": "mlp.c_proj", "registers": "mlp.down_proj", "llama": "mlp.down_proj"}
    found = []

    def keep(place, index):
        return lambda module, given: found[place].__setitem__(index, given[0])

    handles = []
    for place, layer in enumerate(layers_of(kind, plain)):
        found.append([None, None])
        for index, name in enumerate((norm, last.get(kind, "mlp.fc2"))):
            hook = layer.get_submodule(name).register_forward_pre_hook(keep(place, index))
            handles.append(hook)
    plain(inputs(kind))
    for handle in handles:
        handle.remove()
    return found


def role_weight(kind, net, layer, role):
    """A role's map as transformers stores it, [head, d_model, d_head]."""
    attn = layers_of(kind, net)[layer]
    if kind == "gpt2":
        whole = attn.attn.c_attn.weight.reshape(D, 3, HEADS, D_HEAD)  # in, out
        return whole[:, "qkv".index(role)].permute(1, 0, 2)
    attn = attn.self_attn if kind == "llama" else attn.attention
    weight = getattr(attn, f"{role}_proj").weight
    width = 6 if kind == "llama" else D_HEAD
    return weight.reshape(-1, width, weight.shape[1]).transpose(1, 2)
