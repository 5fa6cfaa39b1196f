"""How to record the memory of a real step: call a function some times, or enter a context around a loop."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..._arguments import check_at_least, check_callable, check_instance, read_device
from ..._text import type_text
from ..._torch.tensors.tree import tree_flatten
from .allocator import BLOCK, Allocator
from .categories import MemoryTracker
from .profile import MemoryProfile


@dataclass(eq=False, repr=False)
class Recorded:
    """Context that records what holds the memory of a device. `memory` makes it, and it can be entered once."""

    _model: nn.Module | None
    _optimizers: Sequence[torch.optim.Optimizer]
    _inputs: Any
    _device: torch.device
    _label: str
    _tracker: MemoryTracker | None = None
    _profile: MemoryProfile | None = None

    def __enter__(self) -> "Recorded":
        self._enter(sys._getframe(1))
        return self

    def _enter(self, frame: FrameType) -> MemoryTracker:
        if self._tracker is not None:
            raise ValueError("debug.memory: this context was entered before. Make a new one: debug.memory(model, ...).")
        allocator = Allocator(BLOCK if self._device.type == "cuda" else 1)
        self._tracker = MemoryTracker(self._device, self._model, self._optimizers, self._inputs, frame, allocator)
        self._tracker.__enter__()
        return self._tracker

    def __exit__(self, *error: Any) -> None:
        assert self._tracker is not None
        self._tracker.__exit__(*error)
        self._profile = self._tracker.profile(self._label)

    @property
    def profile(self) -> MemoryProfile:
        """The profile of what was recorded.

        Raises:
            ValueError: the context has not ended yet.
        """
        if self._profile is None:
            raise ValueError("debug.memory: there is no profile before the context is left.")
        return self._profile


@overload
def memory(  # makes a context manager; the second overload calls a function, or a module with a batch
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
    """Record what holds the memory of a device over one or more steps: each allocation, with the line that made it.

    ::

        profile = ampkit.debug.memory(train_step, *batch, model=model, optimizer=optimizer, steps=2)
        print(profile)

        with ampkit.debug.memory(model, optimizer) as recorded:
            for batch in itertools.islice(loader, 2):
                train_step(*batch)
        print(recorded.profile)

    Each storage is followed from the operation that makes it until it is freed, and belongs to one category:

    - parameter: parameters and buffers.
    - gradient: what is accumulated into a `.grad`.
    - optimizer state: what the optimizers keep, such as momentum.
    - input: the batch, all else that was there before, and copies from another device.
    - activation: made in forward and still there when backward begins, or made again by checkpointing.
    - autograd detail: made in backward, and not the gradient of a leaf.
    - temporary: everything else. On CUDA, this includes the workspaces that libraries take.
    - graph pool: the pools of CUDA graphs, whether used or not. A graph that is replayed shows nothing else.

    Record two steps, because the first one makes what later steps find, such as optimizer state. The code
    computes what it would compute anyway, a tenth of a millisecond slower per operation. One thing differs: where
    several gradients of a tensor are added, autograd adds them into new memory and not in place.

    Of a model under `fully_shard`, this rank's shards are counted. What is gathered in a step is temporary, and so are
    whole gradients until they are reduced.

    On CUDA, sizes are those of the allocator's blocks, so that they add up to `torch.cuda.memory_allocated`. What was
    there before and is never used is not counted. The device's peak statistics are reset. On a CPU, sizes are what
    tensors ask for.

    Parts that torch.compile made run as eager code while they are recorded, and run compiled again afterwards. So the
    profile does not show what compiling saves in memory, and a graph that is captured meanwhile holds eager code:
    record before you capture.

    Args:
        fn: the function to call. A module with no arguments but optimizers, or nothing at all, makes a context manager.
        args: the arguments of `fn`; for a context manager, the optimizers.
        model: the model whose parameters they are; by default `fn`, if that is a module.
        optimizer: the optimizer whose state it is, or a list of several.
        inputs: a tree of tensors that are the batch; by default those among the arguments.
        steps: how often to call `fn`, by default once. A context manager does not take it.
        device: the device whose memory is recorded; by default that of the model, else that of the inputs.
        label: the name of the profile in tables and plots.
        kwargs: the keyword arguments of `fn`.

    Returns:
        A `MemoryProfile`; or a context manager, `Recorded`, which has it as `.profile` when it has ended.

    Raises:
        ValueError: `steps` is less than 1, or an argument is one that a context manager does not take.

    Sync: none of its own. Aliasing: none; no tensor is kept alive.
    """
    optimizers: list[Any] = [] if optimizer is None else [optimizer]
    if isinstance(optimizer, (tuple, list)):
        optimizers = list(optimizer)
    if not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        text = type_text(tuple(optimizers))
        raise ValueError(f"debug.memory(optimizer={text}): expected an optimizer, or a list of them.")
    if model is not None:
        check_instance("debug.memory", "model", model, nn.Module, "a torch.nn.Module")
    if fn is not None:
        check_callable("debug.memory", "fn", fn, "a function, a module, or None for a context manager")
    check_instance("debug.memory", "label", label, str, "a string")
    model = fn if model is None and isinstance(fn, nn.Module) else model
    given = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
    if fn is None or (isinstance(fn, nn.Module) and len(given) == len(args) and not kwargs):
        call = "debug.memory(train_step, *batch, model=model, optimizer=optimizer, steps=2)"
        if steps is not None:
            raise ValueError(
                f"debug.memory(steps={steps!r}): there is no function to call so often. Write {call}, or leave steps "
                "out and run the steps in a context: with debug.memory(model, optimizer) as recorded: ..."
            )
        others = [type_text(arg) for arg in args if not isinstance(arg, torch.optim.Optimizer)]
        if others or kwargs:
            text = ", ".join([*others, *(f"{name}=" for name in kwargs)])
            raise ValueError(f"debug.memory(None, {text}): there is no function to call with these. Write {call}.")
        return Recorded(model, [*given, *optimizers], inputs, _device(device, model, inputs), label)
    steps = 1 if steps is None else steps
    check_at_least("debug.memory", "steps", steps, 1, "how often the function is called")
    inputs = (args, kwargs) if inputs is None else inputs
    recorded = Recorded(model, optimizers, inputs, _device(device, model, inputs), label)
    tracker = recorded._enter(sys._getframe(1))
    try:
        for _ in range(steps):
            tracker.begin_step()
            fn(*args, **kwargs)
    finally:
        recorded.__exit__(None, None, None)
    return recorded.profile


def _device(device: torch.device | str | None, model: nn.Module | None, inputs: Any) -> torch.device:
    """Return the device to record, with its index."""
    if device is None:
        leaves = tree_flatten(inputs)[0]
        tensors = [*(() if model is None else model.parameters()), *(x for x in leaves if isinstance(x, Tensor))]
        device = tensors[0].device if tensors else "cpu"
    device = read_device("debug.memory", "device", device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
