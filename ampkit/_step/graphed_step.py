"""`graphed_step`: the training step that a user calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import check_at_least, check_choice, named_here, read_positive
from .._batches.buckets import Buckets
from .._batches.leaks import PaddingCheck
from .._batches.padding import Padding
from .._capture.engine.engine import Engine
from .._capture.engine.options import Options
from .._capture.engine.session import Session
from .._capture.graph.kernel_names import KernelTable
from .._capture.graph.report import Report
from .._capture.graph.timing import Clock
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
    is_torchs,
    read_buckets,
    read_guard,
    read_optimizers,
    read_scaler,
    read_schedulers,
    read_state_form,
    refuse_several,
)
from .compile.compile_choice import check_compile, step_maker, warmup_of
from .compile.float8_choice import Float8Chooser
from .graph_owner import GraphOwner
from .many.scan import Scan
from .many.slices import Slices
from .many.whole_window import SHORT, WholeWindow
from .metrics import StepMetrics
from .observer import Observer
from .optimizer_place import can_read_rates, place_of
from .parts.split import COMPILES, StepSplitter
from .parts.split_update import CapturedUpdate
from .schedule import Schedule
from .training_step import PartOfStep, Phase, StepOutput, TrainingStep
from .window import Place, Window


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
) -> "GraphedStep":
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
            of the weights (`averaged.update_parameters` of torch's `AveragedModel`) or constrain them.
        after_every: call `after_step` behind each `after_every`th optimizer step that this object does, skipped ones
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
    check_kinds(model, loss_fn, accumulate, buckets := read_buckets("graphed_step", buckets), numerics, before_step)
    free_whole_parameters(model)
    device = device_of(model, policy := read_policy("graphed_step", policy))
    if max_norm is not None:
        max_norm = read_positive("graphed_step", "max_norm", max_norm, "None to disable clipping")
    optimizers = read_optimizers(optimizer, model, max_norm, rounds=policy is not None and policy.rounding is not None)
    schedulers = read_schedulers("graphed_step", scheduler, optimizers)
    check_compile("graphed_step", compile, model, loss_fn, numerics)
    if options.graph != "off" and scaler is None:
        hint_at_one_step(model, optimizers[0], loss_fn)
    ranks = Ranks(model, device, captured=options.graph != "off")
    scaler = read_guard(nonfinite, read_scaler(scaler, policy, device), model, optimizers, device, after_step, ranks)
    has_copies = bool(ranks.wrappers) or any(map(is_copied, model.parameters()))
    form = read_state_form("graphed_step", moments, policy, optimizers, has_copies=has_copies)
    _refuse_together(optimizers, arithmetic, sharded=ranks.sharded, changes=before_step is not None, scaler=scaler)
    as_torch = is_torchs(arithmetic, compile, sharded=ranks.sharded, form=form)
    for each in optimizers:
        sum_in_order_of(model, each)
        set_state_form(each, form)
    not_with_optimizer, place = place_of(
        optimizers, scaler, options, ranks, as_torch=as_torch, follower=after_step, compiled=compile is not None
    )
    blocker = _blocker(model, loss_fn, options) or not_with_optimizer
    check_at_least("graphed_step", "after_every", after_every, 1, "the number of optimizer steps")
    follow_up, follower = (None, None) if after_step is None else capturable(after_step)
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


class GraphedStep(GraphOwner):
    """One training step, or one micro-batch of it, per call. Made by `graphed_step`.

    A context manager: leaving it closes the step.
    """

    _engine: Engine
    _why_not_copied = (
        "its graphs belong to this process and to these tensors. Copy or save model, optimizer and scaler "
        "(state_dict), and make a step of the copies with graphed_step."
    )

    def __init__(
        self,
        step: TrainingStep,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        accumulate: int,
        schedulers: Sequence[Scheduler],
        padding: Padding | None,
        float8: Float8Chooser,
    ) -> None:
        self._scaler, self._stops = step.scaler, step.guard is not None and step.guard.stops
        self._engine = engine
        self._turn = engine.turn
        self._compiled = step.compiled
        call = engine if padding is None else partial(_with_or_without_graph, engine, step, padding)
        call = partial(step.gathered, call) if step.ranks.sharded else call
        schedules = [Schedule(scheduler) for scheduler in schedulers]

        def after() -> None:
            for schedule in schedules:
                schedule.step()

        self._window = Window(call, engine.run, step, accumulate, after if schedules else None)
        slices = Slices(self._window, accumulate)
        self._scan = Scan(engine, step, slices, optimizers, schedules, padding)
        self._whole_window = WholeWindow(engine, step, slices, padding)
        self._padding, self._float8, self._chosen_call = padding, float8, call
        if float8.pending:
            self._window.call = self._first_call
        self._metrics = StepMetrics(engine, step.scaler, Clock(step.device if step.device.type == "cuda" else None))

    def __call__(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Do one step with this batch; with `accumulate`, one micro-batch of it.

        Args:
            *args: passed on to `loss_fn` behind the model: trees of tensors on the model's device, and of hashable
                constants. A constant is part of the layout: another value is another layout.
            **kwargs: passed on to `loss_fn` too, trees of the same kinds.

        Raises:
            InputMismatch: the batch does not fit the arguments of `loss_fn`, such as a tuple that was not unpacked. Or
                a leaf of it cannot be an argument: a tensor is on another device, is sparse, belongs to a subclass or
                requires grad; a tensor shares memory with another one, or with the state, and the step changes one of
                the two in place; a constant is not hashable.
            ValueError: the loss is not a floating tensor of shape () that requires grad, or aux has a leaf that is
                neither a tensor nor None. No optimizer step was done. Or the model has lazy modules that were never
                called; nothing was done.
            CaptureError: with `on_failure="raise"`, the step cannot be captured, and was not done; or `verify` found a
                difference, and the step was done eagerly.
            NonfiniteError: with `nonfinite="stop"`, a gradient of an earlier step was not finite. Nothing was done.

        An exception out of `loss_fn` ends the window. The gradients accumulated so far are dropped, because they may
        have a part of this micro-batch.

        Sync: none. Aliasing: the batch is copied, and written back to only where `loss_fn` changes it in place; the
        outputs belong to the caller. What `loss_fn` returns is copied tensor by tensor, in eager calls too. So a view
        of an input, or of another output, is returned as a tensor of its own.
        """
        return self._turn.call(self._window.run if self._padding is None else self._run_padded, args, kwargs)

    def _first_call(self, *args: Any) -> PartOfStep:
        part: PartOfStep = self._float8.first_call(self._chosen_call, *args)
        self._go_on_with_choice()
        return part

    def _go_on_with_choice(self) -> None:
        self._engine.close()  # what it has seen so far are the calls of another model
        self._window.call = self._chosen_call

    def _run_padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepOutput:
        assert self._padding is not None  # or there is nothing to pad
        return self._window.run(*self._padding.batch(args, kwargs))

    def _call_at(self, place: Place, *args: Any) -> StepOutput:
        """Do one micro-batch, for a loop that decides itself where windows end."""
        return self._turn.call(self._window.run, args, {}, place)

    def scan(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Do K calls with one call: `loss_fn` gets the slices 0 to K - 1 of each tensor along its dimension 0.

        It leaves the bits that K single calls with these slices leave: parameters, optimizer, loss scale, learning
        rates, averages, random numbers. Up to 16 calls are one graph launch, so that K calls take ceil(K / 16)
        launches. With `accumulate=N` a launch does whole windows, ceil(16 / N) at most. `step` and `step.scan` may be
        mixed, also within a window.

        The first calls of a layout are made one by one, until they have graphs of their own. In a scan that begins with
        such calls, only launches of full length may follow; the rest is made one by one. A launch captures its length
        if there is no graph for it yet. When a second length below the full one comes, all lengths are captured in that
        call. After that no scan of this layout captures anything, whatever K is.

        In these cases calls are made one by one: nothing is captured; there are `numerics` or several processes; the
        optimizer steps behind the graphs; `loss_fn` changes its batch in place; the scheduler is no `LRScheduler` of
        torch; a hyperparameter other than the learning rate changes; a learning rate is a tensor, which `after_step`
        may change; a call completes an open window, or is one of the last, which do not make up a whole window.

        Args:
            *args: trees of tensors of shape (K, ...) on the model's device, and of hashable constants that all K calls
                get. Pass what all calls share as `x.expand(K, *x.shape)`.
            **kwargs: trees of the same kinds.

        Returns:
            A `StepOutput`: loss of shape (K,); aux with a new leading dimension K in each tensor; `skipped` of shape
            (K,); `grad_norm` of shape (K,), or None. With `accumulate=N` only the calls that step the optimizer have a
            norm, and `grad_norm` has one entry for each of these.

        Raises:
            InputMismatch: the leading dimensions differ, one is 0, a tensor has shape () or there is no tensor; then
                nothing was done. A slice cannot be the batch of a call, see `__call__`.
            ValueError: as for `__call__`; or the aux of two calls have different shapes. Then all calls were done.
            CaptureError: as for `__call__`.

        An error in call i comes out as it would from `step`. Calls before it were done; since Python 3.11 a note of the
        error says how many. The scheduler is stepped ahead of a launch, so an interrupt may leave it up to 16 steps
        ahead.

        Sync: only the calls that capture wait for the device. Aliasing: as for `__call__`. Memory: buffers for 16
        batches, beside those of the single calls.
        """
        return self._turn.call(self._scan.run, args, kwargs)

    def window(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Do one optimizer step with one call: `loss_fn` gets the N slices of each tensor along its dimension 0.

        It leaves the bits that N single calls with these micro-batches leave, N = `accumulate`, and is one graph
        launch. The calls of the first windows of a layout are made one by one, until each has a graph of its own; the
        window after these captures. `step`, `step.scan` and `step.window` may be mixed between windows.

        A window of fewer micro-batches, such as the last one of an epoch, is done as by that many calls and `flush()`:
        each loss stays divided by `accumulate`, and the optimizer steps eagerly.

        The calls are made one by one if nothing is captured, if the host decides by random draws, and if `loss_fn`
        changes its batch in place. An optimizer that steps behind the graphs does so behind the launch.

        Args:
            *args: trees of tensors of shape (N, ...) on the model's device, and of hashable constants that all calls
                get. Pass what all calls share as `x.expand(N, *x.shape)`. A loader's batch of N times B samples is
                split without a copy by `x.unflatten(0, (-1, B))`.
            **kwargs: trees of the same kinds.

        Returns:
            A `StepOutput`: loss of shape (N,); aux with a new leading dimension N in each tensor; `grad_norm` and
            `skipped` of the optimizer step, of shape ().

        Raises:
            InputMismatch: the leading dimensions differ, one is 0, a tensor has shape () or there is no tensor; then
                nothing was done. A slice cannot be the batch of a call, see `__call__`.
            ValueError: more than N micro-batches; nothing was done. Else as for `__call__`; or the aux of two
                micro-batches have different shapes. Then the step was done.
            AmpkitError: micro-batches of an optimizer step were given to `step` already. Nothing was done.
            CaptureError: as for `__call__`.

        Any error of a micro-batch drops the gradients of those before it, so that the next window begins anew; since
        Python 3.11 a note of the error says how many these were.

        With `DistributedDataParallel` or `fully_shard`, every rank must call `window` with equally many micro-batches.

        Sync: only the calls that capture wait for the device, and votes of several ranks. Aliasing: as for `__call__`.
        Memory: buffers for N micro-batches, beside those of the single calls.
        """
        return self._turn.call(self._whole_window.run, args, kwargs)

    def flush(self, divide: str = "accumulate") -> None:
        """End a window that is short, such as the last one of an epoch: step the optimizer on what it has so far.

        The step is eager, and counted as such. Nothing is done if the window is empty. Sync: none.

        Args:
            divide: "accumulate": each loss stays divided by `accumulate`, as in Lightning and in loops that write
                `(loss / accumulate).backward()`. "actual": by the number of micro-batches that there were, as in the
                Trainer of transformers. The gradients are multiplied by `accumulate / number` for that.

        Raises:
            ValueError: `divide` is neither.
            NonfiniteError: with `nonfinite="stop"`, a gradient of this or an earlier step was not finite. Then this
                waits for the device.
        """
        check_choice("flush", "divide", divide, ("accumulate", "actual"))
        self._turn.call(partial(self._window.flush, actual=divide == "actual"), SHORT)
        if self._stops:
            self._turn.call(self._window.look_now, again=True)

    def report(self) -> Report:
        """Return graphs, replays, eager steps and why, bytes, skipped steps so far. Waits for the device."""
        padding = () if self._padding is None else self._padding.report()
        said: dict[str, Any] = {"padding": padding, "float8": self._float8.report(), "stopped": self._window.stopped()}
        return replace(self._engine.report(self.skipped), **said, **self._compiled())

    def choose_buckets(self, batches: Iterable[Any]) -> None:
        """With `buckets="auto"`, choose the sizes now, from batches such as those of a loader, in place of watching.

        Reads 200 batches at most. The items of a tuple or list are taken as arguments of the step, those of a dict as
        keyword arguments. Nothing is computed, so they may be on any device. The random numbers of torch's default
        generator, of Python and of numpy are put back. With several ranks, all must call it, and get rank 0's sizes.

        Args:
            batches: any iterable, such as the `DataLoader` of the loop. A loop over it begins anew, but a generator
                object, and a loader with a generator of its own, go on where this has left them.

        Raises:
            ValueError: the step has no `buckets="auto"`, or there are fewer than 8 batches.
            InputMismatch: a batch cannot be padded, see `Buckets.pad_batch`.

        Sync: waits for other ranks.
        """
        if self._padding is None:
            raise ValueError("choose_buckets: the step pads nothing. Make it with graphed_step(..., buckets='auto').")
        self._turn.call(self._padding.look_ahead, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what of the step outlives it, in dicts, lists and numbers, beside model, optimizer, scaler and
        scheduler, which have a `state_dict` of their own: with `buckets="auto"` the sizes of batches, and which layers
        compute in float8 if that was chosen by timing.

        Raises:
            NonfiniteError: with `nonfinite="stop"`, training has stopped, and no error has said so.

        Sync: none, except with `nonfinite="stop"`.
        """
        if self._stops:
            self._turn.call(self._window.look_now, again=False)
        buckets = {} if self._padding is None else {"buckets": self._padding.state_dict()}
        layers = self._float8.state_dict()
        return {**buckets, "float8": layers} if layers else buckets

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on to pad, and to compute in float8, as the step did that `state_dict` is of. All ranks must load it.

        With `nonfinite="stop"` steps change the weights again. An open window of micro-batches is dropped, and skipped
        steps are counted anew.

        Raises:
            ValueError: it is of a step whose batches were padded in another way, or of a model with other layers under
                float8 rules, or this device has no float8.
        """
        if self._float8.load_state_dict(state_dict.get("float8", {})):
            self._turn.call(self._go_on_with_choice)
        state = state_dict.get("buckets", {})
        if self._padding is not None:
            self._padding.load_state_dict(state)
        elif state:
            raise ValueError("load_state_dict: the state is of a step with buckets='auto', and this one pads nothing.")
        if self._stops:
            self._turn.call(self._window.go_on)

    def close(self) -> None:
        """Release the graphs and their memory. A later call warms up and captures again. Waits for the device.

        It also waits for a call of another thread to end. A window of micro-batches goes on where it was. The graphs
        are released as well when the object is garbage-collected.

        Raises:
            NonfiniteError: with `nonfinite="stop"`, training has stopped, and no error has said so. The graphs are
                released.
        """
        super().close()
        self._window.look_now(again=False)

    def __exit__(self, *raised: object) -> None:
        # An error that leaves the context is not replaced by another one.
        super().close() if any(raised) else self.close()

    def kernel_tables(self) -> list[KernelTable] | None:
        """Return what `ampkit.debug.name_kernels` reads: the kernels of each graph. None without `annotate=True`."""
        return self._engine.kernel_tables()

    def metrics(self) -> dict[str, Tensor | float]:
        """Return figures for a logger, by name. What is not known is left out.

        - `loss_scale`: float32, shape (), on the device. Without a loss scale it is left out.
        - `skipped_steps`: how many optimizer steps were skipped so far, int64, shape (), on the device. It is left out
          without a loss scale and `nonfinite=`.
        - `grad_norm`: norm of the unscaled gradients of the last optimizer step before clipping, shape (), on the
          device. It is left out if no norm was computed: without a loss scale and `max_norm`.
        - `replay_share`: the share of the calls so far that were replayed, a float from 0 to 1.
        - `ms_per_step`: milliseconds per call between two calls of `metrics`, a float: with `accumulate` per
          micro-batch, with `scan` and `window` per slice. It contains all that the loop does in between. On CUDA it is
          the time that passed on the current stream, measured with two events. It is that of the newest interval that
          the device has completed, so it may be older than the tensors. It is left out until there is one.

        Read the tensors as late as you can, such as at the next call of `metrics`: `.item()` waits for the device.

        Sync: none. Aliasing: the tensors are copies, which later steps do not change.
        """
        return self._turn.call(self._metrics.figures)

    @property
    def policy(self) -> Policy | None:
        """The policy, once it is chosen by timing with a rule for each layer that computes in float8."""
        return self._float8.policy

    @property
    def scaler(self) -> GradScaler:
        """The gradient scaler; where the policy needs none, a disabled one, or with `nonfinite=` one that skips."""
        return self._scaler

    @property
    def skipped(self) -> int:
        """How many optimizer steps were skipped. Waits for the device."""
        skipped = self._scaler.skipped
        return 0 if skipped is None else int(skipped.item())  # sync


def _with_or_without_graph(
    engine: Engine, step: TrainingStep, padding: Padding, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase
) -> Any:
    """Do the part of a step that belongs to the batch that was padded last."""
    if padding.why_eager:
        return engine.without_graph(padding.why_eager, step.plain, args, kwargs, phase)
    return engine(args, kwargs, phase)


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


def _refuse_together(
    optimizers: Sequence[torch.optim.Optimizer], arithmetic: str, *, sharded: bool, changes: bool, scaler: GradScaler
) -> None:
    """Raise a `NotImplementedError` for arguments that do not go together yet; `changes`: there is a `before_step`."""
    if sharded:
        refuse_several("optimizer", optimizers, "a model that fully_shard has split")
    if arithmetic == "torch":
        refuse_several("arithmetic='torch'", optimizers, "this arithmetic")
    if changes and sharded and scaler.is_enabled():
        raise NotImplementedError(
            "graphed_step(before_step): with a loss scale or nonfinite=, and parameters that fully_shard has split, "
            "each rank would look for overflows by itself. Use bfloat16 without nonfinite=, or max_norm=."
        )


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
