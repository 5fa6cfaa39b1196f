"""What training state is: which tensors a step changes, and whether they are still the ones it was captured with."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ._torch import function_modes, module_tables


class Generation(NamedTuple):
    """What a captured graph has frozen beside its input. While it is equal, a replay does the right thing."""

    containers: tuple["_Identity", ...]  # optimizer.state and param_groups: load_state_dict replaces them
    walk: "_Walk"  # the parameters, buffers and child modules themselves
    addresses: tuple[int, ...]  # of parameters and buffers: `.data =` and module.to() move them
    modes: tuple[bool, ...]  # requires_grad per parameter and buffer, training per module
    host: tuple[tuple[str, Any], ...]  # hyperparameters, loss-scale rule, autocast around the call, by name

    def changes(self, new: "Generation") -> str:
        """Return in words what differs from `new`, or "" if nothing does."""
        words = (
            ("the optimizer's state was replaced (load_state_dict)", self.containers, new.containers),
            (self.walk.first_change(new.walk), self.walk, new.walk),
            ("a parameter or buffer was moved to other memory", self.addresses, new.addresses),
            ("train/eval mode or requires_grad changed", self.modes, new.modes),
            ("a param group was added", len(self.host), len(new.host)),
        )
        coarse = [text for text, old, now in words if old != now]
        if coarse:
            return coarse[0]  # the others follow from it
        pairs = zip(self.host, new.host, strict=True)
        return ", ".join(f"{name} changed" for (name, old), (_, now) in pairs if old != now)


class _Identity:
    """Compares by identity, and keeps what it compares alive so that its address is not given to another object."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class Scaler(Protocol):
    """What training state asks of a gradient scaler."""

    def is_enabled(self) -> bool:
        """Return whether it scales at all."""

    def rule(self) -> dict[str, Any]:
        """Return the host values that decide how the scale moves, by name."""


class _Walk:
    """The modules below some roots with everything in them, kept as long as no table of any of them changes."""

    def __init__(self, roots: dict[str, nn.Module]) -> None:
        self.modules = list(roots.values())
        self._roots = roots
        seen = set(self.modules)  # a module may be registered under two names
        for module in self.modules:  # grows below
            for child in module_tables(module)[2].values():
                if child is not None and child not in seen:
                    seen.add(child)
                    self.modules.append(child)
        self._tables = [table for module in self.modules for table in module_tables(module)]
        self._held = self._objects()  # keeps them alive, so that no identity is given to another object
        self._ids = list(map(id, self._held))
        self.tensors = [held for held in self._held if isinstance(held, Tensor)]

    def _objects(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def is_current(self) -> bool:
        """Return whether every table still has the very same objects in it."""
        return list(map(id, self._objects())) == self._ids

    def first_change(self, new: "_Walk") -> str:
        """Return in words the first difference from a walk of the same roots."""
        pairs = zip(self._names(), self._held, new._names(), new._held, strict=False)
        for old_name, old, new_name, now in pairs:
            if old_name != new_name:
                return f"{new_name} was added or {old_name} removed"
            if old is not now:
                return f"{new_name} was replaced"
        return "a parameter, buffer or module was added or removed"

    def _names(self) -> list[str]:
        paths = {module: path for root, top in self._roots.items() for path, module in top.named_modules(prefix=root)}
        owners = (paths.get(module, "?") for module in self.modules for _ in range(3))  # three tables each
        return [f"{owner}.{key}" for owner, table in zip(owners, self._tables, strict=True) for key in table]


class TrainingState:
    """The modules, optimizers and scaler that a step may change.

    Args:
        modules: modules by the name that messages use.
        optimizers: optimizers over parameters of these modules.
        scaler: the gradient scaler, or None.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Scaler | None = None,
    ) -> None:
        self.modules = modules
        self.optimizers = tuple(optimizers)
        self.scaler = scaler
        self._walk: _Walk | None = None

    def generation(self) -> Generation:
        """Return what a graph captured now would freeze. In every call: about 50 us for a ResNet-18. No sync."""
        if self._walk is None or not self._walk.is_current():
            self._walk = _Walk(self.modules)
        walk = self._walk
        return Generation(
            containers=tuple(_Identity(part) for opt in self.optimizers for part in (opt.state, opt.param_groups)),
            walk=walk,
            addresses=tuple([tensor.data_ptr() for tensor in walk.tensors]),
            modes=tuple([t.requires_grad for t in walk.tensors] + [m.training for m in walk.modules]),
            host=self._host(),
        )

    def _host(self) -> tuple[tuple[str, Any], ...]:
        named: list[tuple[str, Any]] = []
        for kind in ("cuda", "cpu"):
            enabled = torch.is_autocast_enabled(kind)
            named.append((f"{kind} autocast around the step", torch.get_autocast_dtype(kind) if enabled else None))
        # A policy's rules for operations are a mode of its own type, and its rules for a module are the module's class.
        named.append(("the policy around the step", tuple(map(type, function_modes()))))
        assert self._walk is not None  # made by generation
        named.append(("the policy on the model", tuple(map(type, self._walk.modules))))
        for optimizer in self.optimizers:
            for i, group in enumerate(optimizer.param_groups):
                named.append((f"the number of parameters in param_groups[{i}]", len(group["params"])))
                # A tensor is read when the graph is replayed, and a float learning rate is fed through one (_optim.py).
                frozen = (key for key in group if key not in _NOT_FROZEN and not isinstance(group[key], Tensor))
                named.extend((f"param_groups[{i}][{key!r}]", group[key]) for key in frozen)
        if self.scaler is not None and self.scaler.is_enabled():
            named.extend((f"the scaler's {name}", value) for name, value in self.scaler.rule().items())
        return tuple(named)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of modules and optimizers by a path that a user can read. Aliasing: the live tensors."""
        return {path: table[key] for path, table, key in self._cells()}

    def rebound_since(self, before: dict[str, Tensor]) -> list[str]:
        """Return the paths that hold another tensor than in `before`, an earlier result of `tensors`."""
        return [path for path, tensor in self.tensors().items() if before.get(path) is not tensor]

    def rebind(self, before: dict[str, Tensor]) -> None:
        """Put the tensors of `before` back in their places and drop those that came since. Copies nothing."""
        for path, table, key in list(self._cells()):
            if path in before:
                table[key] = before[path]
            else:
                del table[key]

    def _cells(self) -> Iterator[tuple[str, dict[Any, Any], Any]]:
        owners: dict[Tensor, str] = {}
        for root, top in self.modules.items():
            for prefix, module in top.named_modules(prefix=root):
                for table in module_tables(module)[:2]:
                    for key, tensor in table.items():
                        if tensor is not None:
                            owners[tensor] = f"{prefix}.{key}"
                            yield owners[tensor], table, key
        for i, optimizer in enumerate(self.optimizers):
            for param, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"optimizer[{i}].{owners.get(param, '?')}.{key}", state, key


_NOT_FROZEN = ("params", "lr", "initial_lr")
