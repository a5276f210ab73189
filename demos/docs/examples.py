"""An example for every public name, shown on its page of the reference; a test runs them in order.

Each is short and stands on the names that `BEFORE` makes.
"""

BEFORE = """
import torch
import crate_interp as ci

model = ci.load("crate-tiny-fashion")
images = model.preprocess(ci.data.embedded("fashion")[:8]["image"])
logits, cache = model.run_with_cache(images)
"""

EXAMPLES: dict[str, str] = {
    "load": 'model = ci.load("crate-tiny-fashion", revision="step-640")  # a step of its training',
    "list_models": 'ci.list_models()[["name", "family", "params", "status"]]',
    "convert": 'ci.convert("crate-tiny-fashion", "my-model")  # a folder that ci.load reads',
    "CrateConfig": """
cfg = ci.CrateConfig(family="crate", d_model=32, n_layers=2, n_heads=4, image_size=8, patch_size=2)
cfg.d_head, cfg.n_ctx  # 8, 17
""",
    "HookedCrate": "model = ci.HookedCrate(cfg)  # untrained; logits: [image, class]",
    "HookedCrateLM": """
lm = ci.load("crate-tiny-lm")
lm("The king was", return_type="logits").shape  # [1, token, d_vocab]
""",
    "HookedCrateMAE": """
size = {"d_model": 32, "n_layers": 2, "n_heads": 4, "image_size": 8, "patch_size": 2}
mae = ci.HookedCrateMAE(ci.CrateConfig(family="crate-mae", **size))
""",
    "HookedCrateCLIP": 'ci.HookedCrateCLIP  # what ci.load returns for family "clipa"',
    "SparseAutoencoder": 'ci.SparseAutoencoder  # what ci.load returns for family "sae"',
    "Past": """
past, tokens = ci.Past(), lm.to_tokens("The king was")
lm(tokens[:, :2], past=past)
lm(tokens[:, 2:], past=past)  # the logits of the third token on, as in lm(tokens)
""",
    "CheckpointError": """
try:
    ci.load("no-such-model")
except ci.CheckpointError as error:
    print(error)
""",
    "sweep": """
model = ci.load("crate-tiny-fashion")
result = ci.sweep(model, "embedded:fashion", limit=32)
""",
    "SweepResult": "result.layers().query(\"statistic == 'hoyer'\")  # a row a layer",
    "probe": "ci.probe(cache).headline()",
    "Probe": """
size = ci.Probe(
    name="size", points=("hook_resid_mid",),
    measure=lambda block, acts: {"norm": acts["hook_resid_mid"].norm(dim=(1, 2))},
    statistics={"norm": ("units of the stream", 0.0, None, "Length of the stream.")},
)
ci.sweep(model, images, probes=size, controls=0)
""",
    "merge": """
ci.sweep(model, "embedded:fashion", limit=32, out="run")
ci.merge("run")  # of chunks that several processes have measured
""",
    "verify": 'ci.verify("run")["ok"]',
    "store": """
stored = ci.store(
    model, "embedded:fashion", points=["blocks.3.mlp.hook_post"], limit=16, out="store"
)
""",
    "open_store": 'ci.open_store("store")[0].keys()',
    "atoms": 'atoms = ci.atoms(model, "embedded:fashion", limit=16)',
    "AtomResult": "atoms.top(5, 3)  # where atom 3 of layer 5 was largest",
    "atlas": 'atlas = ci.atlas(model, "embedded:fashion", limit=8, ablate=0)',
    "Atlas": "atlas.headline()",
    "linear_probe": 'linear = ci.linear_probe(model, "embedded:fashion", limit=64)',
    "LinearProbeResult": "linear.headline()",
    "audit": 'audit = ci.audit(model, "embedded:fashion", limit=8, untrained=0, grid=False)',
    "AuditResult": "audit.claims()  # a row a claim and layer",
    "segment": """
cutouts = ci.load("crate-tiny-cutouts")
segments = ci.segment(cutouts, "embedded:cutouts", limit=8, untrained=0)
""",
    "SegmentResult": "segments.overall()",
    "compare": """
early = ci.load("crate-tiny-fashion", revision="step-160")
compared = ci.compare(model, early, "embedded:fashion", limit=16, untrained=0)
""",
    "Comparison": "compared.headline()",
    "ablate_heads": 'heads = ci.ablate_heads(model, "embedded:fashion", limit=16)',
    "HeadAblation": "heads.heads()  # loss without each head, with its interval",
    "surgery": 'surgery = ci.surgery(model, "embedded:fashion", limit=8)',
    "SurgeryResult": "surgery.headline()",
    "report": 'ci.report(model, "embedded:fashion", "report", limit=8, untrained=0)',
    "watch": """
with ci.watch(model, images, every=2) as watch:
    for _ in range(4):
        watch.step()  # after each update of your training
""",
    "Watch": "watch.result().steps  # [0, 2, 4]",
    "WatchResult": "watch.result().at(2).headline()",
    "SRRRegularizer": """
with ci.SRRRegularizer(model, weight=1e-3) as penalty:
    model(images)
    penalty().backward()
""",
    "to_bridge": "bridge = ci.to_bridge(model)  # TransformerLens' bridge, the same logits",
    "from_bridge": 'ci.from_bridge  # (bridge, subspaces="value"): a ViT or GPT-2 on these hooks',
}
