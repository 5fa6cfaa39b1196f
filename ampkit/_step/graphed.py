"""`graphed`: a function of tensors, captured; modules and optimizers that it changes are declared, or found."""

import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import check_choice
from .._batches.buckets import Buckets, stack_padding
from .._capture.engine.engine import Engine
from .._capture.engine.fallback import StepDoneError
from .._capture.engine.options import WARM_UP, Options
from .._capture.graph.kernel_names import KernelTable
from .._capture.graph.report import Report
from .._capture.keys.inputs import flatten
from .._capture.preflight.sparse_gradients import why_not_dense
from .._capture.ranks.ranks import Ranks
from .._capture.ranks.shards import refuse_sharded
from .._capture.state.state import TrainingState
from .._capture.state.watch import strangers
from .._errors import AmpkitWarning
from .._optimizer.param_groups import CapturableGroups
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import why_not_capturable
from .._torch.compile import cudagraphs_of_its_own
from .._user_line import users_level
from .arguments import (
    Scheduler,
    check_takes_mask,
    device_of_all,
    read_declared,
    read_given_buckets,
    read_schedulers,
    with_optimizers_of,
)
from .compile.compile_choice import COMPILE, check_compiled_modules, warmup_of
from .compile.compiled_modules import CompiledModules
from .found_state import FoundState, paths_of
from .graph_owner import GraphOwner
from .many.function_scan import WORDS, FunctionScan
from .many.stack import Stack
from .parts.split_function import session_of_function
from .schedule import Schedule
from .step_function import FunctionOutput, StepFunction
from .training_step import Phase


def graphed(
    *,
    modules: Sequence[nn.Module] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    scaler: GradScaler | None = None,
    scheduler: Scheduler | Sequence[Scheduler] | None = None,
    buckets: Buckets | None = None,
    warmup: int = 3,
    verify: int | str = 0,
    on_failure: str = "parts",
    graph: str = "auto",
    generators: Sequence[torch.Generator] = (),
    max_graphs: int = 16,
    memory_budget: int | None = None,
    capturing: str | bool = "auto",
    annotate: bool = False,
    host_writes: str | Sequence[str] = "name",
    cuts: bool = True,
    compile: str | None = None,
) -> "Callable[[Callable[..., Any]], GraphedFunction]":
    """Decorate a function of tensors, so that after `warmup` calls a call is a single CUDA graph launch.

    For a step that is not one loss and one optimizer (`graphed_step` is for that): a GAN, several losses, an update
    written by hand, an evaluation without gradients. The function may do whatever a training step does (`zero_grad`,
    autocast, `backward`, `scaler.step`, `scaler.update`, changes in place), as long as it computes everything from its
    arguments, and from modules and optimizers, and changes only these.

    ::

        @ampkit.graphed(modules=(gen, disc), optimizers=(opt_g, opt_d), scaler=scaler)
        def train_step(real, noise): ...

    Args:
        modules: a hint at modules whose parameters or buffers it changes, or whose parameters get a gradient, on one
            device. None: the first call is watched, and finds them. Either way, what calls change, train or step
            beside these is found in the call of a warm-up that shows it. Only modules under `DistributedDataParallel`
            or `fully_shard`, with sparse gradients or with parts on other devices, and parameters of no module that no
            optimizer steps, are named then, if they get gradients.
        optimizers: optimizers that it steps; capturable ones, see `graphed_step`. Those are found, too. Parameters of
            no module, which may be any leaf that requires grad, count as a module of their own.
        scaler: the gradient scaler it uses, if any.
        scheduler: stepped once behind each call in which the function steps the scheduler's optimizer, or skips its
            step for an overflow; or a list, such as one per optimizer. So the function must not step it. One that has
            no attribute `optimizer` is stepped behind each call that steps any. With `modules=None`, the optimizer of a
            scheduler counts as declared.
        buckets: sizes to pad the arguments to, see `Buckets`: the function gets the mask of what is not padding as one
            more keyword argument. What it returns for padding is returned, too. `buckets="auto"` is for `graphed_step`
            alone, which knows the loss, and so whether that sees the padding.
        warmup: as for `graphed_step`.
        verify: as for `graphed_step`. It also finds changes to tensors that belong to no module.
        on_failure: as for `graphed_step`. With "parts", declared modules without such a line are captured one by one;
            the function steps its optimizers eagerly then.
        graph: as for `graphed_step`.
        generators: as for `graphed_step`.
        max_graphs: as for `graphed_step`.
        memory_budget: as for `graphed_step`.
        capturing: as for `graphed_step`.
        annotate: as for `graphed_step`.
        host_writes: as for `graphed_step`.
        cuts: as for `graphed_step`.
        compile: "default" or "max": torch.compile compiles the modules, forward and backward, that the function calls
            itself: declared or found ones, or modules inside of these, but no single layer of torch.nn. See
            `graphed_step` for the values, and docs/compile.md. The function runs as Python, and optimizers step as
            they are. The first call of a layout is not compiled, so `warmup` is at least 3.

    Returns:
        A decorator that makes a `GraphedFunction`.

    Raises:
        ValueError: an argument that cannot work; the message says what to pass.
        NotImplementedError: when it decorates, if parameters of the modules are split in another way than by
            `fully_shard` alone, unless `graph="off"`; or if it has `compile`, and they are split or under
            `DistributedDataParallel`.
        CaptureError: with `on_failure="raise"`, if it is clear now that nothing can be captured.
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
    ).checked("graphed")
    if compile is not None:
        check_choice("graphed", "compile", compile, COMPILE)
    modules, optimizers = read_declared(modules, optimizers, scaler)
    schedulers = read_schedulers("graphed", scheduler, None if modules is None else optimizers)
    if modules is None:
        optimizers = with_optimizers_of(schedulers, optimizers)
    buckets = read_given_buckets(buckets)
    device = None if modules is None else device_of_all(modules, optimizers)
    if modules is not None and device is not None and strangers(optimizers, nn.ModuleList(modules).parameters()):
        found = FoundState(device, optimizers, modules)
        found.find_owners()
        modules, optimizers = found.declared()
    return lambda fn: GraphedFunction(
        fn, modules, optimizers, scaler, device, options, schedulers=schedulers, buckets=buckets, compile=compile
    )


class GraphedFunction(GraphOwner):
    """A function whose calls are graph launches. Made by `graphed`. A context manager: leaving it closes it.

    Messages call it `name`, and its modules by `paths`. In parts, modules of the classes `eager` are not captured.
    """

    _why_not_copied = (
        "its graphs belong to this process and to these tensors. Copy or save modules, optimizers and scaler "
        "(state_dict), and decorate the function anew with graphed."
    )
    _phase = Phase(last=True, accumulated=())  # a call of a function is all of its step

    def __init__(
        self,
        fn: Callable[..., Any],
        modules: Sequence[nn.Module] | None,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: GradScaler | None,
        device: torch.device | None,
        options: Options,
        *,
        name: str = "",
        paths: Sequence[str] = (),
        eager: Mapping[type[nn.Module], str] = MappingProxyType({}),
        schedulers: Sequence[Scheduler] = (),
        buckets: Buckets | None = None,
        compile: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._name = name or f"graphed({getattr(fn, '__name__', type(fn).__name__)})"
        self._left_eager, self._paths = eager, paths
        self._fn, self._scaler, self._options = fn, scaler, options
        self._schedules = [Schedule(scheduler, "graphed") for scheduler in schedulers]
        self._buckets, self._compile = buckets, compile
        self._compiled: CompiledModules | None = None  # made with the engine
        if buckets is not None:
            check_takes_mask("graphed", getattr(fn, "__name__", "the function"), fn, buckets.mask, "...")
        self._ranks: Ranks | None = None  # made with the engine
        self._making = threading.RLock()
        self._finds = modules is None
        self._declare(modules or (), optimizers)
        # If the modules have no tensor, the device is that of the first call's arguments.
        self._engine = None if device is None else self._make_engine(device)

    def _declare(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        declared: int | None = None,
    ) -> None:
        """Take these for all that the function changes. The user has declared the first modules, or all.

        Raise a `ValueError` or a `NotImplementedError` if it cannot be captured with them.
        """
        for part in (self._fn, *modules):
            if self._options.graph != "off" and cudagraphs_of_its_own(part):
                raise ValueError(
                    f"{self._name}: a part of it is compiled with CUDA graphs of its own, which cannot be captured in "
                    "another one. Compile in the default mode, torch.compile(model), or pass graph='off'."
                )
        if self._options.graph != "off":
            refuse_sharded(f"{self._name}, modules", nn.ModuleList(modules))
        paths = self._paths or paths_of(modules, self._fn, len(modules) if declared is None else declared)
        named = dict(zip(paths, modules, strict=True))
        if self._compile is not None and not self._finds:
            check_compiled_modules("graphed", self._compile, named, getattr(self._fn, "__name__", "it"), self._fn)
        self._modules, self._optimizers = named, tuple(optimizers)

    def _make_engine(self, device: torch.device, blocker: str = "") -> Engine:
        if self._scaler is not None:
            self._scaler.materialize(device)  # if a capture made the scale, every replay would reset it
        captures, modules = self._options.graph != "off", [*self._modules.values()]
        blocker = blocker or (why_not_dense(modules) if self._optimizers else "")
        problem = next(filter(None, map(why_not_capturable, self._optimizers)), "")
        if self._options.on_failure != "parts" or not captures or not modules:
            blocker, problem = blocker or problem, ""
        groups = [CapturableGroups(optimizer, device) for optimizer in self._optimizers]
        self._ranks = ranks = Ranks(nn.ModuleList(modules), device, captured=captures)
        if self._compile is not None and modules:
            self._compiled = CompiledModules(self._modules, device, self._compile, self._options)
        state = TrainingState(
            self._modules,
            () if problem else self._optimizers,
            self._scaler,
            finds_gradients=True,
            rates=() if problem else groups,
            functions=(self._fn,),
            eager_optimizers=self._optimizers if problem else (),
            problem=problem,
        )
        applied, schedules, compiled = [] if blocker or problem else groups, self._schedules, self._compiled
        around = None if compiled is None else compiled.calling
        function = self._function = StepFunction(
            self._fn, self._modules, applied, self._scaler, ranks.shards, self._name, state, captures, schedules, around
        )
        eager, compiles = self._left_eager, compiled is not None
        session = session_of_function(function, device, self._options, ranks, blocker, eager, compiles=compiles)
        engine = Engine(session)
        self._scan = FunctionScan(engine, function, self._phase, device, may_launch=not ranks.several)
        return engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Args:
            *args: trees of tensors on the modules' device, which do not require grad, and of hashable constants. A
                constant is part of the layout: another value is another layout.
            **kwargs: trees of the same kinds.

        Returns:
            What the function returned, a tree of tensors and None, detached.

        Raises:
            InputMismatch: a leaf cannot be an argument: a tensor is on another device, is sparse or requires grad; a
                tensor shares memory with another one, or with the state, and the function changes one of the two in
                place; a constant is not hashable.
            ValueError: the function returned something else.

        `param.grad` of the declared modules is what the function finds and leaves, as without `graphed`: gradients add
        up over calls, and an optimizer may step outside. A gradient that the function makes is copied into a tensor
        that the next call writes, too; clone what is to be kept. Sync: none. Aliasing: the arguments are copied, and
        written back to only where the function changes them in place; the outputs belong to the caller.
        """
        if self._buckets is not None:
            args, kwargs = self._buckets.pad_batch(args, kwargs)
        return self._padded_call(args, kwargs)

    def _padded_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._making if self._finds else nullcontext():
            if self._finds:
                return self._first_call(args, kwargs)
        engine = self._engine_for(args, kwargs)
        return engine.turn.call(self._call, engine, args, kwargs).returned

    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """Do K calls with one call: the function gets the slices 0 to K - 1 of each tensor along its dimension 0.

        It leaves the bits that K single calls with these slices leave. Up to 16 calls are one graph launch, so that K
        calls take ceil(K / 16) launches. Single calls and scans may be mixed.

        The first calls of a layout are made one by one, until it has a graph. In a scan that begins with such calls,
        only launches of 16 may follow. A launch captures its length if there is no graph for it yet. When a second
        length below 16 comes, all lengths are captured in that call, and no later scan of this layout captures
        anything.

        Calls are made one by one if they are not captured as a whole; with several processes; if the function changes
        its arguments in place, or decides by draws of the host or by answers of the device. With `scheduler=`, also if
        one is of no class of torch's, is made with a function that reads more than numbers, or changes more than rates,
        and if a rate is a tensor.

        Args:
            *args: trees of tensors of shape (K, ...) on the modules' device, and of hashable constants that all K calls
                get. Pass what all calls share as `x.expand(K, *x.shape)`.
            **kwargs: trees of the same kinds.

        Returns:
            What K calls return, each tensor with a new leading dimension K; None stays None.

        Raises:
            InputMismatch: the leading dimensions differ, one is 0, a tensor has shape () or there is no tensor; then
                nothing was done. A slice cannot be an argument, see `__call__`.
            ValueError: as for `__call__`; or the outputs of two calls have different shapes. Then all calls were done.
            CaptureError: with `on_failure="raise"`, as for `__call__`.

        An error in call i comes out as it would from a single call. Calls before it were done; since Python 3.11 a note
        of the error says how many. Sync: only the calls that capture wait for the device. Aliasing: as for `__call__`.
        Memory: buffers for 16 times the arguments, beside those of the single calls.
        """
        stack = Stack(args, kwargs, _device_in(args, kwargs), WORDS, stack_padding(self._buckets))
        first = [self._padded_call(*stack.inputs(0))] if self._finds else []
        engine = self._engine_for(args, kwargs)
        return engine.turn.call(self._scan.run, stack, partial(self._call, engine), self._called, first)

    def _engine_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        engine = self._engine
        if engine is None:
            with self._making:
                engine = self._engine = self._engine or self._make_engine(_device_in(args, kwargs))
        return engine

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function eagerly, and find what it changes. If that cannot be used, no call is captured."""
        given, options = self._optimizers, self._options
        found = FoundState(_device_in(args, kwargs), given)
        self._optimizers, self._options = (), replace(options, graph="off")
        try:
            engine = self._make_engine(found.device)
        finally:
            self._optimizers, self._options = given, options
        with found.finding():
            outputs = engine.turn.call(self._call, engine, args, kwargs).returned
        self._finds, problem = False, ""
        try:
            device_of_all(*found.declared())
            self._declare(*found.declared(), declared=0)
        except (ValueError, NotImplementedError) as error:
            problem = str(error)
        self._engine = self._make_engine(found.device, problem)
        self._engine.run(WARM_UP, lambda: None)  # counts the call
        if problem and options.graph == "off" and self._compile is not None:  # else the engine says so
            warnings.warn(f"{self._name}: {problem}", AmpkitWarning, stacklevel=users_level())
        if not problem:
            self._function.keep_gradients(found.gradients())
        return outputs

    def _call(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], *, schedules: bool = True
    ) -> FunctionOutput:
        if self._ranks is not None and self._ranks.sharded:
            self._ranks.gather(self._name)  # the engine compares the parameters with those of the last call
        failure: StepDoneError | None = None
        try:
            output: FunctionOutput = engine(args, kwargs, self._phase)
        except StepDoneError as error:
            output, failure = error.outputs, error
        self._called(1)
        for schedule, is_moved in zip(self._schedules, output.moves, strict=True):
            if is_moved and schedules:
                schedule.step()
        if failure is not None:
            raise failure
        return output

    def _called(self, calls: int) -> None:
        """Take note of calls, made one by one or by one launch."""
        # The caller's autocast, if there is one, would go on with casts of weights that this call has changed.
        torch.clear_autocast_cache()
        if self._scaler is not None:
            for _ in range(calls):
                self._scaler.watch_skips()
            # A capture leaves tensors there that lie in the memory of one graph. Other graphs do not write them.
            self._scaler.grad_norm = self._scaler.found_inf = None

    def report(self) -> Report:
        """Return graphs, replays, eager calls and why, bytes, skipped steps so far. Waits for the device."""
        if self._engine is None:
            return Report()
        skipped = None if self._scaler is None else self._scaler.skipped
        report = self._engine.report(0 if skipped is None else int(skipped.item()))  # sync
        return report if self._compiled is None else replace(report, **self._compiled.report())

    def kernel_tables(self) -> list[KernelTable] | None:
        """Return what `ampkit.debug.name_kernels` reads: the kernels of each graph. None without `annotate=True`."""
        if self._engine is None:
            return [] if self._options.annotate else None
        return self._engine.kernel_tables()


def _device_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the first tensor among the arguments, or else torch's default."""
    devices = (leaf.device for leaf in flatten(args, kwargs)[0] if isinstance(leaf, Tensor))
    return next(devices, torch.get_default_device())
