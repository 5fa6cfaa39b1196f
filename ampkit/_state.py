"""What training state is: which tensors a step changes, and whether they are still the ones it was captured with."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ._torch import module_tables


class Generation(NamedTuple):
    """What a captured graph has frozen beside its input. While it is equal, a replay does the right thing."""

    containers: tuple["_Identity", ...]  # optimizer.state and param_groups: load_state_dict replaces them
    addresses: tuple[int, ...]  # of parameters, buffers and child modules
    modes: tuple[bool, ...]  # requires_grad per parameter, training per module
    host: tuple[Any, ...]  # hyperparameters, loss-scale rule, autocast around the call

    def changes(self, new: "Generation") -> str:
        """Return in words what differs from `new`, or "" if nothing does."""
        words = (
            ("the optimizer's state was replaced (load_state_dict)", self.containers, new.containers),
            ("a parameter, buffer or module was replaced or moved", self.addresses, new.addresses),
            ("train/eval mode or requires_grad changed", self.modes, new.modes),
            (
                "a param group, a hyperparameter, the loss-scale rule or the autocast around the step changed",
                self.host,
                new.host,
            ),
        )
        return ", ".join(text for text, old, now in words if old != now)


class _Identity:
    """Compares by identity, and keeps what it compares alive so that its address is not given to another object."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


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
        scaler: GradScaler | None = None,
    ) -> None:
        self.modules = modules
        self.optimizers = tuple(optimizers)
        self.scaler = scaler

    def generation(self) -> Generation:
        """Return what a graph captured now would freeze. Host only, about 0.2 us per parameter; no sync."""
        addresses: list[int] = []
        modes: list[bool] = []
        for root in self.modules.values():
            for module in _walk(root):
                params, buffers, children = module_tables(module)
                modes.append(module.training)
                for param in params.values():
                    if param is not None:
                        addresses.append(param.data_ptr())
                        modes.append(param.requires_grad)
                addresses.extend(buffer.data_ptr() for buffer in buffers.values() if buffer is not None)
                addresses.extend(map(id, children.values()))
        containers = [_Identity(part) for opt in self.optimizers for part in (opt.state, opt.param_groups)]
        return Generation(tuple(containers), tuple(addresses), tuple(modes), self._host())

    def _host(self) -> tuple[Any, ...]:
        values: list[Any] = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                values.append(len(group["params"]))
                # A tensor is read when the graph is replayed, and a float learning rate is fed through one (_optim.py).
                values.extend((k, v) for k, v in group.items() if k not in _NOT_FROZEN and not isinstance(v, Tensor))
        if self.scaler is not None and self.scaler.is_enabled():
            scaler = self.scaler
            values += [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
        return tuple(values)

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


_DEVICES = ("cuda", "cpu")
_NOT_FROZEN = ("params", "lr", "initial_lr")


def _walk(root: nn.Module) -> list[nn.Module]:
    seen = {root: None}  # a module may be registered under two names
    queue = [root]
    for module in queue:
        for child in module_tables(module)[2].values():
            if child is not None and child not in seen:
                seen[child] = None
                queue.append(child)
    return queue
