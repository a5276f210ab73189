"""What the tests check of every call: shapes, types and results, as signatures name them."""

import inspect
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.measures.sparsity import l1_and_hoyer
from crate_interp.results.statistic import Statistic
from shape_checks import checked

check = checked(typechecker=beartype)
Matrix = Float[Tensor, "row col"]


@check
def product(left: Float[Tensor, "row inner"], right: Float[Tensor, "inner col"]) -> Matrix:
    return left @ right


@check
def transposed(value: Matrix, *, wrong: bool = False) -> Matrix | None:
    """The result has other axes than its own annotation says, unless it is square."""
    inside = product(torch.ones(2, 3), torch.ones(3, 5))  # the same names, other sizes
    return value.T if wrong else value if inside is not None else None


@check
def named(value: "Later") -> "NeverImported":  # noqa: F821  # pyright: ignore
    return value


@check
def stream(count: int) -> Iterator[Matrix]:
    yield from (torch.ones(number, 2) for number in range(count))


class Later:
    @check
    def sizes(self, tables: list[Int[Tensor, " row"]], scale: float | None = None) -> list[int]:
        return [len(table) for table in tables] if scale is None else "wrong"  # pyright: ignore


def refuses(call, *args, **kwargs):
    with pytest.raises(jaxtyping.TypeCheckError):
        call(*args, **kwargs)


def test_arguments_and_results():
    assert product(torch.ones(2, 3), torch.ones(3, 5)).shape == (2, 5)
    refuses(product, torch.ones(2, 3), torch.ones(5, 3))  # one name, two sizes
    refuses(product, torch.ones(2, 3, 1), torch.ones(3, 5))
    refuses(product, torch.ones(2, 3).int(), torch.ones(3, 5))
    refuses(product, [[1.0]], torch.ones(3, 5))
    assert transposed(torch.ones(7, 11)) is not None
    refuses(transposed, torch.ones(7, 11), wrong=True)
    refuses(transposed, torch.ones(7, 11), wrong="yes")


def test_names_in_quotes_lists_and_methods():
    later = Later()
    assert named(later) is later
    refuses(named, 3)
    assert later.sizes([torch.arange(3)]) == [3]
    refuses(later.sizes, [torch.ones(3)])
    refuses(later.sizes, [torch.arange(3)], scale=1.0)
    refuses(later.sizes, [torch.arange(3)], scale="1")
    assert [len(one) for one in stream(3)] == [0, 1, 2]
    refuses(stream, "3")


def test_the_package_is_checked():
    refuses(l1_and_hoyer, torch.ones(2, 3).int())
    refuses(Statistic, 3, "higher is spikier", "units", 0.0, None, "What it says.")
    assert inspect.unwrap(l1_and_hoyer) is not l1_and_hoyer


@pytest.mark.usefixtures("unchecked")
def test_the_checks_can_be_switched_off():
    assert product(torch.ones(2, 3).double(), torch.ones(3, 5).double()).shape == (2, 5)
    assert Later().sizes([torch.ones(3)], scale=1.0) == "wrong"
