"""Ma-Lab-Berkeley/CRATE model/crate_ae: the masked autoencoder."""

from crate_interp.checkpoints.layouts.layout import Layout, Stack

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
    sizes={
        "blocks.0.layers.0.0.fn.qkv.weight": ("inner", "d_model"),
        "blocks.0.layers.0.1.fn.weight": (None, "d_mlp"),
        "patch_embed.proj.weight": (None, "channels", "height", "width"),
    },
    positions=("decoder_pos_embed", 3),
    config_switches=("norm_pix_loss",),  # read if the file holds the trainer's command line
    unused=("pos_embed", r"decoder_embed\.(weight|bias)"),
    namespace=True,
)
