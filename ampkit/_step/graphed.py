"""`graphed`: a function of tensors, captured; the user declares the modules and optimizers that it may change."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import read_all
from .._capture.engine.engine import Engine
from .._capture.engine.options import Options
from .._capture.engine.session import Session
from .._capture.graph.kernel_names import KernelTable
from .._capture.graph.report import Report
from .._capture.keys.containers import own_batch
from .._capture.keys.inputs import flatten
from .._capture.preflight.sparse_gradients import why_not_dense
from .._capture.ranks.ranks import Ranks
from .._capture.ranks.shards import free_whole_parameters, refuse_sharded
from .._capture.state.state import TrainingState
from .._optimizer.param_groups import CapturableGroups
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import broken_kernel, why_not_capturable
from .._torch.autograd.backward_thread import run_backwards_here
from .._torch.compile import cudagraphs_of_its_own
from .._torch.ranks.sharding import ShardedModules
from .._torch.tensors.tensors import foreach_copy_, local_shard
from .._undo import Undo
from .graph_owner import GraphOwner
from .outputs import check_outputs, mapped_outputs
from .parts.split import StepSplitter
from .parts.split_update import WithinFunction
from .training_step import Phase


def graphed(
    *,
    modules: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    scaler: GradScaler | None = None,
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
) -> "Callable[[Callable[..., Any]], GraphedFunction]":
    """Decorate a function of tensors, so that after `warmup` calls a call is a single CUDA graph launch.

    For a step that is not one loss and one optimizer (`graphed_step` is for that): a GAN, several losses, an update
    written by hand, an evaluation without gradients. The function may do whatever a training step does (`zero_grad`,
    autocast, `backward`, `scaler.step`, `scaler.update`, changes in place), as long as it computes everything from its
    arguments and the declared state, and changes only declared state.

    ::

        @ampkit.graphed(modules=(gen, disc), optimizers=(opt_g, opt_d), scaler=scaler)
        def train_step(real, noise): ...

    Args:
        modules: every module whose parameters or buffers it changes, or whose parameters get a gradient, on one device;
            () if there is none. One that is only read, such as a frozen teacher, may be left out.
        optimizers: every optimizer it steps, over parameters of these modules; capturable ones, see `graphed_step`.
        scaler: the gradient scaler it uses, if any.
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

    Returns:
        A decorator that makes a `GraphedFunction`.

    Raises:
        ValueError: an argument that cannot work; the message says what to pass.
        NotImplementedError: when it decorates, if parameters of the modules are split in another way than by
            `fully_shard` alone, unless `graph="off"`.
        CaptureError: with `on_failure="raise"`, if it is clear now that nothing can be captured.
    """
    options = Options(
        graph=graph,
        warmup=warmup,
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
    modules = read_all("graphed", "modules", modules, nn.Module, "a tuple of torch.nn.Module")
    for module in modules:
        free_whole_parameters(module)
    devices = {tensor.device for module in modules for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        found = ", ".join(map(str, devices))
        raise ValueError(
            f"graphed(modules): expected parameters and buffers on one device, found {found}. Use module.to(device)."
        )
    expected = "a tuple of torch.optim.Optimizer"
    optimizers = read_all("graphed", "optimizers", optimizers, torch.optim.Optimizer, expected)
    known = {param for module in modules for param in module.parameters()}
    for i, optimizer in enumerate(optimizers):
        if broken := broken_kernel(optimizer):
            raise ValueError(f"graphed(optimizers): optimizers[{i}]: {broken}")
        strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
        if strangers:
            raise ValueError(
                f"graphed(optimizers): optimizers[{i}] holds {len(strangers)} parameters of no module in modules, the "
                f"first of shape {tuple(strangers[0].shape)}. Pass their module in modules=(...)."
            )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            f"graphed(scaler={type(scaler).__module__}.{type(scaler).__name__}): expected an ampkit.GradScaler, which "
            "takes the same arguments and never waits for the device."
        )
    device = devices.pop() if devices else None
    return lambda fn: GraphedFunction(fn, modules, optimizers, scaler, device, options)


class GraphedFunction(GraphOwner):
    """A function whose calls are graph launches. Made by `graphed`. A context manager: leaving it closes it."""

    _why_not_copied = (
        "its graphs belong to this process and to these tensors. Copy or save modules, optimizers and scaler "
        "(state_dict), and decorate the function anew with graphed."
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: GradScaler | None,
        device: torch.device | None,
        options: Options,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._name = name = f"graphed({getattr(fn, '__name__', type(fn).__name__)})"
        self._fn, self._scaler, self._options = fn, scaler, options
        self._modules, self._optimizers = tuple(modules), tuple(optimizers)
        self._ranks: Ranks | None = None  # made with the engine
        self._making = threading.Lock()
        for part in (fn, *modules):
            if options.graph != "off" and cudagraphs_of_its_own(part):
                raise ValueError(
                    f"{name}: a part of it is compiled with CUDA graphs of its own, which cannot be captured in "
                    "another one. Compile in the default mode, torch.compile(model), or pass graph='off'."
                )
        if options.graph != "off":
            refuse_sharded(f"{name}, modules", nn.ModuleList(modules))
        # If the modules have no tensor, the device is that of the first call's arguments.
        self._engine = None if device is None else self._make_engine(device)

    def _make_engine(self, device: torch.device) -> Engine:
        if self._scaler is not None:
            self._scaler.materialize(device)  # if a capture made the scale, every replay would reset it
        captures = self._options.graph != "off"
        blocker = why_not_dense(self._modules) if self._optimizers else ""
        problem = next(filter(None, map(why_not_capturable, self._optimizers)), "")
        if self._options.on_failure != "parts" or not captures or not self._modules:
            blocker, problem = blocker or problem, ""
        groups = [CapturableGroups(optimizer, device) for optimizer in self._optimizers]
        self._ranks = ranks = Ranks(nn.ModuleList(self._modules), device, captured=captures)
        state = TrainingState(
            {f"modules[{i}]": module for i, module in enumerate(self._modules)},
            () if problem else self._optimizers,
            self._scaler,
            finds_gradients=True,
            rates=() if problem else groups,
            functions=(self._fn,),
            eager_optimizers=self._optimizers if problem else (),
            problem=problem,
        )
        applied = [] if blocker or problem else groups
        function = _EngineFunction(
            self._fn, self._modules, applied, self._scaler, ranks.shards, self._name, state, captures
        )
        why_never = "" if self._modules else _NONE_DECLARED
        options, named = self._options, function.named_modules
        session = Session(
            fn=function,
            captured=function,
            state=state,
            device=device,
            options=options,
            ranks=ranks,
            blocker=blocker,
            name=self._name,
            declared=True,
            splitter=StepSplitter(function, named, WithinFunction(), options, ranks, device, why_never=why_never),
        )
        return Engine(session)

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
        engine = self._engine
        if engine is None:
            devices = [leaf.device for leaf in flatten(args, kwargs)[0] if isinstance(leaf, Tensor)]
            with self._making:
                device = devices[0] if devices else torch.get_default_device()
                engine = self._engine = self._engine or self._make_engine(device)
        return engine.turn.call(self._call, engine, args, kwargs)

    def _call(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ranks is not None and self._ranks.sharded:
            self._ranks.gather(self._name)  # the engine compares the parameters with those of the last call
        outputs = engine(args, kwargs, _WHOLE_CALL)
        # The caller's autocast, if there is one, would go on with casts of weights that this call has changed.
        torch.clear_autocast_cache()
        if self._scaler is not None:
            self._scaler.watch_skips()
            # A capture leaves tensors there that lie in the memory of one graph. Other graphs do not write them.
            self._scaler.grad_norm = self._scaler.found_inf = None
        return outputs

    def report(self) -> Report:
        """Return graphs, replays, eager calls and why, bytes, skipped steps so far. Waits for the device."""
        if self._engine is None:
            return Report(0, 0, 0, 0, {}, 0, (), 0, None)
        skipped = None if self._scaler is None else self._scaler.skipped
        return self._engine.report(0 if skipped is None else int(skipped.item()))  # sync

    def kernel_tables(self) -> list[KernelTable] | None:
        """Return what `ampkit.debug.name_kernels` reads: the kernels of each graph. None without `annotate=True`."""
        if self._engine is None:
            return [] if self._options.annotate else None
        return self._engine.kernel_tables()


_WHOLE_CALL = Phase(last=True, accumulated=())  # a call of a function is all of its step
_NONE_DECLARED = "modules=() declares no module that could be captured by itself. Pass those that the function calls"


@dataclass(frozen=True, eq=False)
class _EngineFunction:
    """The user's function as the engine calls it: with optimizers that can be captured, leaving no gradient or cast."""

    _fn: Callable[..., Any]
    _modules: Sequence[nn.Module]
    _groups: Sequence[CapturableGroups]
    _scaler: GradScaler | None
    _shards: ShardedModules
    _name: str
    _state: TrainingState
    _keeps: bool  # whether there are graphs. Without any, gradients are left as they are
    _numbers: dict[nn.Parameter, int] = field(default_factory=dict)  # of parameters that were left a gradient

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the declared modules and all in them, each once, by their paths in messages."""
        seen: set[nn.Module] = set()
        for i, module in enumerate(self._modules):
            yield from module.named_modules(seen, f"modules[{i}]")

    def __call__(self, phase: Phase, *args: Any, **kwargs: Any) -> Any:
        self._shards.gather()
        params = [param for module in self._modules for param in module.parameters()]
        gradients = [param.grad for param in params]
        with self._state.carrying(), Undo() as undo, ExitStack() as stack:
            # Gradients and casts that were captured live in the graph's pool and must not be seen outside.
            undo.note(torch.clear_autocast_cache)
            undo.note(set_gradients, params, gradients)
            run_backwards_here(undo)
            undo.note(self._shards.settle)
            torch.clear_autocast_cache()  # the caller's autocast may have casts of weights that have changed since
            if self._scaler is not None:
                stack.enter_context(self._scaler.unwatched())
            for groups in self._groups:
                stack.enter_context(groups.applied())
            with Undo() as steps:
                if self._scaler is not None:
                    steps.note(self._scaler.forgetting())
                args, kwargs = own_batch((args, kwargs))
                outputs = self._fn(*args, **kwargs)
                steps.forget()
            check_outputs(outputs, self._name, "", "The function has run: what it changes is changed.")
            outputs = mapped_outputs(outputs, lambda output: self._state.carried.apart(output.detach()))
            left = self._left_gradients(params, gradients)
        set_gradients(params, left)  # they lie in no graph's pool
        return outputs

    in_parts = __call__  # the function steps its optimizers itself

    def _left_gradients(self, params: Sequence[nn.Parameter], found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return what is to be left in `param.grad` of each parameter: what the call has found there, None, or a tensor
        with the gradient that it has made.

        Such a tensor is part of the state, and all graphs write it. A sparse gradient is left only where there are no
        graphs.
        """
        left: list[Tensor | None] = []
        copies: dict[Tensor, Tensor] = {}
        for param, before in zip(params, found, strict=True):
            made = param.grad
            if made is not None and made is not before and self._keeps:
                if made.layout is not torch.strided:
                    made = before
                else:
                    name = f"gradient {self._numbers.setdefault(param, len(self._numbers))}"
                    kept = self._state.own.get(name)
                    if kept is None or (kept.shape, kept.dtype, kept.device) != (made.shape, made.dtype, made.device):
                        kept = self._state.own[name] = torch.empty_like(made)
                    copies[local_shard(kept)] = local_shard(made).detach()
                    made = kept
            left.append(made)
        if copies:
            with torch.no_grad():
                foreach_copy_(list(copies), list(copies.values()))
        return left


def set_gradients(params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Give each parameter its gradient, or none."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
