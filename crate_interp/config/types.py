"""The types of fields that take more than they store.

When a config is made, such a field takes what the second branch says. It is then stored in the
form of the first branch, which is what readers of a config, and so type checkers, have to know.
"""

from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

if TYPE_CHECKING:
    T = TypeVar("T")
    Filled = Annotated[T, "None is replaced by a default"]
    Size = tuple[int, int]  # (h, w)
    SideOrSize = int | tuple[int, int]
else:
    Filled = Optional
    Size = int | tuple[int, int] | list[int]
    SideOrSize = Size

# the value of a Filled field that is not given
DEFAULT: Any = None
