"""Who runs a model's layers: compilers and tracers of torch, and accelerate's offloading.

torch's compiler reads a model's hooks only once, when it compiles: a hook added later never fires,
and a removed one keeps firing. But the compiler checks plain attributes before each call, so a
model keeps the state of its hooks in an attribute.

accelerate keeps weights on the CPU or on disk until a layer runs: between the runs of a layer its
parameters are on the meta device, which holds no numbers. Code that reads weights outside a layer's
own forward brings them back first. accelerate itself need not be imported, because it leaves its
hook on each module that it offloads.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule


class CompiledMixin(HookedRootModule):
    """A model whose hooks also fire after torch.compile.

    `torch.compile(model)` compiles once without hooks, and again for each new set of hooks.
    `model.compile()` runs uncompiled while there are hooks. Only hooks that the model itself adds
    and removes are noticed (add_hook, hooks, run_with_hooks, reset_hooks); hooks from
    `register_forward_hook` on a point are not.
    """

    # Two strings: the current state of the hooks, and the last state with hooks. The current state
    # is "" while there are no hooks; each new set of hooks gets a new number. The towers of a CLIP
    # share this list with the CLIP.
    _hook_state: list[str]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._hook_state = ["", "0"]

    def _hooks_changed(self, hooked: bool) -> None:
        state = self._hook_state
        if hooked:
            state[1] = str(int(state[1]) + 1)
        state[0] = state[1] if hooked else ""

    def watch_hooks(self) -> None:
        """Shows torch's compiler the state of the hooks; every forward begins with this call."""
        if torch.compiler.is_compiling() and self._note_compiled() and self._hook_state[0]:
            pass  # the compiler reads the state here, and compiles again if it changes

    def _note_compiled(self) -> bool:
        self.__dict__.setdefault("_warned_of_compiling", False)
        return True

    # The decorator torch.compiler.assume_constant_result sets this mark: the compiler calls a
    # marked function once, outside the model. The mark is set here by hand, because importing the
    # decorator would take two seconds.
    _note_compiled._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compiles the model in place, with the arguments of torch.nn.Module.compile.

        Unlike in torch, a model with hooks runs uncompiled, so that the hooks fire.
        """
        super().compile(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        fast: Any = self._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return (self._call_impl if self._hook_state[0] else fast)(*args, **kwargs)

        self._compiled_call_impl = call

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: Callable[..., Any],
        *args: object,
        **kwargs: object,
    ) -> None:
        """Adds a hook as TransformerLens does; warns once if the model was compiled."""
        super().add_hook(name, hook, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        self._hooks_changed(True)
        if self.__dict__.get("_warned_of_compiling") is False:
            self.__dict__["_warned_of_compiling"] = True
            warnings.warn(
                "this model was compiled with torch.compile, which compiles it again for this hook "
                "and for each later set of hooks. This takes long. For a few runs, use "
                "run_with_hooks or run_with_cache, which run the uncompiled model.",
                stacklevel=3,
            )

    def _enable_hook(self, name: str | Callable[[str], bool], hook: Callable, dir: Any) -> None:
        super()._enable_hook(name, hook, dir)
        self._hooks_changed(True)

    def remove_all_hook_fns(self, *args: object, **kwargs: object) -> None:
        """Removes hooks; the arguments are TransformerLens'."""
        super().remove_all_hook_fns(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        self._hooks_changed(any(point.has_hooks() for point in self.hook_dict.values()))


def readable(x: Tensor) -> bool:
    """Tells whether Python code may read the values of a tensor, for a check or a decision.

    The values may not be read under torch.compile, torch.export, jit tracing, torch.func.vmap or a
    gradient of torch.func, on the meta device, or in a subclass that has no values (FakeTensor).
    A forward that read values there could not be traced, or would be traced for one input only.
    """
    return not (
        torch.compiler.is_compiling()
        or x.is_meta
        or type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore
        or torch._C._get_tracing_state() is not None
    )


P = ParamSpec("P")
T = TypeVar("T")


def align_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks with which accelerate moves a module's weights."""
    hook = module.__dict__.get("_hf_hook")
    return [one for one in getattr(hook, "hooks", (hook,)) if hasattr(one, "execution_device")]


@contextmanager
def onloaded(part: nn.Module) -> Iterator[None]:
    """Keeps a module's weights on the device that uses them, while the context is open.

    Modules that are not offloaded are left alone.
    """
    pairs = ((module, hook) for module in part.modules() for hook in align_hooks(module))
    away = [(module, hook) for module, hook in pairs if getattr(hook, "offload", False)]
    brought = []
    try:
        for module, hook in away:
            hook.pre_forward(module)
            hook.offload = False  # otherwise a forward would offload the weights again
            brought.append((module, hook))
        yield
    finally:
        for module, hook in reversed(brought):
            hook.offload = True
            hook.post_forward(module, None)


def at_hand(module: nn.Module, name: str = "weight") -> Tensor:
    """Returns a parameter of a module, brought back if it is offloaded."""
    value = getattr(module, name)
    if not value.is_meta:
        return value
    with onloaded(module):
        return getattr(module, name)


def bias_of(linear: nn.Linear) -> Tensor:
    """Returns the bias of a linear map, brought back if it is offloaded; zeros if it has none."""
    if linear.bias is None:
        return torch.zeros_like(at_hand(linear)[:, 0])
    return at_hand(linear, "bias")


def with_weights(measure: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wraps a function so that its first argument's weights are brought back while it runs.

    The first argument is a model or a cache. Given anything else, the function itself must raise an
    error.
    """

    @wraps(measure)
    def run(subject: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        part = getattr(subject, "model", subject)
        part = part if isinstance(part, nn.Module) else getattr(part, "model", None)
        with onloaded(part) if isinstance(part, nn.Module) else nullcontext():
            return measure(subject, *args, **kwargs)

    return run
