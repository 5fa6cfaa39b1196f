"""What is put back after a run: modules, optimizers, anything with a state dict, and random numbers."""

import copy
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._capture.state.state import TrainingState


def training_state(parts: Sequence[Any]) -> TrainingState:
    """Return the modules and optimizers among `parts` as a `TrainingState`, which names their tensors."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    names = ["model"] if len(modules) == 1 else [f"module[{i}]" for i in range(len(modules))]
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    return TrainingState(dict(zip(names, modules, strict=True)), optimizers)


class SavedState:
    """Modules, optimizers, anything with a state dict, and random numbers, as they were when this was made."""

    def __init__(self, parts: Sequence[Any], generators: Sequence[torch.Generator]) -> None:
        self.parts = parts
        self._state = training_state(parts)
        self._live = self._state.tensors()
        own = (tensor for path, tensor in self._live.items() if not path.startswith("optimizer["))
        self._values = [(tensor, tensor.detach().clone()) for tensor in own]
        # Not by path: a parameter that belongs to no module has none. And not tensors only: SparseAdam and LBFGS keep
        # their counts as Python numbers.
        self._moments = [
            {param: _restorer(values) for param, values in optimizer.state.items()}
            for optimizer in self._state.optimizers
        ]
        params = dict.fromkeys(param for module in self._state.modules.values() for param in module.parameters())
        self._grads = [(param, param.grad, None if param.grad is None else param.grad.clone()) for param in params]
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        self._groups = [(group, {key: _restorer(group[key]) for key in group if key != "params"}) for group in groups]
        others = [part for part in parts if not isinstance(part, (nn.Module, torch.optim.Optimizer))]
        for part in others:
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ValueError(
                    f"compare(state=[{type(part).__name__}]): expected modules, optimizers, and objects with "
                    "state_dict and load_state_dict, such as a gradient scaler or a scheduler."
                )
        self._state_dicts = [(part, copy.deepcopy(part.state_dict())) for part in others]
        # For each source of random numbers, the function that sets its state, and its state.
        self._random: list[tuple[Callable[[Any], Any], Any]] = [(random.setstate, random.getstate())]
        if (numpy := sys.modules.get("numpy")) is not None:  # it loads numpy.random when that is first looked up
            self._random.append((numpy.random.set_state, numpy.random.get_state()))
        self._random.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_available():
            self._random.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
        self._random += [(generator.set_state, generator.get_state()) for generator in generators]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place where that is possible."""
        came = self._state.rebound_since(self._live)
        self._state.rebind(self._live)
        if any(path.startswith("optimizer[") for path in came):
            for optimizer in self._state.optimizers:
                # A graph captured meanwhile writes to state that is not the optimizer's any more. The new container
                # tells its owner, as load_state_dict would (`Generation`).
                optimizer.state = copy.copy(optimizer.state)
        for optimizer, moments in zip(self._state.optimizers, self._moments, strict=True):
            for param in [param for param in optimizer.state if param not in moments]:
                del optimizer.state[param]
            optimizer.state.update({param: put_back() for param, put_back in moments.items()})
        for tensor, value in self._values:
            tensor.copy_(value)
        for param, grad, before in self._grads:
            param.grad = grad
            if grad is not None and before is not None:
                grad.copy_(before)
        for group, options in self._groups:
            group.update({key: put_back() for key, put_back in options.items()})
        for part, saved in self._state_dicts:
            part.load_state_dict(copy.deepcopy(saved))
        for set_state, saved in self._random:
            set_state(saved)


def _restorer(value: Any) -> Callable[[], Any]:
    """Return a function that gives the same object with its present content: of tensors, lists and dicts, deeply."""
    if isinstance(value, Tensor):
        before = value.detach().clone()
        return lambda: value.copy_(before)
    if not isinstance(value, (dict, list, tuple)):
        return lambda: value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    restorers = {key: _restorer(item) for key, item in items}

    def restore() -> Any:
        content = {key: put_back() for key, put_back in restorers.items()}
        if isinstance(value, dict):
            value.clear()
            value.update(content)
        elif isinstance(value, list):
            value[:] = content.values()
        return value  # a tuple still holds the same objects, whose content is restored by now

    return restore
