"""Temporary hooks belong to the thread that puts them in.

Hooks are part of the model, so a hook of one thread would read or edit the forwards of all threads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch
from torch import nn

_ENTERING = Lock()


class Owner:
    """The thread whose temporary hooks are on a model, while it has contexts open.

    A copied or pickled model gets a new owner, without contexts.
    """

    def __init__(self) -> None:
        self.thread, self.contexts = 0, 0

    def __reduce__(self) -> tuple[type["Owner"], tuple[()]]:
        return Owner, ()

    @contextmanager
    def context(self) -> Iterator[None]:
        """Makes this thread the owner while the context is open.

        Raises RuntimeError if another thread has an open context.
        """
        with _ENTERING:
            self.check()
            self.thread, self.contexts = get_ident(), self.contexts + 1
        try:
            yield
        finally:
            with _ENTERING:
                self.contexts -= 1

    def check(self, *_: object) -> None:
        """Raises RuntimeError if another thread has an open context."""
        # first, because torch.compile cannot trace get_ident
        if torch.compiler.is_compiling() or self.thread == get_ident() or not self.contexts:
            return
        # a backward pass that runs layers again, to save memory, does so in a thread of torch
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportAttributeAccessIssue]
            return
        raise RuntimeError(
            "another thread has temporary hooks on this model, and hooks act on the runs of all "
            "threads. Give each thread its own copy.deepcopy(model), or let the threads take turns "
            "with a threading.Lock."
        )

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a hook that raises RuntimeError in other threads while a context is open."""

        def checked_hook(value: Any, **point: Any) -> Any:
            self.check()
            return hook(value, **point)

        return checked_hook


def owner_of(module: nn.Module) -> Owner:
    """Returns the owner of the temporary hooks on a module."""
    return module.__dict__.setdefault("_hook_owner", Owner())
