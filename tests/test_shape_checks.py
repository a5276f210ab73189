"""What the tests check of every call: shapes, types and results, as signatures name them."""

import inspect

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.sparsity import l1_and_hoyer
from crate_interp.results.statistic import Statistic
from shape_checks import checked


@checked(typechecker=beartype)
def product(
    left: Float[Tensor, "row inner"], right: Float[Tensor, "inner col"], turned: "bool" = False
) -> Float[Tensor, "row col"]:
    """The result has other axes than its annotation says if it is turned."""
    return (left @ right).T if turned else left @ right


@pytest.mark.parametrize(
    "call",
    [
        lambda: product(torch.ones(2, 3), torch.ones(5, 3)),  # one name, two sizes
        lambda: product(torch.ones(2, 3, 1), torch.ones(3, 5)),
        lambda: product(torch.ones(2, 3).int(), torch.ones(3, 5)),
        lambda: product([[1.0]], torch.ones(3, 5)),  # pyright: ignore
        lambda: product(torch.ones(2, 3), torch.ones(3, 5), turned=True),
        lambda: product(torch.ones(2, 3), torch.ones(3, 5), turned="yes"),  # pyright: ignore
        lambda: l1_and_hoyer(torch.ones(2, 3).int()),  # the package is checked
        lambda: Statistic(3, "higher is spikier", "units", 0.0, None, ""),  # pyright: ignore
    ],
)
def test_calls_are_refused(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()
    assert product(torch.ones(2, 3), torch.ones(3, 5)).shape == (2, 5)
    assert inspect.unwrap(l1_and_hoyer) is not l1_and_hoyer
