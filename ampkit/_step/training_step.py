"""What a training step does: forward, backward, accumulation, unscale, clip, optimizer, scale update, what follows."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._capture.ranks import Ranks
from .._capture.variation import Part
from .._optimizer.param_groups import CapturableGroups
from .._optimizer.scaler import GradScaler
from .._precision.policy import Policy
from .._torch.tensors import foreach_copy_
from .._undo import Undo
from .observer import Observer
from .outputs import mapped_outputs
from .working_weights import WorkingWeights


class StepOutput(NamedTuple):
    """What a step returns. Tensors on the device, detached, never overwritten by a later step. Reading one waits for
    it.

    Attributes:
        loss: the unscaled loss, shape (), in the policy's output dtype; with `accumulate`, of this micro-batch.
        aux: what `loss_fn` returned beside the loss, floating tensors in the policy's output dtype; None if nothing.
        grad_norm: 2-norm of the unscaled gradients before clipping, float32, shape (). None without scaling and
            `max_norm`, and where a micro-batch does not end its window.
        skipped: True if a gradient was not finite and the step changed nothing but the loss scale; bool, shape ().
    """

    loss: Tensor
    aux: Any
    grad_norm: Tensor | None
    skipped: Tensor


class Phase(NamedTuple):
    """Where in a window of micro-batches a call is.

    Attributes:
        last: whether the optimizer steps in it.
        held: indices of the parameters that have a gradient from earlier micro-batches.
        observed: whether an observer measures in it: a graph of its own, so that all others hold none of its kernels.
        others: what else decides which graph may serve the call.
    """

    last: bool
    held: tuple[int, ...]
    observed: bool = False
    others: tuple[Part, ...] = ()

    def parts(self) -> list[Part]:
        """Return what messages name if it varies from call to call. `last` and `observed` cannot vary much."""
        own = Part("the set of parameters with gradients from earlier micro-batches", self.held, _SAME_PARAMETERS)
        return [own, *self.others]


class TrainingStep:
    """The step as one function of phase and batch, for the engine to call, capture and replay.

    Gradients that outlive a call are kept in tensors of their own, at addresses that never change: one that autograd
    makes within a capture lives in the graph's pool and dies with the call. `param.grad` is None between calls.

    Args:
        loss_fn: see `graphed_step`.
        model: see `graphed_step`.
        optimizer: see `graphed_step`.
        policy: see `graphed_step`.
        scaler: enabled or not.
        max_norm: see `graphed_step`.
        accumulate: micro-batches that a loss is the mean over.
        after_step: called with the model behind the optimizer.
        ranks: the processes that average gradients, once per window.
        device: where parameters are.
        capturable: whether a graph may hold the optimizer.
        max_value: clip each element of the unscaled gradients to this magnitude, before their norm is measured.
        observer: who measures in the phases that are observed.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        policy: Policy | None,
        scaler: GradScaler,
        max_norm: float | None,
        accumulate: int,
        after_step: Callable[[nn.Module], object] | None,
        ranks: Ranks,
        device: torch.device,
        capturable: bool,
        max_value: float | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._loss_fn = loss_fn
        self._model = model
        self._optimizer = optimizer
        self._policy = policy
        self.scaler = scaler
        self._max_norm = max_norm
        self._max_value = max_value
        self._accumulate = accumulate
        self._after_step = after_step
        self._ranks = ranks
        self._device = device
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self.groups = CapturableGroups(optimizer, device)
        self._capturable = capturable
        self.gradients: dict[str, Tensor] = {}  # the kept ones, and the observer's, by the name that messages use
        self._working = WorkingWeights(model)
        self._watched = False
        # Outside any capture: a fill inside would reset the scale in every replay.
        scaler.materialize(device)
        self.observer = observer
        if observer is not None:
            observer.attach(model, device)
            self.gradients.update(observer.tensors())

    def __call__(self, phase: Phase, *args: Any, **kwargs: Any) -> tuple[StepOutput, tuple[int, ...]]:
        """Do the part of a step that belongs to one micro-batch; return its output and what is held after it."""
        return self._run(phase, args, kwargs, nullcontext())

    def captured(self, phase: Phase, *args: Any, **kwargs: Any) -> tuple[StepOutput, tuple[int, ...]]:
        """Do the same, bit by bit, with the weights in the dtype that the step computes in. For a graph to record."""
        # DDP has its hooks on the masters, whose gradients would come too late for it.
        return self._run(phase, args, kwargs, nullcontext() if self._ranks.wrappers else self._working.in_place())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for one call before a capture, which learns what `captured` may do."""
        with Undo() as undo:
            undo.note(setattr, self, "_watched", False)
            self._watched = True
            yield

    def _run(
        self, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any], weights: AbstractContextManager[None]
    ) -> tuple[StepOutput, tuple[int, ...]]:
        params = list(self._model.parameters())
        with Undo() as undo:
            # Gradients and casts that were captured live in the graph's pool and must not be seen outside.
            undo.note(torch.clear_autocast_cache)
            undo.note(self._drop, params)
            self._take_up(params, phase.held)
            torch.clear_autocast_cache()  # of an autocast around the step, which has casts that an optimizer outdated
            for wrapper in () if phase.last else self._ranks.wrappers:
                undo.note(setattr, wrapper, "require_backward_grad_sync", wrapper.require_backward_grad_sync)
            with weights, self._observing(phase), ExitStack() as stack:
                for wrapper in () if phase.last else self._ranks.wrappers:
                    stack.enter_context(wrapper.no_sync())
                loss, aux = self._forward(args, kwargs)
                scaled = self.scaler.scale(loss / self._accumulate if self._accumulate > 1 else loss)
                scaled.backward()
            held: tuple[int, ...] = () if phase.last else self._hold(params, phase.held)
            norm, skipped = self._finish(phase.observed) if phase.last else (None, self._never)
        return StepOutput(
            self._output(loss), mapped_outputs(aux, self._output, "graphed_step: loss_fn", " in aux"), norm, skipped
        ), held

    def flush(self, held: tuple[int, ...], observed: bool = False) -> tuple[Tensor | None, Tensor]:
        """Step the optimizer on what is held; return gradient norm and whether the step was skipped."""
        params = list(self._model.parameters())
        with Undo() as undo:
            undo.note(self._drop, params)
            self._take_up(params, held)
            # DDP does it in the last backward of a window.
            self._ranks.average([self.gradients[_name(i)] for i in held])
            return self._finish(observed)

    def _observing(self, phase: Phase) -> AbstractContextManager[None]:
        if not phase.observed:
            return nullcontext()
        assert self.observer is not None  # it asked for this
        return self.observer.observing()

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        if not self._watched:
            return self._loss_and_aux(args, kwargs)
        with self._working.watching() as uses:
            loss, aux = self._loss_and_aux(args, kwargs)
        self._working.learn(uses, loss)
        return loss, aux

    def _loss_and_aux(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        if self._policy is None:
            returned = self._loss_fn(self._model, *args, **kwargs)
        else:
            with self._policy.autocast(self._device.type):
                returned = self._loss_fn(self._model, *args, **kwargs)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        _check_loss(loss)
        return loss, aux

    def _finish(self, observed: bool) -> tuple[Tensor | None, Tensor]:
        if observed:
            assert self.observer is not None  # or nothing would be observed
            self.observer.gradients(self.scaler.tensors()["scale"] if self.scaler.is_enabled() else None)
        with Undo() as undo:
            undo.note(self.scaler.forgetting())
            if self._max_value is not None:
                self.scaler.unscale_(self._optimizer)
                params = [param for group in self._optimizer.param_groups for param in group["params"]]
                nn.utils.clip_grad_value_(params, self._max_value)
            with self.groups.applied() if self._capturable else ExitStack():
                self.scaler.step(self._optimizer, max_norm=self._max_norm)
            with self.scaler.unwatched():
                self.scaler.update()
            undo.forget()
        if self._after_step is not None:
            with torch.no_grad():
                self._after_step(self._model)
        found_inf = self.scaler.found_inf
        return self.scaler.grad_norm, self._never if found_inf is None else found_inf > 0

    # ------------------------------------------------------------------------------------------------ accumulation

    def _take_up(self, params: list[nn.Parameter], held: tuple[int, ...]) -> None:
        """Give the held parameters their gradients and the others none."""
        self._drop(params)
        for i in held:
            params[i].grad = self.gradients[_name(i)]

    def _hold(self, params: list[nn.Parameter], held: tuple[int, ...]) -> tuple[int, ...]:
        """Move gradients that are not kept yet to where they stay; return the indices of all that are."""
        known = set(held)
        for i, param in enumerate(params):
            if param.grad is not None and param.grad.layout is not torch.strided:
                self.gradients[_name(i)] = param.grad  # autograd sums into a new one, and no graph takes it
                known.add(i)
        new = {i: param.grad for i, param in enumerate(params) if param.grad is not None and i not in known}
        for i, grad in new.items():
            if _name(i) not in self.gradients:
                self.gradients[_name(i)] = torch.empty_like(params[i], dtype=grad.dtype)
        if new:
            foreach_copy_([self.gradients[_name(i)] for i in new], list(new.values()))
        return tuple(sorted(known.union(new)))

    def _drop(self, params: list[nn.Parameter]) -> None:
        for param in params:
            param.grad = None

    # ------------------------------------------------------------------------------------------------------ outputs

    def _output(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(self._policy.output) if self._policy is not None and tensor.is_floating_point() else tensor


_SAME_PARAMETERS = "Have the loss of each micro-batch depend on the same parameters."


def _name(parameter: int) -> str:
    return f"the accumulated gradient of parameter {parameter}"


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"graphed_step: loss_fn returned a {type(loss).__name__}; expected the loss as a tensor, or (loss, aux)."
        )
    if loss.dim() != 0 or not loss.is_floating_point():
        raise ValueError(
            f"graphed_step: loss_fn returned a loss of shape {tuple(loss.shape)} and dtype {loss.dtype}; expected a "
            "floating tensor of shape (). Reduce it with .mean() or .sum()."
        )
    if not loss.requires_grad:
        raise ValueError(
            "graphed_step: loss_fn returned a loss without grad: it depends on no parameter that requires grad, or was "
            "made under torch.no_grad() or from .detach(). Compute it from model(...) with gradients on."
        )
