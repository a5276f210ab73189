"""TransformerLens' utilities on language models, each by hand; and its own tests."""

import tomllib
from pathlib import Path

import pytest
import torch
from transformer_lens import patching

import transformerlens_sdist as sdist
import transformerlens_suite as suite
from conftest import LMS, make_lm
from selection import few

POS, RIGHT, WRONG = 7, 3, 9


@pytest.fixture
def clean():
    return torch.randint(47, (2, POS), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def corrupt(clean):
    other = clean.clone()
    other[:, 4] = (other[:, 4] + 5) % 47
    return other


def metric(logits):
    return logits[:, -1, RIGHT].mean() - logits[:, -1, WRONG].mean()


def patched(lm, tokens, cache, name, place):
    """The metric with one stretch of an activation taken from another run."""

    def put(value, hook):
        value = value.clone()
        value[place] = cache[name][place]
        return value

    return metric(lm.run_with_hooks(tokens, fwd_hooks=[(name, put)]))


EVERY = slice(None)
SWEEPS = {
    "get_act_patch_resid_pre": ("hook_resid_pre", lambda pos: (EVERY, pos)),
    "get_act_patch_resid_mid": ("hook_resid_mid", lambda pos: (EVERY, pos)),
    "get_act_patch_attn_out": ("hook_attn_out", lambda pos: (EVERY, pos)),
    "get_act_patch_mlp_out": ("hook_mlp_out", lambda pos: (EVERY, pos)),
    "get_act_patch_attn_head_out_by_pos": ("attn.hook_z", lambda pos, head: (EVERY, pos, head)),
    "get_act_patch_attn_head_q_by_pos": ("attn.hook_q", lambda pos, head: (EVERY, pos, head)),
    "get_act_patch_attn_head_k_by_pos": ("attn.hook_k", lambda pos, head: (EVERY, pos, head)),
    "get_act_patch_attn_head_v_by_pos": ("attn.hook_v", lambda pos, head: (EVERY, pos, head)),
    "get_act_patch_attn_head_out_all_pos": ("attn.hook_z", lambda head: (EVERY, EVERY, head)),
    "get_act_patch_attn_head_q_all_pos": ("attn.hook_q", lambda head: (EVERY, EVERY, head)),
    "get_act_patch_attn_head_k_all_pos": ("attn.hook_k", lambda head: (EVERY, EVERY, head)),
    "get_act_patch_attn_head_v_all_pos": ("attn.hook_v", lambda head: (EVERY, EVERY, head)),
    "get_act_patch_attn_head_pattern_all_pos": ("attn.hook_pattern", lambda head: (EVERY, head)),
    "get_act_patch_attn_head_pattern_by_pos": (
        "attn.hook_pattern",
        lambda head, pos: (EVERY, head, pos),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", few(LMS))
@pytest.mark.parametrize("sweep", SWEEPS)
def test_patching_sweeps(sweep, family):
    """On a small model: a sweep runs it once for each layer, position and head."""
    layers, heads, pos = 2, 3, 5
    lm = make_lm(family, n_layers=layers, n_heads=heads, n_ctx=pos)
    clean = torch.randint(47, (7, pos), generator=torch.Generator().manual_seed(3))
    corrupt = clean.clone()
    corrupt[:, 2] = (corrupt[:, 2] + 5) % 47
    name, place = SWEEPS[sweep]
    with torch.no_grad():
        _, cache = lm.run_with_cache(clean)
        table = getattr(patching, sweep)(lm, corrupt, cache, metric)
        sizes = table.shape[1:]
        assert table.shape[0] == layers and set(sizes) <= {pos, heads}
        for layer, *index in (
            (0, *[0] * len(sizes)),
            (1, *[2 if size == pos else 1 for size in sizes]),
            (1, *[size - 1 for size in sizes]),
        ):
            direct = patched(lm, corrupt, cache, f"blocks.{layer}.{name}", place(*index))
            torch.testing.assert_close(table[(layer, *index)], direct, atol=1e-6, rtol=1e-5)
        assert (table - metric(lm(corrupt))).abs().max() > 1e-4  # patching does something


def test_direct_paths(lm, clean, corrupt):
    """The change of one head's output, added to the query input of later heads only."""
    with torch.no_grad():
        cache, other = lm.run_with_cache(clean)[1], lm.run_with_cache(corrupt)[1]
        table = patching.get_act_patch_direct_path(
            lm, corrupt, cache, other, metric, src_layer=0, src_head=1, component="v", verbose=False
        )
        assert not lm.cfg.use_split_qkv_input  # the switch is put back
        delta = (cache["z", 0] - other["z", 0])[:, :, 1] @ lm.W_O[0, 1]
        head = 2

        def add(value, hook):
            value = value.clone()
            value[:, :, head] += delta
            return value

        lm.set_use_split_qkv_input(True)
        direct = metric(lm.run_with_hooks(corrupt, fwd_hooks=[("blocks.2.attn.hook_v_input", add)]))
        lm.set_use_split_qkv_input(False)
    torch.testing.assert_close(table[2, head], direct, atol=1e-5, rtol=1e-4)


HERE = Path(__file__).parent
TABLE = tomllib.loads(suite.TABLE.read_text())
FAST = [
    "tests/integration/model_bridge/test_bridge_start_at_layer.py",
    "tests/unit/model_bridge/test_gated_hooks.py",
    "tests/unit/model_bridge/test_caching_remove_batch_dim.py",
    "tests/unit/test_generate_no_tokenizer.py",
]


def test_each_expected_failure_has_a_group_a_reason_and_a_file():
    listed = suite.expected(TABLE)
    counted = [test for test, (group, _) in listed.items() if group in suite.COUNTED]
    assert len(counted) <= suite.AT_MOST
    for test in listed:
        assert any(test.startswith(file) for file in TABLE["files"]), test
    assert len((HERE / "transformerlens_shim.py").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_some_of_transformerlens_own_tests(tmp_path, monkeypatch):
    try:
        source = sdist.unpacked(None, tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    words = tmp_path / "tokenizer.json"
    words.write_text(sdist.tokenizer(sdist.words(source)))
    monkeypatch.setenv("TL_TOKENIZER", str(words))
    suite.run(source, FAST, 0, tmp_path / "report")
    found = suite.outcomes(tmp_path / "report")
    assert len(found) > 40 and sum(each["ours"] for each in found.values()) > 20
    assert suite.differences(found, suite.expected(TABLE)) == []
