"""What a training step does: forward, backward, accumulation, unscale, `before_step`, clip, optimizer, `after_step`."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._capture.graph.cache import copied
from .._capture.keys.containers import own_batch
from .._capture.keys.key import Part
from .._capture.ranks.ranks import Ranks
from .._capture.state.kept_gradients import KeptGradients
from .._capture.state.state import TrainingState
from .._capture.state.walk import Walk
from .._capture.state.watch import refuse_gradients, strangers
from .._errors import InputMismatch
from .._optimizer.device_step import Prepared, can_be_prepared
from .._optimizer.nonfinite import NonfiniteGuard
from .._optimizer.param_groups import CapturableGroups
from .._optimizer.rollback import WrittenBackup
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import gradients, parameters, torch_class
from .._precision.policy import Policy
from .._torch.autograd.backward_thread import run_backwards_here
from .._torch.optimizers import step_hooks
from .._torch.tensors.tensors import foreach_copy_, local_shard
from .._undo import Undo
from .observer import Observer
from .optimizer_place import OptimizerPlace
from .outputs import check_loss, check_outputs, hint_at_division, mapped_outputs, misfit
from .working_weights import WorkingWeights


class StepOutput(NamedTuple):
    """What a step returns: detached tensors on the device, which no later step overwrites. Reading one waits for it.

    Attributes:
        loss: the unscaled loss of this batch, or micro-batch, in the policy's output dtype; shape (). `scan` and
            `window` return one per slice, and those of aux, too.
        aux: what `loss_fn` returned beside the loss, None if that was nothing. Floating tensors are in the policy's
            output dtype.
        grad_norm: 2-norm of the unscaled gradients before clipping, float32, shape (). None if there is neither a loss
            scale nor `max_norm`, and None for a micro-batch that does not end its window.
        skipped: True if a gradient was not finite and the step changed nothing but the loss scale, or with
            `nonfinite="stop"` if one was in this or an earlier step; bool, shape ().
        stepped: whether the call stepped the optimizer, or skipped that: a bool of Python's, False for a micro-batch
            that does not end its window. `scan` returns one per call.
    """

    loss: Tensor
    aux: Any
    grad_norm: Tensor | None
    skipped: Tensor
    stepped: bool | tuple[bool, ...] = True


def with_copies(output: StepOutput) -> StepOutput:
    """Return the output with copies of loss and aux, which may be tensors that a later call changes."""
    return output._replace(loss=output.loss.clone(), aux=None if output.aux is None else copied(output.aux))


class PartOfStep(NamedTuple):
    """What a call of `TrainingStep` returns.

    Attributes:
        output: the output of the step, so far.
        accumulated: numbers of the parameters that have an accumulated gradient behind the call. None if the call has
            stepped the optimizer.
        prepared: what the optimizer behind the call needs to know of these gradients, which are unscaled and clipped.
            None if they are not, or if there is more to accumulate.
    """

    output: StepOutput
    accumulated: tuple[int, ...] | None
    prepared: Prepared | None = None


class Phase(NamedTuple):
    """Which part of an optimizer step a call does. Calls of different phases get different graphs."""

    last: bool  # whether the call has the last micro-batch of its window, so that the optimizer steps in it
    accumulated: tuple[int, ...]  # numbers of the parameters with a gradient from earlier micro-batches of the window
    observed: bool = False  # whether an observer measures in the call. Graphs of other calls are without its kernels
    follows: bool = True  # whether `after_step` is called in it
    others: tuple[Part, ...] = ()  # what else decides which graph may serve the call

    @property
    def words(self) -> str:
        """Which micro-batch of its window the call has, and whether it is measured; "" for an ordinary step."""
        place = "" if self.last and not self.accumulated else "last" if self.last else "a middle"
        place = "first" if not (self.last or self.accumulated) else place
        micro_batch = f"{place} micro-batch" if place else ""
        return ", ".join(
            filter(None, (micro_batch, "with numerics" * self.observed, "no after_step" * (not self.follows)))
        )

    def parts(self) -> list[Part]:
        """Return what messages name if it varies from call to call: `last` and `observed` have two values only."""
        name = "the set of parameters with gradients from earlier micro-batches"
        return [Part(name, self.accumulated, _SAME_PARAMETERS), *self.others]


class TrainingStep:
    """The step as one function of phase and batch, for the engine to call, capture and replay.

    `param.grad` is None between calls. Gradients that a later call needs are kept in tensors of the step's own, at
    addresses that never change, because a gradient that autograd makes in a capture lies in the graph's pool.

    Args beside those of `graphed_step`:
        scaler: the loss scale; a disabled one if there is none, or a guard against gradients that are not finite.
        optimizers: all of them step together, behind one norm and one look for overflows.
        ranks: the processes that average gradients, once per window.
        capturable: of each optimizer whether it can be captured. Then it reads its learning rates from tensors.
        place: where the optimizers step. If that is behind the calls, `finish` must be called behind the last one of a
            window.
        max_value: clip each element of the unscaled gradients to this magnitude, before their norm is measured.
        observer: measures in the phases that are observed.
        around: returns a context for what Python does in a call, and no replay would.
        apart: whether to unscale and clip one after the other, and to give the optimizer rates as they are, as a loop
            does that is written with torch alone.

    Attributes:
        gradients: the accumulated gradients, and the tensors that the observer writes to, by the name in messages.
        kept: the accumulated gradients, by parameter. Backward may make gradients in their memory.
        closure: what `optimizer.step` gets, if the scaler is not enabled; () if it gets nothing.
        guard: the scaler, if it is such a guard.
        followed: whether Python, when it last stepped the optimizer, has called `after_step` behind it.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        policy: Policy | None,
        scaler: GradScaler,
        max_norm: float | None,
        accumulate: int,
        after_step: Callable[[nn.Module], object] | None,
        before_step: Callable[[nn.Module], object] | None = None,
        after_every: int = 1,
        ranks: Ranks,
        device: torch.device,
        capturable: Sequence[bool],
        place: OptimizerPlace,
        max_value: float | None = None,
        observer: Observer | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        apart: bool = False,
    ) -> None:
        self._loss_fn, self._model, self._policy = loss_fn, model, policy
        self._optimizers, self._optimizer = tuple(optimizers), optimizers[0]
        self._max_norm, self._max_value, self._accumulate = max_norm, max_value, accumulate
        self._before_step, self._after_step = before_step, after_step
        self.after_every: int = after_every  # optimizer steps
        self._looks_for_division = accumulate > 1
        self._around, self._apart = around, apart
        self._walk: Walk | None = None  # made in the first call
        self._numbered: dict[int, nn.Parameter] = {}
        self.scaler = scaler
        self.guard: NonfiniteGuard | None = scaler if isinstance(scaler, NonfiniteGuard) else None
        ranks.reducers.refuse_accumulation("graphed_step", accumulate)
        self.ranks: Ranks = ranks
        self.device: torch.device = device
        self._not_skipped = torch.zeros((), dtype=torch.bool, device=device)
        self._all_groups = [CapturableGroups(each, device, holds_numbers=apart) for each in optimizers]
        self._capturable = tuple(capturable)
        self.place: OptimizerPlace = place
        self.gradients: dict[str, Tensor] = {}
        self.kept: KeptGradients = KeptGradients(lasts=accumulate > 1)
        self.closure: tuple[Callable[[], Any], ...] = ()
        self.followed: bool = False
        self._working = WorkingWeights(model, averaging=ranks.reducers if ranks.wrappers else None)
        self._own_steps: Mapping[torch.optim.Optimizer, Callable[[], Any]] = {}  # in place of `optimizer.step`
        self._state: TrainingState | None = None
        self._finds_casts = False  # whether the next forward shows which weights autocast only casts
        # Outside any capture: a fill inside would reset the scale in every replay.
        scaler.materialize(device)
        self.observer = observer
        if observer is not None:
            observer.attach(model, device)
            self.gradients.update(observer.tensors())

    @property
    def groups(self) -> CapturableGroups:
        """The param groups of the first optimizer, as a capture needs them."""
        return self._all_groups[0]

    @property
    def capturable(self) -> bool:
        """Whether there is one optimizer, and it can be captured."""
        return self._capturable == (True,)

    @property
    def calls_after_step_apart(self) -> bool:
        """Whether `after_step` belongs to some steps only, or is called behind each graph."""
        return self.after_every > 1 or bool(self.place.follows_behind)

    @property
    def may_change_rates(self) -> bool:
        """Whether a call may change a learning rate itself: one that is a tensor, in `after_step`."""
        rates = (group.get("lr") for optimizer in self._optimizers for group in optimizer.param_groups)
        return self._after_step is not None and any(isinstance(rate, Tensor) for rate in rates)

    def __call__(self, phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the part of a step that belongs to one micro-batch."""
        return self._run(phase, args, kwargs, nullcontext(), steps=phase.last and not self.place.behind)

    def captured(self, phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the same, bit by bit, with the working weights. This is what a graph records."""
        # `fully_shard` casts weights itself, if its MixedPrecisionPolicy says so.
        weights = nullcontext() if self.ranks.sharded else self._working.cached()
        return self._run(phase, args, kwargs, weights, steps=phase.last and not self.place.behind)

    def whole(self, phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the same, and the optimizer step that ends the window. For calls without a graph before or behind them.

        The tensors in the output are the caller's own.
        """
        return self._own(self._run(phase, args, kwargs, nullcontext(), steps=phase.last))

    def _own(self, part: PartOfStep) -> PartOfStep:
        """Copy the outputs that are not the caller's alone: `loss_fn` may have kept the loss and aux."""
        out = with_copies(part.output)
        skipped = out.skipped.clone() if out.skipped is self._not_skipped else out.skipped
        return part._replace(output=out._replace(skipped=skipped))

    def in_parts(self, phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the same without the optimizer step, for which `finish` must be called behind the last micro-batch."""
        return self._run(phase, args, kwargs, nullcontext(), steps=False)

    def watched(self, watching: AbstractContextManager[None], phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the part of a step that belongs to one micro-batch, forward and backward within a context."""
        return self._run(phase, args, kwargs, watching, steps=phase.last and not self.place.behind)

    def begin_parts(self) -> None:
        """Free the working weights, unless a graph has them."""
        self._working.drop_unused()

    def leave_pools(self) -> None:
        """Let go of gradients in the memory of parts of the step, unless the optimizer has yet to step on them."""
        if self.place.behind:
            return
        left = set(map(id, self.kept.leave_pools()))
        for name in [name for name, kept in self.gradients.items() if id(kept) in left]:
            del self.gradients[name]

    def plain(self, phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the part of a step that belongs to one micro-batch, with nothing compiled."""
        return TrainingStep.__call__(self, phase, *args, **kwargs)

    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the loss of a batch, of which no gradients are made."""
        with nullcontext() if self._state is None else self._state.carrying():
            torch.clear_autocast_cache()
            return self._forward(args, kwargs)[0].detach()

    def compiled(self) -> dict[str, Any]:
        """Return the fields of the report that say what was compiled."""
        return {}

    def state(self, modules: dict[str, nn.Module]) -> TrainingState:
        """Return the state that a call changes, of the model and other modules by the name in messages."""
        optimizers = [] if self.place.behind else self._optimizers
        in_tensors = [groups for groups, can in zip(self._all_groups, self._capturable, strict=True) if can]
        rates = [] if self.place.behind or self.place.holds_rates else in_tensors
        # An eager call clears the gradients that it finds, and a replay would leave them.
        self._state = state = TrainingState(
            modules,
            optimizers,
            self.scaler,
            own=self.gradients,
            bare=self._model,
            rates=rates,
            holds_rates=self.place.holds_rates,
            functions=(self._loss_fn, self._before_step, self._after_step),
        )
        self.place.state, self.place.groups = state, self._all_groups
        return state

    def gathered(self, call: Callable[..., PartOfStep], *args: Any, **kwargs: Any) -> PartOfStep:
        """Call once the modules have their sharded parameters, which the engine compares."""
        self.gather()
        return call(*args, **kwargs)

    def gather(self) -> None:
        """See `Ranks.gather`."""
        self.ranks.gather("graphed_step(model)")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for a call before a capture, which finds the weights that can have working copies."""
        with Undo() as undo:
            undo.note(setattr, self, "_finds_casts", False)
            self._finds_casts = True
            yield

    def _run(
        self,
        phase: Phase,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: AbstractContextManager[None],
        *,
        steps: bool,
    ) -> PartOfStep:
        self.ranks.shards.gather()
        params = self._parameters()
        observed = self.observer.observing() if self.observer is not None and phase.observed else nullcontext()
        carrying = nullcontext() if self._state is None else self._state.carrying()
        with carrying, Undo() as undo:
            # Gradients and casts that were captured live in the graph's pool and must not be seen outside.
            undo.note(torch.clear_autocast_cache)
            undo.note(self._set_gradients, params, ())
            run_backwards_here(undo)
            undo.note(self.ranks.shards.settle)
            self._set_gradients(params, phase.accumulated)
            torch.clear_autocast_cache()  # the caller's autocast may have casts of weights that have changed since
            self.ranks.reducers.begin_call(first=not phase.accumulated)
            without_sync = [] if phase.last else self.ranks.wrappers
            for wrapper in without_sync:
                undo.note(setattr, wrapper, "require_backward_grad_sync", wrapper.require_backward_grad_sync)
            with ExitStack() as stack:
                for wrapper in without_sync:
                    stack.enter_context(wrapper.no_sync())
                with weights, observed, self._around():
                    loss, aux = self._forward_and_backward(args, kwargs)
            prepared = None
            alone = len(self._optimizers) == 1
            if phase.last and self.place.behind and not steps and alone and can_be_prepared(self._optimizer):
                # The optimizer steps behind the call, and unscaling and clipping can be done apart from that.
                self._measure_gradients(phase.observed)
                with Undo() as unscaling:
                    unscaling.note(self.scaler.forgetting())
                    self._change_gradients()
                    prepare = self.scaler.prepare_apart if self._apart else self.scaler.prepare
                    prepared = prepare(self._optimizer, self._max_norm)
            accumulated = None if steps else self._keep_gradients(params, phase.accumulated)
            norm, skipped = self._finish(phase) if steps else (None, self._not_skipped)
            aux = mapped_outputs(aux, self._output)  # before a state that it has may be overwritten
        return PartOfStep(StepOutput(self._output(loss), aux, norm, skipped, phase.last), accumulated, prepared)

    def finish(
        self, phase: Phase, prepared: Prepared | None = None, *, averaged: bool = True, factor: float = 1.0
    ) -> tuple[Tensor | None, Tensor]:
        """Step the optimizer on the accumulated gradients of this phase, times a factor.

        `averaged` says whether DDP has averaged them, as it does in the last backward of a window. Return the gradient
        norm, and whether the step was skipped; see `StepOutput`.
        """
        self.ranks.shards.gather()
        params = self._parameters()
        with Undo() as undo:
            undo.note(self._set_gradients, params, ())
            self._set_gradients(params, phase.accumulated)
            if not averaged:
                self.ranks.average([self.gradients[_name(i)] for i in phase.accumulated])
            if factor != 1.0:
                for i in phase.accumulated:
                    self.gradients[_name(i)].mul_(factor)
            finished = self._finish(phase, prepared)
            if self.place.behind:
                self.place.has_stepped()
        return finished

    def _parameters(self) -> dict[int, nn.Parameter]:
        """Return the model's parameters by their numbers, which they keep when modules change places.

        It is the same dict as before if no module has got or lost anything since.
        """
        if self._walk is None or not self._walk.is_current():
            self._walk = Walk({"": self._model})
            known = {param: number for number, param in self._numbered.items()}
            new = itertools.count(max(self._numbered, default=-1) + 1)
            params = self._model.parameters()
            self._numbered = {known[param] if param in known else next(new): param for param in params}
            for gone in known.values() - self._numbered.keys():
                self.gradients.pop(_name(gone), None)
            self.kept.remove_others(set(self._numbered.values()))
        return self._numbered

    def _forward_and_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        loss, aux = self._forward(args, kwargs)
        if self._looks_for_division:
            self._looks_for_division = False
            hint_at_division(loss, self._accumulate)
        scaled = self.scaler.scale(loss / self._accumulate if self._accumulate > 1 else loss)
        self._working.begin(scaled).backward()
        return loss, aux

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        finds_casts = self._finds_casts and not self.ranks.sharded
        with self._working.watching() if finds_casts else nullcontext() as uses:
            args, kwargs = own_batch((args, kwargs))
            with nullcontext() if self._policy is None else self._policy.autocast(self.device.type):
                try:
                    returned = self._call_loss(args, kwargs)
                except TypeError as error:
                    if problem := misfit(self._loss_fn, self._model, args, kwargs):
                        raise InputMismatch(problem) from error
                    raise
            loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
            check_loss(loss)
            check_outputs(aux, "graphed_step: loss_fn", " in aux", "No optimizer step was done.")
        if uses is not None:
            self._working.learn(uses, loss)
        return loss, aux

    def _call_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._loss_fn(self._model, *args, **kwargs)

    def _measure_gradients(self, observed: bool) -> None:
        if observed and self.observer is not None:
            self.observer.gradients(self.scaler.tensors().get("scale") if self.scaler.is_enabled() else None)

    def _finish(self, phase: Phase, prepared: Prepared | None = None) -> tuple[Tensor | None, Tensor]:
        """Do what comes behind the last backward; return the gradient norm, and whether the step was skipped."""
        refuse_gradients(strangers(self._optimizers, self._parameters().values()))
        if prepared is None:
            self._measure_gradients(phase.observed)
        self._step_optimizer(prepared)
        self.followed = phase.follows and not self.place.follows_behind
        found_inf = self.scaler.found_inf
        skipped = self._not_skipped if found_inf is None else found_inf > 0
        if self.followed:
            self._call_after_step(skipped)
        return self.scaler.grad_norm, skipped

    def follow(self, skipped: Tensor) -> None:
        """Call `after_step`, which is no part of the graphs, behind an optimizer step, unless that has done so."""
        if not self.followed:
            self._call_after_step(skipped)

    def _call_after_step(self, skipped: Tensor) -> None:
        """Call `after_step`, if there is one. A guard puts back what it has changed in a skipped step."""
        if self._after_step is None:
            return
        backup = None if self.guard is None else WrittenBackup(())
        noted = nullcontext() if self._state is None else self._state.reads.noting_follower()
        with torch.no_grad():
            with noted, nullcontext() if backup is None else backup:
                self._after_step(self._model)
            if backup is not None:
                backup.put_back(skipped)

    def _step_optimizer(self, prepared: Prepared | None = None) -> None:
        """Unscale, clip, step or skip, and move the loss scale. The scaler has norm and `found_inf` afterwards."""
        with Undo() as undo:
            undo.note(self.scaler.forgetting())
            if prepared is None:
                self._change_gradients()
                if self._apart:
                    prepared = self.scaler.prepare_apart(self._optimizer, self._max_norm)
            for optimizer in self._optimizers:
                if torch_class(optimizer) is None or step_hooks(optimizer):
                    # Code that is not torch's may keep `param.grad` as the gradient of the last step (MARS in timm
                    # 1.0.29). It gets copies, because later calls overwrite the accumulated gradients.
                    self._give_copies(parameters(optimizer))
            with ExitStack() as stack:
                for groups, can in zip(self._all_groups, self._capturable, strict=True):
                    if can and self.place.behind:  # otherwise each call has brought them up to date
                        groups.refresh()
                    if can or groups.program:
                        stack.enter_context(groups.applied())
                if len(self._optimizers) > 1 or self._own_steps:
                    self.scaler.step_together(self._optimizers, self._max_norm, self._own_steps)
                elif prepared is None:
                    self.scaler.step(self._optimizer, *self.closure, max_norm=self._max_norm)
                else:
                    self.scaler.step_prepared(self._optimizer, prepared, *self.closure)
            with self.scaler.unwatched():
                self.scaler.update()
            undo.forget()

    def _change_gradients(self) -> None:
        """Unscale and change gradients, if that is wanted. What else `before_step` changes is put back on a skip."""
        if self._max_value is None and self._before_step is None:
            return
        overflow = self.scaler.unscale_all(self._optimizers)
        if self._max_value is not None:
            for optimizer in self._optimizers:
                nn.utils.clip_grad_value_(parameters(optimizer), self._max_value)
        if self._before_step is None:
            return
        params = list(self._parameters().values())
        self._give_copies(params)  # the code may do what it likes with them
        backup = None if overflow is None else WrittenBackup(gradients(*self._optimizers))
        with torch.no_grad(), nullcontext() if backup is None else backup:
            self._before_step(self._model)
            for param in params:
                # Autograd gives a gradient the layout of its parameter, which kernels count on.
                if param.grad is not None and param.grad.stride() != param.stride():
                    param.grad = torch.empty_like(param, dtype=param.grad.dtype).copy_(param.grad)
        if self.guard is not None:
            overflow = self.guard.unscale_all(self._optimizers)  # what `before_step` has left
        if backup is not None and overflow is not None:
            with torch.no_grad():
                backup.put_back(overflow)

    def _give_copies(self, params: Iterable[Tensor]) -> None:
        """Give each parameter a copy of its gradient where that is one of the step's own tensors."""
        kept = set(map(id, self.gradients.values()))
        for param in params if kept else ():
            if param.grad is not None and id(param.grad) in kept:
                param.grad = param.grad.clone()

    def _set_gradients(self, params: dict[int, nn.Parameter], accumulated: tuple[int, ...]) -> None:
        """Give the parameters with these numbers their accumulated gradients, and the others none."""
        for param in params.values():
            param.grad = None
        for i in accumulated:
            params[i].grad = self.gradients[_name(i)]

    def _keep_gradients(self, params: dict[int, nn.Parameter], accumulated: tuple[int, ...]) -> tuple[int, ...]:
        """Copy gradients that this micro-batch is the first to have to tensors that last until the window's end.

        Autograd has added the other gradients to such tensors already. Return the numbers of all parameters that have
        an accumulated gradient now.
        """
        # `before_step` may have taken a gradient away, or put another one in its place.
        known = {i for i in accumulated if params[i].grad is self.gradients[_name(i)]}
        for i, param in params.items():
            if param.grad is not None and param.grad.layout is not torch.strided:
                # Autograd makes a new tensor for the sum of sparse gradients. No step that has them is captured.
                self.gradients[_name(i)] = param.grad
                known.add(i)
        new = [i for i, param in params.items() if param.grad is not None and i not in known]
        copied = []
        for i in new:
            kept, like = self.kept.get(params[i], self.gradients.get(_name(i))), _kind(params[i].grad)
            if kept is None or _kind(kept) != like:
                self.gradients[_name(i)] = torch.empty_like(params[i], dtype=like[0])
                self.kept.add(params[i], self.gradients[_name(i)])
            elif self.kept.leave(params[i]):
                self.gradients[_name(i)] = torch.empty_like(kept)
            else:
                self.gradients[_name(i)] = kept
                if params[i].grad is kept:
                    continue
            copied.append(i)
        if copied:
            buffers = [local_shard(self.gradients[_name(i)]) for i in copied]
            foreach_copy_(buffers, [local_shard(grad) for i in copied if (grad := params[i].grad) is not None])
        return tuple(sorted(known.union(new)))

    def _output(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self._policy is not None and tensor.is_floating_point():
            tensor = tensor.to(self._policy.output)
        return tensor if self._state is None else self._state.carried.apart(tensor)


_SAME_PARAMETERS = "Have the loss of each micro-batch depend on the same parameters."


def _kind(tensor: Tensor | None) -> tuple[torch.dtype, torch.Size, torch.device]:
    assert tensor is not None  # a gradient that was made
    return tensor.dtype, tensor.shape, tensor.device


def _name(parameter: int) -> str:
    return f"the accumulated gradient of parameter {parameter}"
