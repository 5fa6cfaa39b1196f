"""What a training step does: forward, backward, unscale, clip, optimizer, scale update, schedule."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ._graphed import Graphed, Report
from ._module_rules import ModuleRules, why_not_applied
from ._optim import CapturableGroups, broken_kernel, why_not_capturable
from ._policy import Policy
from ._scaler import GradScaler, check_positive
from ._state import TrainingState
from ._torch import tree_flatten, tree_unflatten


class StepOutput(NamedTuple):
    """What a step returns. Tensors on the device, detached, never overwritten by a later step. Reading one waits for
    it.

    Attributes:
        loss: the unscaled loss, shape (), in the policy's output dtype.
        aux: what `loss_fn` returned beside the loss, floating tensors in the policy's output dtype; None if nothing.
        grad_norm: 2-norm of the unscaled gradients before clipping, float32, shape (). None without scaling and
            `max_norm`.
        skipped: True if a gradient was not finite and the step changed nothing but the loss scale; bool, shape ().
    """

    loss: Tensor
    aux: Any
    grad_norm: Tensor | None
    skipped: Tensor


class Scheduler(Protocol):
    """A learning-rate scheduler of torch.optim.lr_scheduler that needs no metric."""

    def step(self) -> None:
        """Set the next learning rate."""


def graphed_step(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    policy: Policy | str | None = None,
    scaler: GradScaler | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    scheduler: Scheduler | None = None,
    buckets: None = None,
    warmup: int = 3,
    after_step: None = None,
    verify: int = 0,
    on_failure: str = "eager",
    graph: str = "auto",
    generators: Sequence[torch.Generator] = (),
) -> "GraphedStep":
    """Return a callable that does one training step per call, after `warmup` calls as a single CUDA graph launch.

    A call zeroes gradients, runs `loss_fn` under the policy's autocast, scales the loss, runs backward, unscales,
    clips, steps the optimizer (or skips it on the device if a gradient is not finite), updates the loss scale and
    steps the scheduler. N calls leave the same bits as N eager calls with the same kernels.

    Args:
        loss_fn: `loss_fn(model, *batch, **batch)` returns the loss (a floating tensor of shape ()) or `(loss, aux)`,
            aux a tree of tensors. Captured once and not called again in a replay: it must compute everything from its
            inputs on the device.
        model: all parameters on one device. Put it there, and load its state, before the first call.
        optimizer: over parameters of `model`. To be captured it is Adam, AdamW or SGD with `fused=True`, or one
            that has a `capturable` option.
        policy: dtypes, see `Policy`. None leaves autocast as the caller has it. One with rules for modules must have
            been put on the model by `policy.apply(model)`.
        scaler: dynamic loss scale. None makes one if the policy computes in float16.
        max_norm: clip the 2-norm over all gradients to this. `float("inf")` measures without clipping. None does
            neither.
        accumulate: not implemented yet: 1.
        scheduler: stepped once per call, skipped or not. It works on `group["lr"]`, which stays a float; the step
            reads it through a device tensor.
        buckets: not implemented yet: None.
        warmup: eager calls per input layout before it may be captured, at least 1. They are training steps like any
            other.
        after_step: not implemented yet: None.
        verify: not implemented yet: 0.
        on_failure: "eager": if the step cannot be captured, warn once and go on eagerly. "raise": raise `CaptureError`.
        graph: "auto": a CUDA graph if the model is on CUDA. "emulate": the same engine, re-running `loss_fn` instead
            of a graph, on any device. "off": eager.
        generators: CUDA generators, beside the default one, that `loss_fn` draws random numbers from.

    Returns:
        A `GraphedStep`: call it with a batch, on the model's device. Only one input layout is captured, the first that
        was called `warmup` times; others, such as the short last batch of an epoch, run eagerly and are counted in
        `report()`.

    Raises:
        ValueError: an argument that cannot work; the message says what to pass.
        NotImplementedError: an option that has no implementation yet.
        CaptureError: with `on_failure="raise"`, if it is clear now that nothing can be captured.

    Sync: none in a call, but one wait for the device when the graph is captured.
    """
    _not_yet(accumulate=(accumulate, 1), buckets=(buckets, None), after_step=(after_step, None), verify=(verify, 0))
    _choice("graph", graph, ("auto", "emulate", "off"))
    _choice("on_failure", on_failure, ("eager", "raise"))
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
        raise ValueError(
            f"graphed_step(warmup={warmup!r}): expected an int of at least 1; the first steps build state."
        )
    check_positive("graphed_step", "max_norm", max_norm, "None to disable clipping")
    policy = _policy(policy)
    device = _device(model, policy)
    _check_optimizer(optimizer, model)
    if graph == "auto" and isinstance(model, nn.parallel.DistributedDataParallel):
        raise NotImplementedError(
            "graphed_step: capture of DistributedDataParallel is not implemented. Pass graph='off'."
        )
    if scheduler is not None and isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "graphed_step(scheduler=ReduceLROnPlateau): it needs a metric; call its step(metric) yourself."
        )
    blocker = why_not_capturable(optimizer)
    recipe = _Recipe(loss_fn, model, optimizer, policy, _scaler(scaler, policy, device), max_norm, device, not blocker)
    state = TrainingState({"model": model}, [optimizer], recipe.scaler)
    engine = Graphed(
        recipe,
        state,
        device=device,
        graph=graph,
        warmup=warmup,
        on_failure=on_failure,
        generators=generators,
        blocker=blocker,
        name="graphed_step",
    )
    return GraphedStep(recipe, engine, scheduler)


class GraphedStep:
    """One training step per call. Made by `graphed_step`."""

    def __init__(self, recipe: "_Recipe", engine: Graphed, scheduler: Scheduler | None) -> None:
        self._recipe = recipe
        self._engine = engine
        self._scheduler = scheduler

    def __call__(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Do one step with this batch.

        Args:
            *args: passed on to `loss_fn` behind the model: trees of tensors on the model's device, and of hashable
                constants. A constant is part of the layout: another value is another layout.
            **kwargs: likewise.

        Raises:
            InputMismatch: a tensor on another device, a sparse one, one that requires grad, or an unhashable leaf.
            ValueError: the loss is not a floating tensor of shape () that requires grad.

        Sync: none. Aliasing: the batch is copied, and the outputs belong to the caller.
        """
        self._recipe.groups.refresh()
        out: StepOutput = self._engine(*args, **kwargs)
        # Under an autocast of the caller's, torch would keep the casts of weights that this step has changed.
        torch.clear_autocast_cache()
        if self._scheduler is not None:
            self._scheduler.step()
        return out

    def report(self) -> Report:
        """Return graphs, replays, eager steps and why, bytes, skipped steps so far. Waits for the device."""
        return self._engine.report(self.skipped)

    @property
    def scaler(self) -> GradScaler:
        """The gradient scaler; a disabled one where the policy needs none."""
        return self._recipe.scaler

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return self._engine.captures

    @property
    def replays(self) -> int:
        """How many calls were a graph launch."""
        return self._engine.replays

    @property
    def skipped(self) -> int:
        """How many optimizer steps were skipped. Waits for the device."""
        skipped = self._recipe.scaler.skipped
        return 0 if skipped is None else int(skipped.item())  # sync

    def close(self) -> None:
        """Release the graph and its memory. A later call warms up and captures again. Waits for the device."""
        self._engine.close()


class _Recipe:
    """The step as one function of the batch, for `Graphed` to call, capture and replay."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        policy: Policy | None,
        scaler: GradScaler,
        max_norm: float | None,
        device: torch.device,
        capturable: bool,
    ) -> None:
        self._loss_fn = loss_fn
        self._model = model
        self._optimizer = optimizer
        self._policy = policy
        self.scaler = scaler
        self._max_norm = max_norm
        self._device = device
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self.groups = CapturableGroups(optimizer, device)
        self._capturable = capturable
        # Outside any capture: a fill inside would reset the scale in every replay.
        scaler.materialize(device)

    def __call__(self, *args: Any, **kwargs: Any) -> StepOutput:
        self._drop_gradients()
        torch.clear_autocast_cache()  # of an autocast around the step, which has casts that an optimizer outdated
        try:
            loss, aux = self._forward(args, kwargs)
            self.scaler.scale(loss).backward()
            with self.groups.applied() if self._capturable else nullcontext():
                self.scaler.step(self._optimizer, max_norm=self._max_norm)
            self.scaler.update()
        finally:
            # Gradients and casts that were captured live in the graph's pool and must not be seen outside.
            self._drop_gradients()
            torch.clear_autocast_cache()
        skipped = self._never if self.scaler.found_inf is None else self.scaler.found_inf > 0
        return StepOutput(self._output(loss), self._outputs(aux), self.scaler.grad_norm, skipped)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        if self._policy is None:
            returned = self._loss_fn(self._model, *args, **kwargs)
        else:
            with self._policy.autocast(self._device.type):
                returned = self._loss_fn(self._model, *args, **kwargs)
        loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        _check_loss(loss)
        return loss, aux

    def _drop_gradients(self) -> None:
        for param in self._model.parameters():
            param.grad = None

    def _outputs(self, aux: Any) -> Any:
        leaves, tree = tree_flatten(aux)
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise ValueError(
                    f"graphed_step: loss_fn returned a {type(leaf).__name__} ({leaf!r}) in aux, which a replay cannot "
                    "compute anew. Return tensors."
                )
        return tree_unflatten([leaf if leaf is None else self._output(leaf) for leaf in leaves], tree)

    def _output(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(self._policy.output) if self._policy is not None and tensor.is_floating_point() else tensor


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


def _policy(policy: Policy | str | None) -> Policy | None:
    if policy is None or isinstance(policy, Policy):
        return policy
    return Policy.parse(policy)


def _device(model: nn.Module, policy: Policy | None) -> torch.device:
    """Return the one device of the parameters, having checked their dtype against the policy."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"graphed_step(model={type(model).__name__}): expected a torch.nn.Module.")
    devices = {param.device: name for name, param in model.named_parameters()}
    if len(devices) != 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items()) or "no parameters"
        raise ValueError(
            f"graphed_step(model): expected parameters on one device, found {found}. Use model.to(device)."
        )
    if policy is not None and policy.modules:
        if problem := why_not_applied(model, ModuleRules(policy.modules, policy.params, policy.output)):
            raise ValueError(f"graphed_step(policy={str(policy)!r}): {problem}")
    elif policy is not None:
        for name, param in model.named_parameters():
            if param.is_floating_point() and param.dtype is not policy.params:
                raise ValueError(
                    f"graphed_step(policy={str(policy)!r}): parameter {name} is {param.dtype}. "
                    f"Use model.to({policy.params}), or a policy with params={str(param.dtype).removeprefix('torch.')}."
                )
    return next(iter(devices))


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"graphed_step(optimizer={type(optimizer).__name__}): expected a torch.optim.Optimizer.")
    if broken := broken_kernel(optimizer):
        raise ValueError(f"graphed_step(optimizer): {broken}")
    known = set(model.parameters())
    for i, group in enumerate(optimizer.param_groups):
        strangers = [param for param in group["params"] if param not in known]
        if strangers:
            raise ValueError(
                f"graphed_step(optimizer): param_groups[{i}] holds {len(strangers)} parameters that are not the "
                f"model's, the first of shape {tuple(strangers[0].shape)}. Make the optimizer from model.parameters() "
                "after model.to(device), and put parameters of the loss into the model."
            )


def _scaler(scaler: GradScaler | None, policy: Policy | None, device: torch.device) -> GradScaler:
    if scaler is None:
        return GradScaler(device.type, enabled=policy is not None and policy.needs_scaling)
    if not isinstance(scaler, GradScaler):
        raise ValueError(
            f"graphed_step(scaler={type(scaler).__module__}.{type(scaler).__name__}): it waits for the device. Pass an "
            "ampkit.GradScaler, which takes the same arguments and loads the same state_dict."
        )
    return scaler


def _choice(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"graphed_step({name}={value!r}): expected one of {', '.join(map(repr, legal))}.")


def _not_yet(**options: tuple[Any, Any]) -> None:
    for name, (value, default) in options.items():
        if value != default:
            raise NotImplementedError(f"graphed_step({name}={value!r}): not implemented yet; only {default!r} is.")
