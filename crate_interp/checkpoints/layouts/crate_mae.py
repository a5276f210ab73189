"""Ma-Lab-Berkeley/CRATE model/crate_ae: the masked autoencoder."""

from crate_interp.checkpoints.layouts.layout import (
    Fields,
    Layout,
    Shapes,
    Stack,
    image_size,
    shape_of,
)


def _infer(shapes: Shapes, given: Fields) -> Fields:
    inner, d_model = shape_of(shapes, "blocks.0.layers.0.0.fn.qkv.weight")
    _, channels, height, width = shape_of(shapes, "patch_embed.proj.weight", 4)
    patches = {
        "channels": channels,
        "patch_size": (height, width),
        "d_model": d_model,
        "inner": inner,
    }
    d_mlp = shape_of(shapes, "blocks.0.layers.0.1.fn.weight")[1]
    return (
        patches | {"d_mlp": d_mlp} | image_size(shapes, (height, width), given, "decoder_pos_embed")
    )


def _translate(config: Fields) -> Fields:
    """Returns norm_pix_loss where the trainer's command line has it."""
    normalised = config.get("norm_pix_loss")
    return {"norm_pix_loss": normalised} if isinstance(normalised, bool) else {}


_ENCODER, _DECODER = "blocks.{l}.layers.0.", "decoder_blocks.{l}.layers.0."

MAE = Layout(
    family="crate-mae",
    markers=("mask_token", "decoder_pos_embed", "blocks.0.layers.0.0.fn.qkv.weight"),
    top={
        "cls_token": "cls_token",
        "mask_token": "mask_token",
        "decoder_pos_embed": "pos_embed",  # the encoder reads this one
        "patch_embed.proj.weight": "embed.conv.weight",
        "patch_embed.proj.bias": "embed.conv.bias",
        "norm.weight": "ln_final.weight",
        "norm.bias": "ln_final.bias",
        "decoder_norm.weight": "decoder_norm.weight",
        "decoder_norm.bias": "decoder_norm.bias",
        "decoder_pred.weight": "decoder_pred.weight",
        "decoder_pred.bias": "decoder_pred.bias",
    },
    stacks=(
        Stack(
            {
                _ENCODER + "0.norm.weight": "blocks.{l}.ln1.weight",
                _ENCODER + "0.norm.bias": "blocks.{l}.ln1.bias",
                _ENCODER + "0.fn.qkv.weight": "blocks.{l}.attn.u_proj.weight",
                _ENCODER + "0.fn.to_out.0.weight": "blocks.{l}.attn.out_proj.weight",
                _ENCODER + "0.fn.to_out.0.bias": "blocks.{l}.attn.out_proj.bias",
                _ENCODER + "1.norm.weight": "blocks.{l}.ln2.weight",
                _ENCODER + "1.norm.bias": "blocks.{l}.ln2.bias",
                _ENCODER + "1.fn.weight": "blocks.{l}.mlp.D",
            }
        ),
        Stack(
            {
                _DECODER + "0.norm.weight": "decoder_blocks.{l}.ln1.weight",
                _DECODER + "0.norm.bias": "decoder_blocks.{l}.ln1.bias",
                _DECODER + "0.fn.weight": "decoder_blocks.{l}.D",
                _DECODER + "1.norm.weight": "decoder_blocks.{l}.ln2.weight",
                _DECODER + "1.norm.bias": "decoder_blocks.{l}.ln2.bias",
                _DECODER + "1.fn.qkv.weight": "decoder_blocks.{l}.attn.u_proj.weight",
                _DECODER + "1.fn.to_out.0.weight": "decoder_blocks.{l}.attn.out_proj.weight",
                _DECODER + "1.fn.to_out.0.bias": "decoder_blocks.{l}.attn.out_proj.bias",
            },
            count="decoder_n_layers",
        ),
    ),
    infer=_infer,
    translate=_translate,
    unused=("pos_embed", r"decoder_embed\.(weight|bias)"),
    namespace=True,
)
