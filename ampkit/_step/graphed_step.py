"""`graphed_step`: the training step that a user calls."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .._arguments import check_choice, named_here, read_max_norm
from .._batches.buckets import Buckets
from .._batches.leaks import PaddingCheck
from .._batches.padding import Padding
from .._capture.engine.engine import Engine
from .._capture.engine.options import Options
from .._capture.engine.session import Session
from .._capture.preflight.sparse_gradients import why_not_dense
from .._capture.ranks.ranks import Ranks
from .._capture.ranks.shards import free_whole_parameters, refuse_sharded
from .._capture.state.state import TrainingState
from .._optimizer.average import capturable
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import sum_in_order_of
from .._optimizer.update.state_form import set_state_form
from .._precision.policy import Policy, read_policy
from .._torch.compile import cudagraphs_of_its_own
from .._torch.ranks.sharding import is_copied
from .arguments import (
    NAMES_ELSEWHERE,
    Scheduler,
    check_kinds,
    device_of,
    hint_at_one_step,
    read_buckets,
    read_guard,
    read_optimizers,
    read_scaler,
    read_schedulers,
    read_state_form,
)
from .compile.compile_choice import check_compile, step_maker, warmup_of
from .compile.float8_choice import Float8Chooser
from .observer import Observer
from .optimizer_place import can_read_rates, place_of
from .parts.split import COMPILES, StepSplitter
from .parts.split_update import CapturedUpdate
from .step_calls import GraphedStep
from .training_step import TrainingStep


@named_here(NAMES_ELSEWHERE)
def graphed_step(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    policy: Policy | str | None = None,
    scaler: GradScaler | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    scheduler: Scheduler | Sequence[Scheduler] | None = None,
    buckets: Buckets | str | None = None,
    warmup: int = 3,
    before_step: Callable[[nn.Module], object] | None = None,
    after_step: Callable[[nn.Module], object] | None = None,
    after_every: int = 1,
    verify: int | str = 0,
    numerics: Observer | None = None,
    on_failure: str = "parts",
    graph: str = "auto",
    generators: Sequence[torch.Generator] = (),
    max_graphs: int = 16,
    memory_budget: int | None = None,
    capturing: str | bool = "auto",
    annotate: bool = False,
    host_writes: str | Sequence[str] = "name",
    cuts: bool = True,
    arithmetic: str = "ampkit",
    compile: str | None = None,
    nonfinite: str | None = None,
    moments: torch.dtype | str | None = None,
) -> GraphedStep:
    """Return a callable that does one training step per call, after `warmup` calls as a single CUDA graph launch.

    A call zeroes gradients, runs `loss_fn` under the policy's autocast, scales the loss, runs backward, unscales,
    clips, steps the optimizer (or skips it on the device if a gradient is not finite), updates the loss scale and
    steps the scheduler. N calls leave the same bits as N calls with `graph="off"` and the same kernels. A loop written
    with torch alone may differ in the last bits: here unscaling and clipping are one division in a fused optimizer's
    kernel, and on CUDA the optimizer reads the learning rate from a float32 tensor, where torch passes a Python float
    as float64.

    Args:
        loss_fn: `loss_fn(model, *batch, **batch)` returns the loss (a floating tensor of shape ()) or `(loss, aux)`,
            where aux is a tree of tensors. A replay does not call it again, so it must compute everything from its
            inputs, on the device.
        model: a module with all parameters on one device. Put it there, and load its state, before the first call. It
            may be a `DistributedDataParallel` (docs/distributed.md). Then all ranks decide together whether to capture,
            and on CUDA `warmup` is at least 5, with a static graph 6.
        optimizer: an optimizer over parameters of `model`, or a list of several, such as Muon and AdamW, over different
            ones. These step together, behind one loss scale and one norm over all gradients, and are skipped together.
            Adam, AdamW and SGD with `fused=True`, and optimizers that have a `capturable` option, are captured. All
            others step eagerly, behind the graph of forward and backward, and those beside them, too. SGD, Muon and
            optimizers that are not torch's are watched for two steps. If these change nothing but tensors in place,
            the optimizer becomes a part of the graph. What SGD and Muon compute of their rate on the host is then read
            from tensors, if that leaves the same bits; others leave the graph when their rate changes.
        policy: the dtypes to compute in, see `Policy`. With None, autocast stays as the caller has it. A policy with
            rules for modules must have been put on the model by `policy.apply(model)`. With `compute="float8"`, layers
            compute in float8 from the second call on. The first one chooses them, and waits for the device
            (docs/low-precision.md).
        scaler: the dynamic loss scale. With None, one is made if the policy computes in float16.
        max_norm: clip the 2-norm over all gradients to this. `float("inf")` measures the norm without clipping. None
            does neither.
        accumulate: calls (micro-batches) per optimizer step. Each loss is divided by `accumulate` before its backward,
            so that the gradients are those of the mean. Clipping, skipping and the schedule work once per optimizer
            step.
        scheduler: stepped once per optimizer step, skipped or not; or a list, such as one per optimizer. It changes
            `group["lr"]`, which stays a float. The step reads the rate from a tensor on the device, which is float32
            on CUDA.
        buckets: sizes to pad batches to, see `Buckets`; or "auto", which is `Buckets("auto", "auto")`. Then the first
            200 batches stay as they are, in eager calls, and at most six sizes are chosen from theirs: as few as make
            15% more tokens at most. `choose_buckets` chooses them ahead of the first call, `report` has them, and
            `state_dict` keeps them. A later batch that is larger is never cut, see docs/shapes.md. With one process, a
            loss that sees the padding is refused before the first batch that is padded: `loss_fn` runs up to six
            times more in that call.
        warmup: eager calls per input layout before it is captured, at least 2 (1 is taken as 2). They are training
            steps like any other. One of the first is checked for what cannot be captured. The last one is recorded,
            and the capture must record the same operations.
        before_step: called with the model in each optimizer step, under `no_grad`, and captured: when gradients are
            unscaled and were looked at for overflows, and before their norm is measured. It may change the gradients in
            `param.grad`, take one away (`param.grad = None`), and change tensors in place, which a skipped step puts
            back. With `accumulate` it sees the gradients of the whole window.
        after_step: called with the model behind the optimizer, under `no_grad`, and captured. It may update an average
            of the weights (`averaged.update_parameters` of torch's `AveragedModel`) or constrain them. A step that the
            loss scale skips calls it, too; it may ask `scaler.found_inf` and do nothing then. With
            `on_failure="parts"` it is called eagerly behind each graph if it, or what it calls, cannot be captured.
        after_every: call `after_step` behind one of so many optimizer steps that this object does, skipped ones
            counted. Steps with and without it have graphs of their own; `scan` and `window` make their calls one by
            one then.
        verify: compare this many replays, the first ones, bit by bit with eager steps from the same state; or "sparse":
            the first replay of each graph, and then one in the 16th, 256th, 4096th and each 50,000th call. If they
            differ, the message names the tensor, and training goes on eagerly (or an error is raised). A comparison
            takes the time of two steps and memory for a few copies of the state. If kernels are not deterministic, it
            takes up to eleven steps, and a tensor may differ by ten times as much as it does between replays. With one
            process, as many of the first launches of `scan` and `window` are compared too. Under
            `DistributedDataParallel` and `fully_shard` all ranks compare in the same calls. Where there is no memory
            for it, nothing is compared, and a warning says so once.
        numerics: what `ampkit.debug.numerics(model)` returned. It measures in some of the steps and changes no bit of
            any step. Steps in which it measures get graphs of their own, warmed up in the same way.
        on_failure: "parts": if the optimizer cannot be captured, warn once, capture forward and backward, and step the
            optimizer eagerly behind each graph. If a line of these cannot be captured, warn once, capture the largest
            modules without such a line one by one, and the update, unless that is slower. If nothing can be captured,
            warn once and go on eagerly. The same happens if no graph is ever used, because the batch or a setting was
            new in each of 32 calls. "eager": go on eagerly in all these cases. "raise": raise `CaptureError` in all
            these cases.
        graph: "auto": a CUDA graph if the model is on CUDA. "emulate": works on any device, and a replay runs `loss_fn`
            again instead of a graph. "off": eager.
        generators: CUDA generators, beside the default one, that `loss_fn` draws random numbers from.
        max_graphs: how many graphs are kept: one per input layout, and per micro-batch of a window. If there are more,
            the least recently used one is dropped. `scan` and `window` keep graphs for as many layouts of stacks more.
        memory_budget: bytes that all graphs may take together (`report().bytes`); None for no limit. A capture may take
            more while it is under way. A layout stays eager if its graph alone takes more.
        capturing: the answer that your code, or a library such as transformers, gets from
            `torch.cuda.is_current_stream_capturing()`. True or False: this answer, in all calls. "auto": False, as in
            eager training. If the branch for False cannot be captured, one warm-up call tries the branch for True. If
            that one can be captured, the answer is True from then on, in eager calls too. A warning and the report say
            from which call. If it cannot, the call is undone and made again, so `loss_fn` runs twice in that call. With
            `DistributedDataParallel`, "auto" always answers False.
        annotate: note which module each kernel of a graph belongs to, so that `ampkit.debug.name_kernels` can name the
            kernels of replays in a profiler trace (docs/traces.md). The last warm-up call of each layout then runs
            under torch.profiler, and waits for the device.
        host_writes: what happens where each call changes a number of the host, makes a list or dict longer, or writes
            to a file, which a replay would not do. "name": such a line is one that cannot be captured. "ignore": it is
            captured, and the number stays as the capture leaves it. Names, as messages have them (`["self.calls"]`):
            only these stay so.
        cuts: whether the graph is cut where the host asks the device about more than the batch whether something is
            true (`if loss.isnan():`). A replay then waits there for the answer, and goes on if it is that of the
            capture. If it is another one, the replay is undone, and the call is eager. False: such a line is one that
            cannot be captured. With several processes it always is.
        arithmetic: "ampkit": a fused optimizer unscales and clips in its kernel, and reads its rate from the device.
            "torch": unscale, measure the norm, clip and step one after the other, as `scaler.unscale_`,
            `clip_grad_norm_` and `scaler.step` do, with the rate as it is in `param_groups`. Under deterministic
            algorithms, a step then has the bits of a loop written with torch alone, if its optimizer is fused, or has
            `capturable=True` there, too. Another one steps behind the graph, as does one whose rate is a number that
            changes: a graph would hold it. Pass a rate that changes as a tensor.
        compile: "default": compile forward and backward with torch.compile, once per input layout, before the capture.
            "max": also choose the kernels of matrix products by timing them, so that another run may choose others and
            have other last bits. None: compile nothing. The first call of a layout is never compiled. What cannot be
            compiled is not, with one warning and a line in the report; with `on_failure="raise"` it is a
            `CaptureError`. `warmup` is at least 3. docs/compile.md has the rest.
        nonfinite: what happens in a step without a loss scale whose gradients hold inf or nan, in front of or behind
            `before_step`, or whose norm is not finite with `max_norm`. "skip": it changes no bit of weights, optimizer
            and what `after_step` writes in place. "stop": neither do all steps behind it, and `NonfiniteError` is
            raised by one of the next 16 calls (of `scan`, within three launches), and by `flush`, `close` and
            `state_dict`. `load_state_dict` ends that. `out.skipped` tells it in the step itself. A loss of nan with
            finite gradients is no reason. Buffers that forward changes, such as those of BatchNorm, are not put back.
            None: nothing is looked at. docs/scaling.md has the costs.
        moments: "bfloat16": Adam and AdamW keep `exp_avg` and `exp_avg_sq` in bfloat16, and SGD its momentum. The
            optimizer has `fused=True`; its arithmetic stays float32. State that it has, or loads, is cast. None: in the
            dtype of the parameters, as torch does. docs/precision.md has that, and `Policy(rounding=...)`.

    Returns:
        A `GraphedStep`: call it with a batch, on the model's device.

    Raises:
        ValueError: an argument that cannot work; the message says what to pass.
        NotImplementedError: the parameters are split in another way than by `fully_shard` alone, or it has a setting
            that a graph cannot follow, unless `graph="off"`.
        CaptureError: with `on_failure="raise"`, if it is clear now that nothing can be captured.

    Sync: only the call that captures a graph waits for the device, and one that chooses.
    """
    options = Options(
        graph=graph,
        warmup=warmup_of(warmup, compile),
        on_failure=on_failure,
        verify=verify,
        generators=generators,
        max_graphs=max_graphs,
        memory_budget=memory_budget,
        capturing=capturing,
        annotate=annotate,
        host_writes=host_writes,
        cuts=cuts,
    ).checked("graphed_step")
    buckets = read_buckets("graphed_step", buckets)
    check_kinds(model, loss_fn, accumulate, after_every, buckets, numerics, before_step)
    free_whole_parameters(model)
    device = device_of(model, policy := read_policy("graphed_step", policy))
    max_norm = read_max_norm("graphed_step", max_norm)
    optimizers = read_optimizers(optimizer, model, max_norm, rounds=policy is not None and policy.rounding is not None)
    schedulers = read_schedulers("graphed_step", scheduler, optimizers)
    check_compile("graphed_step", compile, model, loss_fn, numerics)
    if options.graph != "off" and scaler is None:
        hint_at_one_step(model, optimizers[0], loss_fn)
    ranks = Ranks(model, device, captured=options.graph != "off")
    scaler = read_guard(nonfinite, read_scaler(scaler, policy, device), model, optimizers, device, after_step, ranks)
    if ranks.sharded:
        _refuse_on_shards(optimizers, before_step, scaler)
    as_torch = _read_arithmetic(arithmetic, moments, compile, model, policy, optimizers, ranks)
    follow_up, follower = (None, None) if after_step is None else capturable(after_step)
    not_with_optimizer, place = place_of(
        optimizers, scaler, options, ranks, as_torch=as_torch, follower=follow_up, compiled=compile is not None
    )
    blocker = _blocker(model, loss_fn, options) or not_with_optimizer
    step = step_maker(compile, options, sharded=ranks.sharded)(
        loss_fn,
        model,
        optimizers,
        policy=policy,
        scaler=scaler,
        max_norm=max_norm,
        accumulate=accumulate,
        before_step=before_step,
        after_every=after_every,
        after_step=follow_up,
        ranks=ranks,
        device=device,
        capturable=can_read_rates(optimizers, place, blocker),
        place=place,
        observer=numerics,
        apart=as_torch,
    )
    state = step.state({"model": model} if follower is None else {"model": model, "after_step": follower})
    session = session_of(step, state, model, options, "graphed_step", compile=compile, blocker=blocker)
    padding = None if buckets is None else Padding(buckets, ranks, PaddingCheck(buckets, step.loss, model, generators))
    float8 = Float8Chooser(policy, model, step)
    return GraphedStep(step, Engine(session), optimizers, accumulate, schedulers, padding, float8)


def session_of(
    step: TrainingStep,
    state: TrainingState,
    model: nn.Module,
    options: Options,
    name: str,
    *,
    compile: str | None,
    blocker: str = "",
    one_argument: bool = False,
    eager: Mapping[type[nn.Module], str] = MappingProxyType({}),
) -> Session:
    """Return what an engine calls and captures. What cannot be captured as a whole is done in parts, without `eager`.

    The other arguments are those of `Session` and `graphed_step`.
    """
    ranks, device = step.ranks, step.device
    update = CapturedUpdate(step, state, options, name)
    why_never = "" if compile is None else COMPILES
    return Session(
        fn=step,
        captured=step.captured,
        state=state,
        device=device,
        options=options,
        ranks=ranks,
        name=name,
        blocker=blocker,
        whole=step.whole,
        optimizer=step.place,
        watching=step.watching,
        one_argument=one_argument,
        untimed=1 if compile is None else 2,
        splitter=StepSplitter(
            step, model.named_modules, update, options, ranks, device, why_never=why_never, eager=eager
        ),
    )


def _refuse_several(where: str, optimizers: Sequence[torch.optim.Optimizer], what: str) -> None:
    """Raise a `NotImplementedError` if there are several optimizers: `what` is for one."""
    if len(optimizers) > 1:
        raise NotImplementedError(f"graphed_step({where}): {what} takes one optimizer so far, not {len(optimizers)}.")


def _refuse_on_shards(
    optimizers: Sequence[torch.optim.Optimizer], before_step: object | None, scaler: GradScaler
) -> None:
    """Raise a `NotImplementedError` for what does not go together with parameters that `fully_shard` has split."""
    _refuse_several("optimizer", optimizers, "a model that fully_shard has split")
    if before_step is not None and scaler.is_enabled():
        raise NotImplementedError(
            "graphed_step(before_step): with a loss scale or nonfinite=, and parameters that fully_shard has split, "
            "each rank would look for overflows by itself. Use bfloat16 without nonfinite=, or max_norm=."
        )


def _read_arithmetic(
    arithmetic: object,
    moments: object,
    compile: str | None,
    model: nn.Module,
    policy: Policy | None,
    optimizers: Sequence[torch.optim.Optimizer],
    ranks: Ranks,
) -> bool:
    """Give the optimizers the form of their weights and state, and the order in which they sum norms.

    Return whether the step is to have the bits of a loop written with torch alone. Raise an error if it cannot.
    """
    has_copies = bool(ranks.wrappers) or any(map(is_copied, model.parameters()))
    form = read_state_form("graphed_step", moments, policy, optimizers, has_copies=has_copies)
    check_choice("graphed_step", "arithmetic", arithmetic, ("ampkit", "torch"))
    if arithmetic == "torch":
        _refuse_several("arithmetic='torch'", optimizers, "this arithmetic")
        what = "under fully_shard" * ranks.sharded or "with compile=" * (compile is not None)
        if what := what or "with moments= or rounding=" * (form is not None):
            raise NotImplementedError(
                f"graphed_step(arithmetic='torch'): {what} a step has other last bits than a loop written with torch. "
                "Pass arithmetic='ampkit'."
            )
    for each in optimizers:
        sum_in_order_of(model, each)
        set_state_form(each, form)
    return arithmetic == "torch"


def _blocker(model: nn.Module, loss_fn: Callable[..., Any], options: Options) -> str:
    """Return why nothing can be captured of forward and backward, as far as that is known; else ""."""
    for name, part in (("model", model), ("loss_fn", loss_fn)):
        if options.graph != "off" and cudagraphs_of_its_own(part):
            raise ValueError(
                f"graphed_step({name}): it is compiled with CUDA graphs of its own, which cannot be captured in "
                "another one. Compile it in the default mode, torch.compile(model), or pass graph='off'."
            )
    if options.graph != "off":
        refuse_sharded("graphed_step(model)", model)
    return why_not_dense([model])
