"""The toy of the lab on norm ladders: its sequences, what cuts take away, and its heads by hand."""

import norm_ladder as toy
import pytest
import torch


def setting(**over):
    chosen = dict(scale=0.3, tying="tied", diagonal="kept", positions="absolute", sparse="mlp")
    return toy.Setting(**(chosen | over))


def test_the_answer_stands_behind_its_key_and_guessing_gives_a_third():
    tokens, starts, wanted = toy.bindings(997, torch.Generator().manual_seed(0))
    assert tokens.shape == (toy.SEEDS, 997, toy.LENGTH) and starts.unique().tolist() == [0, 1, 2, 3]
    assert (tokens[..., -2] == toy.SYMBOLS).all()
    asked = tokens[..., -1:] == tokens[..., 0:6:2]
    assert (asked.sum(-1) == 1).all() and (tokens[..., 1:6:2][asked] == wanted.flatten()).all()
    assert all(len(set(row)) == 6 for row in tokens[..., :6].flatten(0, 1).tolist())
    assert asked.double().mean((0, 1)).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)


def test_what_a_query_sees():
    sees = toy.visible("masked", "values")
    assert sees.diagonal().tolist() == [True, True] + [False] * 6  # those that see nothing else
    assert not sees[3, 2] and sees[5, 2] and not sees.triu(1).any()
    assert toy.visible("kept", "query")[7].tolist() == [c not in (0, 2, 4) for c in range(8)]


@pytest.mark.parametrize("sparse", toy.SPARSE)
@pytest.mark.parametrize("positions", toy.POSITIONS)
@pytest.mark.parametrize("tying", toy.TYINGS)
def test_one_sequence_of_one_seed_by_hand(tying, positions, sparse):
    chosen = setting(tying=tying, positions=positions, sparse=sparse)
    weights = {name: one.detach().double() for name, one in toy.drawn(chosen).items()}
    tokens, starts, _ = toy.bindings(3, torch.Generator().manual_seed(1))
    mine = toy.answers({k: v.float() for k, v in weights.items()}, chosen, tokens, starts)[2, 1]
    own = {name: one[2] for name, one in weights.items()}
    z = own["embed"][tokens[2, 1]]
    if positions == "absolute":
        z = z + own["place"][starts[2, 1] + torch.arange(8)]
    for layer in range(toy.LAYERS):
        x, wide = torch.nn.functional.layer_norm(z, (toy.WIDTH,)), toy.WIDTH // toy.HEADS
        u = x @ own[f"u{layer}"]
        q, k = (x @ own.get(f"{role}{layer}", own[f"u{layer}"]) for role in "qk")
        heads = torch.zeros_like(z)
        for head in range(toy.HEADS):
            part = slice(head * wide, (head + 1) * wide)
            for p in range(8):
                scores = [q[p, part] @ k[j, part] / wide**0.5 for j in range(p + 1)]
                if positions == "relative":
                    scores = [s + own[f"bias{layer}"][head, p - j] for j, s in enumerate(scores)]
                heads[p, part] = torch.stack(scores).softmax(0) @ u[: p + 1, part]
        z = z + heads @ own[f"o{layer}"]
        x, into = torch.nn.functional.layer_norm(z, (toy.WIDTH,)), own[f"in{layer}"]
        if sparse == "mlp":
            z = z + torch.nn.functional.gelu(x @ into) @ own[f"out{layer}"]
        else:
            z = (x + 0.1 * (x - x @ into.T) @ into - 0.01).relu()
    wanted = torch.nn.functional.layer_norm(z[-1], (toy.WIDTH,)) @ own["unembed"]
    torch.testing.assert_close(mine.double(), wanted, rtol=1e-4, atol=1e-5)
