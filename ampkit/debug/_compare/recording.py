"""Which tensors of a run are recorded: outputs of modules, their gradients, and what the run leaves and returns."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._torch.compile import is_compiled
from ..._torch.device.streams import is_capturing
from ..._torch.tensors.tensors import version
from ..._torch.tensors.tree import keystr, tree_flatten_with_path
from .saved_state import training_state


class TensorId(NamedTuple):
    """By what a tensor is known in both runs; the fields are those of `ComparedTensor`."""

    direction: str
    path: str
    call: int = 1

    def __str__(self) -> str:
        return f"{self.path or '(model)'}, {self.direction}"


def record_run(
    fn: Callable[[], Any], model: nn.Module | None, parts: Sequence[Any]
) -> dict[TensorId, tuple[Tensor, torch.device]]:
    """Call a function. Return copies in host memory, with the devices of the originals.

    First come the outputs of the modules of `model` and their gradients, then the gradients of its parameters, then the
    tensors of `parts` (modules and optimizers) as they are after the run, then those that the function returned.
    """
    hooks = _OutputHooks()
    with hooks.handles:
        if model is not None:
            modules: dict[str, nn.Module] = {}  # by paths without wrappers; of a wrapped module, the wrapper
            wrapped = wrapped_paths(model)
            for path, module in model.named_modules():
                if "_orig_mod" not in path.split("."):  # what is inside compiled code calls no hooks
                    modules.setdefault(without_wrappers(path, wrapped), module)
            for path, module in modules.items():
                hooks.handles.callback(module.register_forward_hook(partial(hooks.on_output, path)).remove)
        result = fn()
    tensors = hooks.tensors
    if model is not None:
        wrapped = wrapped_paths(model)
        grads = ((without_wrappers(name, wrapped), param.grad) for name, param in model.named_parameters())
        tensors.update({TensorId("gradient", name): grad for name, grad in grads if grad is not None})
    state = training_state(parts)
    wrapped = {path for name, module in state.modules.items() for path in wrapped_paths(module, name)}
    wrapped |= {f"optimizer[{i}].{path}" for i in range(len(state.optimizers)) for path in wrapped}
    tensors.update(
        {TensorId("state", without_wrappers(path, wrapped)): tensor for path, tensor in state.tensors().items()}
    )
    for path, leaf in tree_flatten_with_path(result)[0]:
        if isinstance(leaf, Tensor):
            tensors[TensorId("result", f"result{keystr(path)}")] = leaf
    return {which: (tensor.detach().to("cpu", copy=True), tensor.device) for which, tensor in tensors.items()}


@dataclass(eq=False)
class _OutputHooks:
    """Copies the outputs of modules and the gradients of these outputs, on their device, when they are computed."""

    tensors: dict[TensorId, Tensor] = field(default_factory=dict)  # the copies, in the order of their computation
    handles: ExitStack = field(default_factory=ExitStack)  # removes the hooks
    _calls: Counter[str] = field(default_factory=Counter)
    _last: tuple[Tensor, int | None, Tensor] | None = None  # a tensor, its version if it has one, a copy

    def on_output(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """Copy what a module at this path has returned. A forward hook."""
        if torch.compiler.is_compiling() or is_capturing():  # as in `_copy`
            return
        self._calls[path] += 1
        leaves, _ = tree_flatten_with_path(output)
        for where, leaf in leaves:
            if isinstance(leaf, Tensor):
                name = path + (keystr(where) if len(leaves) > 1 else "")
                self._copy(TensorId("forward", name, self._calls[path]), leaf)
                if leaf.requires_grad:
                    hook = partial(self._copy, TensorId("backward", name, self._calls[path]))
                    self.handles.callback(leaf.register_hook(hook).remove)

    def _copy(self, which: TensorId, tensor: Tensor) -> None:
        if torch.compiler.is_compiling() or is_capturing():  # neither compiled code nor a graph may keep these copies
            return
        # A block often returns what its last module returned: one copy is enough. Inference tensors have no version
        # that would tell whether they were changed in between, so each of them is copied.
        number = None if tensor.is_inference() else version(tensor)
        if number is None or self._last is None or self._last[0] is not tensor or self._last[1] != number:
            self._last = (tensor, number, tensor.detach().clone())
        self.tensors[which] = self._last[2]


def wrapped_paths(model: nn.Module, prefix: str = "") -> set[str]:
    """Return the paths of the modules that torch.compile and DistributedDataParallel wrap."""
    wrapped: set[str] = set()
    for path, module in model.named_modules(prefix=prefix):
        if is_compiled(module) or isinstance(module, nn.parallel.DistributedDataParallel):
            wrapped.update(f"{path}.{name}".removeprefix(".") for name, _ in module.named_children())
    return wrapped


def without_wrappers(path: str, wrapped: set[str]) -> str:
    """Return a path without the names under which wrappers hold their modules."""
    parts = path.split(".")
    return ".".join(part for i, part in enumerate(parts, 1) if ".".join(parts[:i]) not in wrapped)
