"""What the measures are tried on, and every measure as a call: the cases of the oracles."""

import math
from types import SimpleNamespace

import torch

import reference

BATCH, HEADS, D_HEAD, D_MLP, CLASSES = 2, 3, 5, 19, 4
SHAPES = {"tall": (13, 11), "wide": (7, 17)}  # pos, d_model
EPS, KAPPA, SIGMA, ETA, LAMBD = 0.5, 0.3, 0.4, 0.1, 0.07
BATCHED = ["z", "code", "codes", "heads", "pattern", "spectrum", "labels", "weights"]
LAYERS = [lambda z: 2 * z.clip(min=0), lambda z: -z]  # exact in any precision


def draw(rng, *shape):
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


TOKENS = {
    "random": draw,
    "rank 2": lambda rng, *shape: draw(rng, *shape[:-1], 2) @ draw(rng, *shape[:-2], 2, shape[-1]),
    "badly scaled": lambda rng, *shape: (
        draw(rng, *shape) * torch.logspace(-4, 3, shape[-1], dtype=torch.float64)
    ),
    "off centre": lambda rng, *shape: draw(rng, *shape) + 30,
    "repeated": lambda rng, *shape: draw(rng, *shape[:-2], 1, shape[-1]).expand(shape),
}


def bases(kind, rng, *shape):
    """Returns bases `[..., head, d, p]`.

    A basis of lower rank has no span to measure: "rank 2" is two directions that all heads share,
    "repeated" is one span in as many bases.
    """
    u = TOKENS["random" if kind in ("rank 2", "repeated") else kind](rng, *shape)
    if kind == "rank 2":
        u[..., :2] = u[..., :1, :, :2] @ draw(rng, *shape[:-2], 2, 2)
    if kind == "repeated":
        u = u[..., :1, :, :] @ draw(rng, *shape[:-2], shape[-1], shape[-1])
    return u


def drawn(kind, shape):
    """Returns the inputs of one kind and shape in float64, and labels."""
    n, d = SHAPES[shape]
    rng, tokens = torch.Generator().manual_seed(n), TOKENS[kind]
    return dict(
        z=tokens(rng, BATCH, n, d),
        code=tokens(rng, BATCH, n, D_MLP).relu(),
        codes=tokens(rng, BATCH, HEADS, n, D_HEAD),
        heads=bases(kind, rng, BATCH, HEADS, d, D_HEAD),
        pattern=tokens(rng, BATCH, n, D_MLP).softmax(dim=-1),
        spectrum=torch.linalg.svdvals(tokens(rng, BATCH, n, d)) ** 2,
        weights=draw(rng, BATCH, n, CLASSES).square(),
        u=draw(rng, HEADS, d, D_HEAD) / math.sqrt(d),
        orthonormal=torch.linalg.qr(draw(rng, HEADS, d, D_HEAD))[0],
        bases=draw(rng, len(LAYERS), HEADS, d, D_HEAD) / math.sqrt(d),
        d=draw(rng, d, D_MLP) / math.sqrt(d),
        lambd=draw(rng, D_MLP).abs() / 10,
        labels=torch.randint(0, CLASSES, (BATCH, n), generator=rng),
    )


def in_dtype(inputs, dtype):
    """Returns the inputs as a measure takes them: floats rounded to dtype, labels as they are."""
    cast = {k: x.to(dtype) if x.is_floating_point() else x for k, x in inputs.items()}
    return SimpleNamespace(**cast)


def sample(s, i):
    """Returns one sample in numpy: the floats that the measure was given, in float64."""
    rows = {name: (x[i] if name in BATCHED else x) for name, x in vars(s).items()}
    return SimpleNamespace(
        **{k: (x.double() if x.is_floating_point() else x).numpy() for k, x in rows.items()}
    )


def membership(s):
    """Returns weights of the tokens in each head, `[..., head, pos]`."""
    return s.weights[..., :HEADS].swapaxes(-1, -2)


def contraction(s):
    """Returns weights of the tokens for representatives, `[..., head, rep, pos]`."""
    return abs(s.codes[..., [1, 2, 0], :, :]).swapaxes(-1, -2)


# Each measure as a call on either module. Unlike numbers per sample, head or token, tensors are
# relative to their largest entry, and differences to their larger term.
NUMBERS = {
    "coding_rate": lambda m, s: m.coding_rate(s.z, EPS),
    "subspace_coding_rate": lambda m, s: m.subspace_coding_rate(s.z, s.u, EPS),
    "official_coding_rate": lambda m, s: m.official_coding_rate(s.codes),
    "mcr2_coding_rate, labels": lambda m, s: m.mcr2_coding_rate(s.z, s.labels, EPS),
    "mcr2_coding_rate, weights": lambda m, s: m.mcr2_coding_rate(s.z, s.weights, EPS),
    "variational_rate": lambda m, s: m.variational_rate(s.codes, membership(s), EPS),
    "contracted_rate": lambda m, s: m.contracted_rate(s.codes, contraction(s), EPS),
    "contraction_coverage": lambda m, s: m.contraction_coverage(contraction(s)),
    "representatives_in_use": lambda m, s: m.representatives_in_use(contraction(s)),
    "membership_balance": lambda m, s: m.membership_balance(membership(s)),
    "coding_length": lambda m, s: m.coding_length(s.z, EPS),
    "neumann_invalid": lambda m, s: m.neumann_invalid(s.z, s.u, EPS),
    "rate_of_spectrum": lambda m, s: m.rate_of_spectrum(s.spectrum, 23, 5, EPS),
    "rate_of_spectrum, grid": lambda m, s: m.rate_of_spectrum(s.spectrum, 23, 5, [0.01, 0.5, 4.0]),
    "lasso_objective": lambda m, s: m.lasso_objective(s.code, s.z, s.d, LAMBD),
    "lasso_objective, weighted": lambda m, s: m.lasso_objective(s.code, s.z, s.d, s.lambd),
    "lasso_kkt_residual": lambda m, s: m.lasso_kkt_residual(s.code, s.z, s.d, LAMBD),
    "lasso_kkt_residual, weighted": lambda m, s: m.lasso_kkt_residual(s.code, s.z, s.d, s.lambd),
    "zero_fraction": lambda m, s: m.zero_fraction(s.code),
    "zero_fraction, tol": lambda m, s: m.zero_fraction(s.z, 0.5),
    "l0_norm": lambda m, s: m.l0_norm(s.code),
    "l1_norm": lambda m, s: m.l1_norm(s.z),
    "mean_magnitude": lambda m, s: m.mean_magnitude(s.z),
    "l1_l2_ratio": lambda m, s: m.l1_l2_ratio(s.z),
    "l1_l2_ratio, code": lambda m, s: m.l1_l2_ratio(s.code),
    "gini": lambda m, s: m.gini(s.z),
    "gini, code": lambda m, s: m.gini(s.code),
    "support_for_energy": lambda m, s: m.support_for_energy(s.z),
    "support_for_energy, code": lambda m, s: m.support_for_energy(s.code, 0.99),
    "firing_rate": lambda m, s: m.firing_rate(s.code),
    "firing_rate, tol": lambda m, s: m.firing_rate(s.z, 0.5),
    "attention_entropy": lambda m, s: m.attention_entropy(s.pattern),
    "top_mass": lambda m, s: m.top_mass(s.pattern, 5),
    "effective_support": lambda m, s: m.effective_support(s.pattern),
    "mass_cover": lambda m, s: m.mass_cover(s.pattern, 0.6),
    "mass_cover, most": lambda m, s: m.mass_cover(s.pattern, 0.95),
    "orthonormality_defect": lambda m, s: m.orthonormality_defect(s.z),
    "completeness_defect": lambda m, s: m.completeness_defect(s.heads),
    "subspace_overlap": lambda m, s: m.subspace_overlap(
        s.heads[..., 0, :, :], s.heads[..., 2, :, :]
    ),
    "head_overlap": lambda m, s: m.head_overlap(s.heads),
    "incoherence": lambda m, s: m.incoherence(s.heads),
    "mutual_coherence": lambda m, s: m.mutual_coherence(s.z),
    "dictionary_defect": lambda m, s: m.dictionary_defect(s.z),
    "projection_energy": lambda m, s: m.projection_energy(s.z, s.u),
    "membership_entropy": lambda m, s: m.membership_entropy(s.z, s.u),
    "subspace_snr": lambda m, s: m.subspace_snr(s.z, s.u),
    "stable_rank": lambda m, s: m.stable_rank(s.z),
    "effective_rank": lambda m, s: m.effective_rank(s.z),
}
TENSORS = {
    "coding_rate_gradient": lambda m, s: m.coding_rate_gradient(s.z, EPS),
    "subspace_coding_rate_gradient": lambda m, s: m.subspace_coding_rate_gradient(s.z, s.u, EPS),
    "neumann_gradient": lambda m, s: m.neumann_gradient(s.z, s.u, EPS),
    "spectrum": lambda m, s: m.spectrum(s.z),
    "subspace_spectrum": lambda m, s: m.subspace_spectrum(s.z, s.u),
    "gradient_step": lambda m, s: m.gradient_step(s.z, s.u, EPS, KAPPA),
    "neumann_step": lambda m, s: m.neumann_step(s.z, s.u, EPS, KAPPA),
    "first_order_step": lambda m, s: m.first_order_step(s.z, s.u, EPS, KAPPA),
    "third_order_step": lambda m, s: m.third_order_step(s.z, s.u, EPS, KAPPA),
    "attention_step": lambda m, s: m.attention_step(s.z, s.u, EPS, KAPPA),
    "attention_step, away": lambda m, s: m.attention_step(s.z, s.u, EPS, -KAPPA),
    "subspace_attention": lambda m, s: m.subspace_attention(s.codes),
    "subspace_attention, scaled": lambda m, s: m.subspace_attention(s.codes, 0.02),
    "paper_mssa": lambda m, s: m.paper_mssa(s.z, s.u, EPS),
    "column_cosines": lambda m, s: m.column_cosines(s.z),
    "posterior_mean": lambda m, s: m.posterior_mean(s.z, s.orthonormal, SIGMA),
    "paper_posterior_mean": lambda m, s: m.paper_posterior_mean(s.z, s.orthonormal, SIGMA),
}
DIFFERENCES = {
    "rate_reduction": (
        lambda m, s: m.rate_reduction(s.z, s.u, EPS),
        lambda s: reference.objective_terms(s.z, s.u, EPS, 0, reference.l0_norm, False),
    ),
    "dictionary_rate_change": (
        lambda m, s: m.dictionary_rate_change(s.code, s.d, EPS),
        lambda s: reference.coding_rate(s.code, EPS),
    ),
    "sparse_rate_reduction": (
        lambda m, s: m.sparse_rate_reduction(s.z, s.u, EPS, LAMBD),
        lambda s: reference.objective_terms(s.z, s.u, EPS, LAMBD, reference.l0_norm, False),
    ),
    "sparse_rate_reduction, normalised": (
        lambda m, s: m.sparse_rate_reduction(s.z, s.u, EPS, LAMBD, m.l1_norm, True),
        lambda s: reference.objective_terms(s.z, s.u, EPS, LAMBD, reference.l1_norm, True),
    ),
    "ista_step": (
        lambda m, s: m.ista_step(s.code, s.z, s.d, ETA, LAMBD),
        lambda s: [s.code.max(), ETA * abs(s.z @ s.d).max(), ETA * abs(s.code @ s.d.T @ s.d).max()],
    ),
}
# Relative to one: shares with a difference in them (hoyer); angles, which a basis rounded by e
# knows to e, however small they are; an entropy with 1e-8 inside, which is lost beside a p of one.
SHARES = {
    "hoyer": lambda m, s: m.hoyer(s.z),
    "hoyer, code": lambda m, s: m.hoyer(s.code),
    "principal_angles": lambda m, s: m.principal_angles(
        s.heads[..., 0, :, :], s.heads[..., 1, :, :]
    ),
    "principal_angles, widths": lambda m, s: m.principal_angles(
        s.heads[..., 0, :, :], s.heads[..., 1, :, :3]
    ),
    "official_attention_entropy": lambda m, s: m.official_attention_entropy(s.pattern),
}
OTHERS = {
    "condition_number": lambda m, s: m.condition_number(s.z),
    "layer_objectives": lambda m, s: m.layer_objectives(LAYERS, list(s.bases), s.z, EPS, LAMBD),
}
RECORDED = NUMBERS | TENSORS | {k: call for k, (call, _) in DIFFERENCES.items()} | SHARES | OTHERS
