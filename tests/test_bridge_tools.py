"""TransformerLens' tools on a bridge: each against the model itself or a computation by hand."""

import pytest
import torch
from transformer_lens import SVDInterpreter, benchmarks, patching
from transformer_lens.evals import IOIDataset, ioi_eval
from transformer_lens.tools.analysis.attribution_patching import attribution_patch
from transformer_lens.tools.analysis.direct_logit_attribution import direct_logit_attribution
from transformer_lens.tools.analysis.jacobian_lens import JacobianLens
from transformer_lens.tools.analysis.projection_kernel import (
    attention_head_subspace_affinity,
    orthonormal_subspace,
    projection_kernel,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import crate_interp as ci
from bridged import FEW_TEXT, input_of, metric, pair
from conftest import HEADS


def test_affinities_of_heads():
    model, bridge, _ = pair("crate")
    found = attention_head_subspace_affinity(bridge, target_role="K")
    for head in range(HEADS):
        written = torch.linalg.qr(model.blocks[0].attn.W_O[1].T)[0]  # [d_model, d_head]
        read = torch.linalg.qr(model.blocks[2].attn.U[head])[0]
        overlap = (written.T @ read).pow(2).sum()
        assert torch.allclose(found.scores[0, 1, 2, head], overlap, atol=1e-5)
        bases = [orthonormal_subspace(one) for one in (bridge.W_O[0, 1].T, bridge.W_K[2, head])]
        assert torch.allclose(projection_kernel(*bases).score, overlap, atol=1e-5)
    # query, key and value are one code
    other = attention_head_subspace_affinity(bridge, target_role="V")
    assert torch.equal(other.scores, found.scores)


@pytest.mark.parametrize("name", ["crate-alpha", "gpt-baseline"])
def test_singular_vectors_in_terms_of_tokens(name):
    model, bridge, _ = pair(name)
    svd = SVDInterpreter(bridge)
    for kind, matrix in (
        ("OV", model.W_V[1, 2] @ model.W_O[1, 2]),
        ("w_out", model.blocks[1].mlp.W_out),
    ):
        head = 2 if kind == "OV" else None
        found = svd.get_singular_vectors(kind, layer_index=1, num_vectors=3, head_index=head)
        right = torch.linalg.svd(matrix.detach())[2][:3]
        wanted = model.W_U.T @ right.T
        assert torch.allclose(found[:, 0].abs(), wanted.abs(), atol=1e-4)


def test_a_step_without_decoder_has_no_singular_vectors():
    with pytest.raises(NotImplementedError, match="w_out"):
        SVDInterpreter(pair("crate")[1]).get_singular_vectors("w_out", layer_index=0)


@pytest.mark.parametrize("name", FEW_TEXT)
def test_patching_is_that_of_the_model(name):
    model, bridge, clean = pair(name)
    corrupt = input_of(name, seed=2)
    _, cache = model.run_with_cache(clean)
    _, same = bridge.run_with_cache(clean)
    sweep = patching.get_act_patch_attn_head_v_all_pos
    wanted = sweep(model, corrupt, cache, metric)
    assert torch.equal(sweep(bridge, corrupt, same, metric), wanted)
    assert wanted.std() > 0
    wanted = attribution_patch(model, clean, corrupt, metric)
    found = attribution_patch(bridge, clean, corrupt, metric)
    assert found.node_scores == wanted.node_scores
    assert max(map(abs, found.node_scores.values())) > 0


def test_attributions_that_need_folded_norms_are_refused():
    model, bridge, x = pair("gpt-baseline")
    with pytest.raises(ValueError, match="requires compatibility mode"):
        direct_logit_attribution(bridge, x, 3)
    with pytest.raises(RuntimeError, match="does not support compatibility mode"):
        bridge.enable_compatibility_mode()
    found = direct_logit_attribution(model, x, 3)  # on the model itself it is exact
    bias = model.W_U[:, 3] @ (model.ln_final.bias if model.ln_final.bias is not None else 0 * found)
    assert torch.allclose(found.attribution.sum(dim=0) + bias, model(x)[:, -1, 3], atol=1e-4)


@pytest.fixture(scope="module")
def written():
    """The embedded language model with a tokenizer of Hugging Face's."""
    model = ci.load("crate-tiny-lm")
    model.to_tokens("a")
    if not isinstance(model.tokenizer, PreTrainedTokenizerBase):
        held = model.tokenizer
        core = type(held.core).from_str(held.to_json())
        options = dict(split_special_tokens=True, eos_token="<|bos|>")
        model.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<|bos|>", **options
        )
    return model, ci.to_bridge(model)


@pytest.mark.slow
def test_text_goes_in_as_it_goes_into_the_model(written):
    model, bridge = written
    core = model.tokenizer
    ids = core("The cat sat", add_special_tokens=False)["input_ids"]
    assert bridge.to_tokens("The cat sat").tolist() == [[core.bos_token_id, *ids]]
    assert bridge.to_tokens("The cat sat", prepend_bos=False).tolist() == [ids]
    tokens = bridge.to_tokens("The cat sat")
    assert torch.equal(bridge("The cat sat"), model(tokens))
    assert core.split_special_tokens and bridge.tokenizer is not core


@pytest.mark.slow
def test_the_indirect_object(written):
    model, bridge = written
    names = {"num_samples": 6, "seed": 0}
    found = ioi_eval(bridge, dataset=IOIDataset(bridge.tokenizer, **names), batch_size=6)
    data = IOIDataset(bridge.tokenizer, **names)
    gaps = []
    for sample in data:
        prompt, io, s = sample["prompt"][None], sample["IO"], sample["S"]
        # the prompt ends with the name; the first token in which the two names differ decides
        first = next(i for i in range(len(io)) if io[i] != s[i])
        at = prompt.shape[1] - len(io) - 1 + first
        logits = model(prompt)[0, at]
        gaps.append(logits[io[first]] - logits[s[first]])
    gaps = torch.stack(gaps)
    assert found["Logit Difference"] == pytest.approx(gaps.mean().item(), abs=1e-4)
    assert found["Accuracy"] == pytest.approx((gaps > 0).float().mean().item())


@pytest.mark.slow
def test_the_jacobian_lens(written):
    model, bridge = written
    text = "Once upon a time there was a little dog, and the dog had a ball."
    skip, length = 4, 12
    lens = JacobianLens.fit(
        bridge, [text], corpus="one line", max_seq_len=length, skip_first_positions=skip,
        show_progress=False,
    )  # fmt: skip
    tokens = bridge.to_tokens(text)[:, :length]
    layer = model.cfg.n_layers - 2
    stream = model(tokens, stop_at_layer=layer + 1).detach()

    def last(z):
        return model(z, start_at_layer=layer + 1, stop_at_layer=model.cfg.n_layers)

    full = torch.autograd.functional.jacobian(last, stream)[0, :, :, 0]  # [to, d, from, d]
    valid = range(skip, length - 1)
    wanted = sum(full[to, :, at] for at in valid for to in valid if to >= at) / len(valid)
    assert torch.allclose(lens.jacobians[layer], wanted, atol=1e-4)
    read = lens.readout(bridge, text)
    assert read.model_topk_indices[-1, 0] == model(bridge.to_tokens(text))[0, -1].argmax()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "logits_equivalence", "loss_equivalence", "forward_hooks", "critical_forward_hooks",
        "gated_hooks_fire", "hook_functionality", "hook_registry", "backward_hooks",
        "critical_backward_hooks", "gradient_computation", "generation", "activation_cache",
        "run_with_cache",
    ],
)  # fmt: skip
def test_transformerlens_verifies_it(written, name):
    """The checks of verify_models that need no model from the Hub and no folded weights."""
    check = getattr(benchmarks, f"benchmark_{name}")
    needs = {"test_text": "The cat sat on the mat"} if name != "hook_registry" else {}
    found = check(written[1], **needs)
    assert found.passed, found
    missed = (found.details or {}).get("didnt_fire", [])
    gated = ("hook_result", "_input", "hook_attn_in", "hook_mlp_in")
    assert all(point.endswith(gated) for point in missed), missed
