"""The function of `graphed` as the engine calls it: its optimizers can be captured, and no gradient or cast is left."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .._capture.keys.containers import own_batch
from .._capture.state.state import TrainingState
from .._optimizer.param_groups import CapturableGroups
from .._optimizer.scaler import GradScaler
from .._torch.autograd.backward_thread import run_backwards_here
from .._torch.optimizers import noting_steps
from .._torch.ranks.sharding import ShardedModules
from .._torch.tensors.modes import without_torch_function
from .._torch.tensors.tensors import foreach_copy_, local_shard
from .._undo import Undo
from .outputs import check_outputs, mapped_outputs
from .schedule import Schedule
from .training_step import Phase


class FunctionOutput(NamedTuple):
    """What a call of `StepFunction` returns.

    Attributes:
        returned: what the user's function has returned.
        moves: of each schedule whether an optimizer of its own was stepped, or skipped for an overflow.
    """

    returned: Any
    moves: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class StepFunction:
    """Calls the user's function. `_around(args, kwargs)` returns the context in which that runs.

    Attributes:
        modules: what it may change, by the paths in messages.
        groups: the param groups of optimizers that can be captured.
        name: what messages call it.
        state: all that it may change.
        schedules: what is stepped behind calls.
    """

    _fn: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    groups: list[CapturableGroups]
    _scaler: GradScaler | None
    _shards: ShardedModules
    name: str
    state: TrainingState
    _keeps: bool  # whether there are graphs. Without any, gradients are left as they are
    schedules: Sequence[Schedule] = ()
    _around: Callable[..., AbstractContextManager[None]] | None = None
    _numbers: dict[nn.Parameter, int] = field(default_factory=dict)  # of parameters that were left a gradient

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the declared modules and all in them, each once, by their paths in messages."""
        seen: set[nn.Module] = set()
        for path, module in self.modules.items():
            yield from module.named_modules(seen, path)

    def keep_gradients(self, before: Sequence[Tensor | None]) -> None:
        """Put gradients that a call of another engine has made where graphs will write them.

        `before` has what the call has found in `param.grad` of each parameter.
        """
        params = self._parameters()
        set_gradients(params, self._left_gradients(params, before))

    def take_in(
        self, device: torch.device, optimizers: Sequence[torch.optim.Optimizer], is_new: Callable[[Tensor], bool]
    ) -> None:
        """Have later calls step these optimizers, and train all modules of the state, as if they had been declared.

        Gradients that the last call has made of these are put where graphs will write them. `is_new(gradient)` returns
        whether that call has made it.
        """
        if not self.state.problem:  # else optimizers step as they are
            groups = [CapturableGroups(optimizer, device) for optimizer in optimizers]
            for each in groups:
                each.refresh()
                with each.applied():  # moves step counts to the device
                    pass
            self.groups.extend(groups)
            self.state.take_in(optimizers, groups)
        self.state.generation()  # takes in parameters of no module
        ours, found = set(map(id, self.state.own.values())), get_gradients(self._parameters())
        self.keep_gradients([grad if grad is None or id(grad) in ours or not is_new(grad) else None for grad in found])

    def _parameters(self) -> list[nn.Parameter]:
        return [param for module in self.modules.values() for param in module.parameters()]

    def __call__(self, phase: Phase, *args: Any, **kwargs: Any) -> FunctionOutput:
        self._shards.gather()
        params = self._parameters()
        gradients = get_gradients(params)
        stepped: list[torch.optim.Optimizer] = []
        with self.state.carrying(), Undo() as undo, ExitStack() as stack:
            # Gradients and casts that were captured live in the graph's pool and must not be seen outside.
            undo.note(torch.clear_autocast_cache)
            undo.note(set_gradients, params, gradients)
            run_backwards_here(undo)
            undo.note(self._shards.settle)
            torch.clear_autocast_cache()  # the caller's autocast may have casts of weights that have changed since
            if self._scaler is not None:
                stack.enter_context(self._scaler.unwatched())
            if self.schedules:
                stack.enter_context(noting_steps(stepped.append))
            for groups in self.groups:
                stack.enter_context(groups.applied())
            with Undo() as steps:
                if self._scaler is not None:
                    steps.note(self._scaler.forgetting())
                args, kwargs = own_batch((args, kwargs))
                with nullcontext() if self._around is None else self._around(args, kwargs):
                    outputs = self._fn(*args, **kwargs)
                steps.forget()
            check_outputs(outputs, self.name, "", "The function has run: what it changes is changed.")
            outputs = mapped_outputs(outputs, lambda output: self.state.carried.apart(output.detach()))
            left = self._left_gradients(params, gradients)
        set_gradients(params, left)  # they lie in no graph's pool
        return FunctionOutput(outputs, tuple(schedule.is_moved_by(stepped) for schedule in self.schedules))

    def watched(
        self, watching: AbstractContextManager[None], phase: Phase, *args: Any, **kwargs: Any
    ) -> FunctionOutput:
        """Call the function within a context."""
        with watching:
            return self(phase, *args, **kwargs)

    in_parts = __call__  # the function steps its optimizers itself
    kept: ClassVar[None] = None  # it sees each gradient in memory of its own

    def begin_parts(self) -> None:
        """It has no memory for whole steps."""

    def leave_pools(self) -> None:
        """No gradient lies in one."""

    def _left_gradients(self, params: Sequence[nn.Parameter], found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return what is to be left in `param.grad` of each parameter: what the call has found there, None, or a tensor
        with the gradient that it has made.

        Such a tensor is part of the state, and all graphs write it. A sparse gradient is left only where there are no
        graphs.
        """
        left: list[Tensor | None] = []
        copies: dict[Tensor, Tensor] = {}
        for param, made, before in zip(params, get_gradients(params), found, strict=True):
            if made is not None and made is not before and self._keeps:
                if made.layout is not torch.strided:
                    made = before
                else:
                    name = f"gradient {self._numbers.setdefault(param, len(self._numbers))}"
                    kept = self.state.own.get(name)
                    if kept is None or (kept.shape, kept.dtype, kept.device) != (made.shape, made.dtype, made.device):
                        kept = self.state.own[name] = torch.empty_like(made)
                    copies[local_shard(kept)] = local_shard(made).detach()
                    made = kept
            left.append(made)
        if copies:
            with torch.no_grad():
                foreach_copy_(list(copies), list(copies.values()))
        return left


def get_gradients(params: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradient of each parameter, unseen by what watches how the user's function uses gradients."""
    with without_torch_function():
        return [param.grad for param in params]


def set_gradients(params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Give each parameter its gradient, or none, unseen as well."""
    with without_torch_function():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
