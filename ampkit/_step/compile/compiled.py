"""`graphed_step(compile=...)`: which parts of a step torch.compile compiles, and what happens if it fails."""

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._capture.engine.layouts import MAX_LAYOUTS
from ..._capture.keys.inputs import Spec, read_batch
from ..._capture.state.snapshot import Snapshot
from ..._capture.state.state import TrainingState
from ..._errors import CaptureError
from ..._optimizer.device_step import Prepared
from ..._optimizer.step_kind import why_not_capturable
from ..._optimizer.update.compiled_update import CompiledUpdate, why_not_updated
from ..._optimizer.update.stacked_muon import StackedMuon
from ..._text import dtype_name
from ..._torch.compile import (
    Compiler,
    call_compiled,
    notice_compiled_code,
    uncompiled_call,
    untraced,
)
from ..._torch.tensors.modules import hook_tables, is_of_torch
from ..._torch.tensors.tensors import versions
from ..._undo import Undo, replace
from ..training_step import PartOfStep, Phase, TrainingStep
from ..working_weights import LOW, WorkingWeights, add_cast
from .compilations import Compilations
from .compiled_writes import CompiledWrites, why_failed

_COPY = "the working weight of parameter"
# As torch.compile(options=...) takes them. Combo kernels do small operations that do not depend on each other in one
# kernel. All operations in it have the same block size, with which a LayerNorm's sums along rows and along columns took
# ten times as long as with the best ones of each (GPT-2, torch 2.11, H200). "max" times block sizes. "default" does
# not, so it combines no reductions. Graphs of Inductor's own could not be captured in another one.
INDUCTOR_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {
        "triton.cudagraphs": False,
        "epilogue_fusion": True,
        "combo_kernels": True,
        "combo_kernels_pointwise_only": True,
    },
    "max": {
        "triton.cudagraphs": False,
        "epilogue_fusion": True,
        "combo_kernels": True,
        "benchmark_combo_kernel": False,
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,TRITON",
    },
}
# Why a graph ends at the call of a DDP module, and, in torch's own words, at the end of a bucket.
_DDP_CALL = "ampkit compiles the module inside of DistributedDataParallel by itself"
_BUCKET_END = "DDPOptimizer intentional graph-break"


class CompiledTrainingStep(TrainingStep):
    """A training step whose loss, forward and backward, is compiled: for each layout of the batch by itself.

    The first call of a layout, and of a phase in it, is not compiled. It shows which weights autocast only casts, and
    makes the state of the optimizer. The second call compiles, with working weights in place. So all later calls run
    the same code, captured or not, and have the same bits.

    If the compilation of a layout fails, its calls are not compiled; a warning says why, once.

    Args beside those of `TrainingStep`:
        compile: "default" or "max", see `graphed_step`.
        raises: whether a compilation that fails is an error (`on_failure="raise"`).
        generators: random-number generators beside torch's own that the loss draws from.
        name: what messages call the step.
    """

    intended: ClassVar[tuple[str, ...]] = (_DDP_CALL, _BUCKET_END)  # texts of graph breaks that nobody is told of

    def __init__(
        self,
        *args: Any,
        compile: str,
        raises: bool,
        generators: Sequence[torch.Generator],
        name: str = "graphed_step",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._compilations = Compilations(f"{name}(compile={compile!r})", raises, self.intended)
        self._generators = generators
        self.compiler = Compiler(INDUCTOR_OPTIONS[compile])
        self._layouts: dict[Hashable, CompiledLayout] = {}
        self._copies: dict[tuple[nn.Parameter, torch.dtype], nn.Parameter] = {}
        self._known: list[nn.Parameter] = []
        self._kinds: list[type[nn.Module]] = []
        self._seeds: dict[torch.dtype, Tensor] = {}
        self._kept: dict[Tensor, Tensor] = {}  # gradients in low precision, by parameter, of the call that runs
        self._update = CompiledUpdate(self._optimizer, self.scaler, self.groups, self._max_norm, self.compiler)
        self._why_update_not = self._why_not_updated()
        say = (
            partial(self._compilations.compiling, "the update"),
            partial(self._compilations.say_failed, "update of Muon"),
        )
        self._stacked = [StackedMuon(each, self.compiler, *say) for each in self.place.stacked]
        self._own_steps = {each: muon.step for each, muon in zip(self.place.stacked, self._stacked, strict=True)}
        self._writes = CompiledWrites(self.compiler, self._compilations.where, raises=raises)
        self._constant: set[int] = set()  # ids of the parameters that the last call without compiled code left alone
        self._layout: CompiledLayout | None = None  # of the call that runs; None for a call that is not compiled
        self._leaves: list[Any] = []  # of the batch of the call that runs

    def __call__(self, phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the part of a step that belongs to one micro-batch."""
        return self._call(phase, args, kwargs, steps=phase.last and not self.place.behind)

    captured = __call__  # the calls before the capture already run what a graph records

    def whole(self, phase: Phase, *args: Any, **kwargs: Any) -> PartOfStep:
        """Do the same, and the optimizer step that ends the window."""
        return self._own(self._call(phase, args, kwargs, steps=phase.last))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context without effect: the first call of a layout finds the weights that can have copies."""
        yield

    def compiled(self) -> dict[str, Any]:
        """Return the fields of the report that say what was compiled."""
        problems = [layout.problem for layout in self._layouts.values() if layout.problem]
        lines = self._compiled_passes([layout for layout in self._layouts.values() if layout.ready])
        updates: list[CompiledUpdate | StackedMuon] = [self._update, *self._stacked]
        lines += [f"compiled: update ({each.text()})" for each in updates if each.used]
        problems += [f"update of Muon, since {each.problem}" for each in self._stacked if each.problem]
        is_left = self._why_update_not and len(self._stacked) < len(self._optimizers)
        problems += [f"update, since {self._why_update_not}"] if is_left else []
        problems += [f"working weights, since {self._writes.problem}"] if self._writes.problem else []
        given = {"before_step": self._before_step, "after_step": self._after_step}
        problems += [name for name, function in given.items() if function is not None]
        lines += [f"not compiled: {problem}" for problem in problems]
        lines += [f"graph break: {text}" for layout in self._layouts.values() for text in layout.breaks]
        return {"compile_s": round(self._compilations.seconds, 3), "compiled": tuple(dict.fromkeys(lines))}

    def _compiled_passes(self, done: "list[CompiledLayout]") -> list[str]:
        """Return the lines of the report on forward and backward of the layouts that were compiled."""
        return [f"compiled: forward and backward, for {len(done)} layout(s) of the batch"] if done else []

    def _call(self, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any], *, steps: bool) -> PartOfStep:
        self._compilations.refuse_failed()
        notice_compiled_code()  # the rehearsal compares no numbers around compiled code
        spec, leaves = read_batch(args, kwargs, self.device)
        params, kinds = list(self._parameters().values()), list(map(type, self._model.modules()))
        same = kinds == self._kinds and len(params) == len(self._known)
        if not (same and all(map(operator.is_, params, self._known))):
            self._layouts.clear()  # begin anew, since the model has other parameters, or rules for modules
            self._copies.clear()
            for name in [name for name in self.gradients if name.startswith(_COPY)]:
                del self.gradients[name]
            self._known, self._kinds = params, kinds
        key = settings_of(spec, self._model.modules(), self._known, self.device.type)
        if key not in self._layouts:
            if len(self._layouts) == MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            averaging = self.ranks.reducers if self.ranks.wrappers else None
            weights = WorkingWeights(self._model, self._copies, self._writes.writer(), averaging=averaging)
            self._layouts[key] = CompiledLayout(weights)
        layout = self._layouts[key]
        if phase not in layout.phases:
            return self._first_call(layout, phase, args, kwargs, steps=steps)
        kept = self._kept if steps and not self._why_update_not else None
        try:
            self._layout, self._leaves = layout, leaves
            return self._run(phase, args, kwargs, layout.weights.in_place(kept), steps=steps)
        finally:
            self._layout, self._leaves = None, []
            self._kept.clear()

    def _first_call(
        self, layout: "CompiledLayout", phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any], *, steps: bool
    ) -> PartOfStep:
        self._working = layout.weights
        with super().watching() if not layout.phases else nullcontext():
            out = self._run(phase, args, kwargs, nullcontext(), steps=steps)
        for i, param in enumerate(self._known):
            for dtype in LOW:
                if (param, dtype) in self._copies:  # state that a call changes, so `verify` compares it too
                    self.gradients[f"{_COPY} {i} in {dtype_name(dtype)}"] = self._copies[param, dtype]
        layout.constant = layout.constant & self._constant if layout.phases else self._constant
        layout.phases.add(phase)  # last: a call that raised has shown nothing
        return out

    def _call_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = self._layout
        if layout is None or layout.problem:
            return super()._call_loss(args, kwargs)
        return self._compiled_loss(layout)(self._loss_fn, self._model, args, kwargs)

    def _compiled_loss(self, layout: "CompiledLayout") -> Callable[..., Any]:
        if layout.call is None:
            layout.call = compiled_around(call_loss, self.ranks.wrappers, self.compiler)
        return layout.call

    def _forward_and_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        layout = self._layout
        if layout is None:
            old_versions = versions(self._known)
            outputs = super()._forward_and_backward(args, kwargs)
            pairs = zip(self._known, old_versions, versions(self._known), strict=True)
            self._constant = {id(param) for param, old, new in pairs if old == new}
            return outputs
        if layout.problem:
            return super()._forward_and_backward(args, kwargs)
        if layout.ready:
            return self._compiled_pass(layout, args, kwargs)
        return self._compile(layout, args, kwargs)

    def _compile(self, layout: "CompiledLayout", args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Do forward and backward as compiled code for the first time."""
        restore = self._restorer(layout)
        try:
            # Another rank may be in a call that compiles nothing, in which no working weights are in place.
            in_place, masters = (sum(p.nbytes for p in found) for found in (self._model.parameters(), self._known))
            alone = self.ranks.reducers.alone(in_place / masters)
            compiling = self._compilations.compiling("forward and backward")
            with compiling, self.compiler.noting_breaks() as breaks, alone:
                outputs = self._compiled_pass(layout, args, kwargs)
        except Exception as error:
            # Once more without the compiler, from the state before the call. If that raises too, it was not the
            # compiler that failed: the error is the user's, and the next call compiles.
            restore()
            layout.problem = f"forward and backward, since {why_failed(error)}"
            try:
                outputs = super()._forward_and_backward(args, kwargs)
            except BaseException:
                layout.problem, layout.call = "", None
                raise
            if self._compilations.raises:
                restore()
                problem, layout.problem, layout.call = layout.problem, "", None
                raise CaptureError(f"{self._compilations.where}: not compiled: {problem}") from error
            self._compilations.say_left_out(layout.problem)
            return outputs
        layout.ready = True
        layout.breaks += self._compilations.named_breaks(breaks)
        if not self.ranks.wrappers:
            return outputs
        del outputs
        restore()
        return self._compiled_pass(layout, args, kwargs)

    def _restorer(self, layout: "CompiledLayout") -> Callable[[], None]:
        """Return a function that puts back all that forward and backward change."""
        state = TrainingState({"model": self._model}, [], None, own=self.gradients)
        constant = layout.constant.union(map(id, self._copies.values()))  # each call begins by writing the copies
        snapshot = Snapshot(state, self._generators, self._leaves, on_host=True, constant=constant)
        gradients = [(param, param.grad) for param in self._model.parameters()]

        def restore() -> None:
            snapshot.restore()
            for param, grad in gradients:
                param.grad = grad

        return restore

    def _compiled_pass(
        self, layout: "CompiledLayout", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        loss, aux = self._forward(args, kwargs)
        # Backward from `loss * scale / accumulate` would begin with the same gradient. That takes three kernels more:
        # the product, its backward, and a tensor of ones.
        scale = self.scaler.tensors().get("scale") if self.scaler.is_enabled() else None  # a guard has none
        if scale is not None:
            scale = scale.to(loss.dtype)
            seed = scale / self._accumulate if self._accumulate > 1 else scale
        else:
            if loss.dtype not in self._seeds:
                self._seeds[loss.dtype] = torch.ones((), dtype=loss.dtype, device=self.device) / self._accumulate
            seed = self._seeds[loss.dtype]
        loss.backward(seed)
        return loss, aux

    def _why_not_updated(self) -> str:
        if self.ranks.sharded:
            return "all ranks share the norm and the overflow check of parameters that fully_shard has split"
        if self.ranks.wrappers:
            # A rank alone may meet a new batch size, whose first call compiles nothing, while others run compiled code.
            return "ranks must update their weights with the same bits in each call, and they do not compile together"
        if self.guard is not None:
            return "nonfinite= looks at the gradients in front of it"
        if len(self._optimizers) > 1:
            names = [type(each).__name__ for each in self._optimizers if each not in self.place.stacked]
            return f"there are several optimizers. As it is, in the graph, steps each {' and '.join(names)}"
        if not self.capturable:
            return why_not_capturable(self._optimizer).rstrip(".") or "the step cannot be captured"
        if self._max_value is not None or self._before_step is not None:
            return (
                "each element of the gradients is clipped" if self._before_step is None else "before_step changes them"
            )
        return why_not_updated(self._optimizer)

    def _step_optimizer(self, prepared: Prepared | None = None) -> None:
        is_done = False
        if not self._why_update_not and self._layout is not None:
            with self.groups.applied():  # moves step counts to the device
                try:
                    update = self._update.prepared(self._kept)
                    if update is not None:  # else it cannot be done by compiled code in this call
                        is_ready = update.key in self._update.ready
                        with nullcontext() if is_ready else self._compilations.compiling("the update"):
                            self._update.run(update)
                        is_done = True
                except Exception as error:  # the whole function is compiled before it runs, so nothing has changed
                    self._why_update_not = self._compilations.say_failed("update", error)
        if is_done:
            return
        add_cast(list(self._kept.items()))
        super()._step_optimizer(prepared)


@dataclass(eq=False)
class CompiledLayout:
    """What is known of one layout of the batch."""

    weights: WorkingWeights  # the copies that its calls compute with
    phases: set[Phase] = field(default_factory=set)  # those that had their first call
    constant: set[int] = field(default_factory=set)  # ids of the parameters that forward and backward do not change
    call: Callable[..., Any] | None = None  # the compiled loss, None before it is made
    ready: bool = False  # whether forward and backward were compiled
    problem: str = ""  # why they are not compiled; "" if they are, or may be
    breaks: list[str] = field(default_factory=list)  # in words


def settings_of(spec: Spec, modules: Iterable[nn.Module], params: Sequence[nn.Parameter], kind: str) -> Hashable:
    """Return what compiled code is made for: a layout of arguments, hooks, and the modes that they are computed in.

    `kind` is the type of the device. Compiled code has no guards for hooks (`skip_nnmodule_hook_guards` of dynamo).
    """
    modules = list(modules)
    hooks = [(number, hook) for module in modules for table in hook_tables(module) for number, hook in table.items()]
    return (
        spec,
        tuple(module.training for module in modules),
        tuple(number for number, hook in hooks if not is_of_torch(hook)),  # no two hooks have the same
        tuple(param.requires_grad for param in params),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.is_grad_enabled(),
    )


def compiled_around(
    function: Callable[..., Any], wrappers: Sequence[DistributedDataParallel], compiler: Compiler
) -> Callable[..., Any]:
    """Return the function compiled, for one layout of its arguments, and with it the modules inside of these wrappers.

    DDP prepares its Reducer in forward and exchanges buffers, which no compiler follows. So the function's graph ends
    where it calls DDP, and the module inside is compiled by itself. While DDP's forward runs, torch splits what it
    compiles at the ends of gradient buckets (`DDPOptimizer`), and these are exchanged while the backward goes on.
    """
    compiled = compiler.compiled(function)
    if not wrappers:
        return compiled
    forwards = [(ddp, untraced(ddp.forward, _DDP_CALL)) for ddp in wrappers]
    calls = [(ddp.module, partial(compiler.compiled(uncompiled_call), ddp.module)) for ddp in wrappers]

    def call(*args: Any, **kwargs: Any) -> Any:
        with Undo() as undo:
            for ddp, forward in forwards:
                replace(undo, ddp, "forward", forward)
            for module, inside in calls:
                call_compiled(undo, module, inside)
            return compiled(*args, **kwargs)

    return call


def call_loss(loss_fn: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return loss_fn(model, *args, **kwargs)
