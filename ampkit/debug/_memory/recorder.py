"""The ways to ask where the memory went: a function that is called a few times, or a context around a loop."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..._arguments import check_at_least, check_callable, check_instance, read_device
from ..._text import type_text
from ..._torch.tree import tree_flatten
from .categories import Blocks, Ledger, Sizes
from .profile import MemoryProfile


class Recorded:
    """Context that records who holds the memory of a device. Made by `memory`.

    It can be entered once.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        inputs: Any,
        device: torch.device,
        label: str,
    ) -> None:
        self._parts = model, optimizers, inputs
        self._device = device
        self._label = label
        self._ledger: Ledger | None = None
        self._profile: MemoryProfile | None = None

    def __enter__(self) -> "Recorded":
        self._enter(sys._getframe(1))
        return self

    @contextmanager
    def entered(self, frame: FrameType) -> Iterator[Ledger]:
        """Context in which it records for a caller at that frame."""
        ledger = self._enter(frame)
        try:
            yield ledger
        finally:
            self.__exit__(None, None, None)

    def _enter(self, entered: FrameType) -> Ledger:
        if self._ledger is not None:
            raise ValueError("debug.memory: this context was entered before. Make a new one: debug.memory(model, ...).")
        sizes = Blocks() if self._device.type == "cuda" else Sizes()
        self._ledger = Ledger(self._device, *self._parts, entered, sizes)
        self._ledger.__enter__()
        return self._ledger

    def __exit__(self, *error: Any) -> None:
        assert self._ledger is not None
        self._ledger.__exit__(*error)
        self._profile = self._ledger.profile(self._label, forecast=False)

    @property
    def profile(self) -> MemoryProfile:
        """What was recorded.

        Raises:
            ValueError: the context was not left yet.
        """
        if self._profile is None:
            raise ValueError("debug.memory: there is no profile before the context is left.")
        return self._profile


@overload
def memory(  # a module that is called with a batch is the second
    fn: nn.Module | None = None,
    /,
    *optimizers: torch.optim.Optimizer,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    inputs: Any = (),
    device: torch.device | str | None = None,
    label: str = "",
) -> Recorded: ...


@overload
def memory(
    fn: Callable[..., Any],
    /,
    *args: Any,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    inputs: Any = None,
    steps: int = 1,
    device: torch.device | str | None = None,
    label: str = "",
    **kwargs: Any,
) -> MemoryProfile: ...


def memory(
    fn: Any = None,
    /,
    *args: Any,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    inputs: Any = None,
    steps: int | None = None,
    device: torch.device | str | None = None,
    label: str = "",
    **kwargs: Any,
) -> Any:
    """Record who holds the memory of a device over one or more steps, byte by byte, with the line of each.

    ::

        profile = ampkit.debug.memory(train_step, *batch, model=model, optimizer=optimizer, steps=2)
        print(profile)

        with ampkit.debug.memory(model, optimizer) as recorded:
            for batch in itertools.islice(loader, 2):
                train_step(*batch)
        print(recorded.profile)

    Every storage is watched from the operation that makes it to its end, and has one category all its life, settled by
    what becomes of it. *parameter*: parameters and buffers. *gradient*: what is accumulated into a `.grad`. *optimizer
    state*. *input*: the batch, what else was there before, and what comes from another device. *activation*: made in
    forward (or by checkpointing, again) and still there when backward begins. *autograd detail*: made in backward, and
    no gradient of a leaf. *temporary*: the rest, so on CUDA also what libraries take for themselves. *graph pool*: what
    the pools of CUDA graphs hold, used or not; a graph that is replayed shows nothing else.

    The first step makes what later ones find: record two. The code computes what it would anyway, a tenth of a
    millisecond slower per operation, but for one thing: where gradients meet, autograd adds them in a new place, and
    not in place. On CUDA, sizes are those of the allocator's blocks, so that they add up to
    `torch.cuda.memory_allocated`; what was there before and is never used is not counted, and the device's peak
    statistics are reset. On a CPU, sizes are what tensors ask for.

    What torch.compile made is recorded as the eager code that it was made of, and runs compiled again afterwards: what
    it saves in memory does not show. So a graph that is captured meanwhile holds eager code too; record before that.

    Args:
        fn: what to call. A module with no arguments but optimizers, or nothing at all, makes a context manager.
        args: what to call it with; in a context manager the optimizers.
        model: whose parameters they are; by default `fn` where that is a module.
        optimizer: whose state it is; of several, a list.
        inputs: a tree of tensors that are the batch; by default those among the arguments.
        steps: how often to call `fn`, by default once. A context manager takes none.
        device: whose memory, by default the one that the model is on, else the inputs.
        label: what the profile calls itself.
        kwargs: what to call `fn` with.

    Returns:
        A `MemoryProfile`, or a context manager that has one as `.profile` when it is left.

    Raises:
        ValueError: no steps, or an argument that a context manager does not take.

    Sync: none of its own. Aliasing: none; no tensor is kept alive.
    """
    optimizers = _optimizers(optimizer)
    if model is not None:
        check_instance("debug.memory", "model", model, nn.Module, "a torch.nn.Module")
    if fn is not None:
        check_callable("debug.memory", "fn", fn, "a function, a module, or None for a context manager")
    check_instance("debug.memory", "label", label, str, "a string")
    model = fn if model is None and isinstance(fn, nn.Module) else model
    given = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
    if fn is None or (isinstance(fn, nn.Module) and len(given) == len(args) and not kwargs):
        _check_context(steps, [arg for arg in args if not isinstance(arg, torch.optim.Optimizer)], kwargs)
        return Recorded(model, [*given, *optimizers], inputs, _device(device, model, inputs), label)
    steps = 1 if steps is None else steps
    check_at_least("debug.memory", "steps", steps, 1, "how often the function is called")
    inputs = (args, kwargs) if inputs is None else inputs
    recorded = Recorded(model, optimizers, inputs, _device(device, model, inputs), label)
    with recorded.entered(sys._getframe(1)) as ledger:
        for _ in range(steps):
            ledger.begin_step()
            fn(*args, **kwargs)
    return recorded.profile


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return what was passed as `optimizer` as a list."""
    made = list(optimizer) if isinstance(optimizer, (tuple, list)) else [] if optimizer is None else [optimizer]
    if not all(isinstance(one, torch.optim.Optimizer) for one in made):
        raise ValueError(f"debug.memory(optimizer={type_text(tuple(made))}): expected an optimizer, or a list of them.")
    return made


def _check_context(steps: int | None, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Refuse what a context manager would have to leave out."""
    call = "debug.memory(train_step, *batch, model=model, optimizer=optimizer, steps=2)"
    if steps is not None:
        raise ValueError(
            f"debug.memory(steps={steps!r}): with a model alone it is a context manager, whose steps are those of the "
            f"loop in it: with debug.memory(model, optimizer) as recorded. To have a function called, write {call}."
        )
    if args or kwargs:
        found = ", ".join([*map(type_text, args), *(f"{name}=" for name in kwargs)])
        raise ValueError(f"debug.memory(None, {found}): nothing to call with that. Write {call}.")


def _device(device: torch.device | str | None, model: nn.Module | None, inputs: Any) -> torch.device:
    """Return the device to watch, with its index."""
    if device is None:
        leaves = tree_flatten(inputs)[0]
        tensors = [*(() if model is None else model.parameters()), *(x for x in leaves if isinstance(x, Tensor))]
        device = tensors[0].device if tensors else "cpu"
    device = read_device("debug.memory", "device", device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
