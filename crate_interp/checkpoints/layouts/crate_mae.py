"""Ma-Lab-Berkeley/CRATE model/crate_ae: the masked autoencoder."""

from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack


def _infer(shapes: Shapes, given: Fields) -> Fields:
    inner, d_model = shapes.of("blocks.0.layers.0.0.fn.qkv.weight")
    d_mlp = shapes.of("blocks.0.layers.0.1.fn.weight")[1]
    images = shapes.images("patch_embed.proj.weight", "decoder_pos_embed", given)
    return {"d_model": d_model, "inner": inner, "d_mlp": d_mlp} | images


MAE = Layout(
    family="crate-mae",
    markers=("mask_token", "decoder_pos_embed", "blocks.0.layers.0.0.fn.qkv.weight"),
    top={
        "cls_token": "cls_token",
        "mask_token": "mask_token",
        "decoder_pos_embed": "pos_embed",  # the encoder reads this table, not the key pos_embed
        "patch_embed.proj.*": "embed.conv.*",
        "norm.*": "ln_final.*",
        "decoder_norm.*": "decoder_norm.*",
        "decoder_pred.*": "decoder_pred.*",
    },
    stacks=(
        Stack(
            "blocks.{l}.layers.0.",
            {
                "0.norm.*": "ln1.*",
                "0.fn.qkv.weight": "attn.u_proj.weight",
                "0.fn.to_out.0.*": "attn.out_proj.*",
                "1.norm.*": "ln2.*",
                "1.fn.weight": "mlp.D",
            },
        ),
        Stack(
            "decoder_blocks.{l}.layers.0.",
            {
                "0.norm.*": "ln1.*",
                "0.fn.weight": "D",
                "1.norm.*": "ln2.*",
                "1.fn.qkv.weight": "attn.u_proj.weight",
                "1.fn.to_out.0.*": "attn.out_proj.*",
            },
            target="decoder_blocks.{l}.",
            count="decoder_n_layers",
        ),
    ),
    infer=_infer,
    config_switches=("norm_pix_loss",),  # read if the file holds the trainer's command line
    unused=("pos_embed", r"decoder_embed\.(weight|bias)"),
    namespace=True,
)
