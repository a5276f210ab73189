"""Checks of torch.compile and torch.export that cannot run where every type is checked.

    python tests/traced.py compile

runs one of the checks below, which raises if it fails. tests/test_neighbours_tracing.py runs them:
torch's compiler does not follow the type checks that the tests switch on.
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

from conftest import make, make_lm
from neighbours import every_model, ids, make_mae, pictures

ANY = torch.export.Dim.DYNAMIC


def compiled(model, backend="eager", **options):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend, **options)


def check_compile():
    """Every model is compiled whole, and answers as before."""
    with torch.no_grad():
        for backend in ("eager", "aot_eager"):
            for model, args in every_model():
                got, wanted = compiled(model, backend)(*args), model(*args)
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
            mae, args = make_mae(), (pictures(3), torch.rand(3, 12))
            torch.testing.assert_close(compiled(mae, backend)(*args).pred, mae(*args).pred)


def check_gradients():
    """A compiled model has the gradients of the plain one."""
    for model, batch in ((make(), pictures(3)), (make_lm("crate-lm"), ids(3, 7))):
        model(batch).square().mean().backward()
        plain = {name: value.grad.clone() for name, value in model.named_parameters()}
        model.zero_grad()
        compiled(model, "aot_eager")(batch).square().mean().backward()
        for name, value in model.named_parameters():
            torch.testing.assert_close(value.grad, plain[name], atol=1e-5, rtol=1e-4)


def check_export():
    """Strict export, which reads the code as the compiler does, admits any batch."""
    for model, args in every_model():
        dynamic = tuple({0: ANY} for _ in args)
        program = torch.export.export(model, args, dynamic_shapes=dynamic, strict=True).module()
        other = tuple(value[:2] for value in args)
        assert torch.equal(program(*other), model(*other))


def check_hooks():
    """Hooks reach a compiled language model, and leave it."""
    model, tokens = make_lm("crate-lm"), ids(3, 7)
    fast = compiled(model)
    plain = fast(tokens)
    for point in ("blocks.0.ln1.hook_scale", "blocks.1.attn.hook_q", "blocks.2.hook_mlp_out"):
        with model.hooks(fwd_hooks=[(point, lambda tensor, hook: tensor * 2)]):
            torch.testing.assert_close(fast(tokens), model(tokens), atol=1e-5, rtol=1e-5)
            assert not torch.allclose(fast(tokens), plain, atol=1e-3)
        assert torch.equal(fast(tokens), plain)


CHECKS = {
    "compile": check_compile,
    "gradients": check_gradients,
    "export": check_export,
    "hooks": check_hooks,
}

if __name__ == "__main__":
    warnings.simplefilter("error")
    CHECKS[sys.argv[1]]()
