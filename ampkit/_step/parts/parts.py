"""The modules of a step that are captured one by one: which graph a call replays, or why it is eager."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..._callables.autograd_node import PENDING
from ..._callables.input_leaves import detached, places_of, static_inputs, wanted_by
from ..._callables.passes import Passes, replace_forward
from ..._capture.graph.graph import describe_failure
from ..._capture.graph.timing import Shares
from ..._capture.keys.inputs import BatchReader, flatten
from ..._capture.state.kept_gradients import KeptGradients
from ..._capture.state.walk import Walk
from ..._errors import CaptureError, InputMismatch
from ..._torch.autograd.autograd import in_backward, packs_saved_tensors
from ..._torch.tensors.modes import function_modes, within_transform
from ..._torch.tensors.modules import has_global_hooks, hook_tables
from ..._undo import Undo, replace
from .module_choice import Choice
from .module_runs import ModuleRuns
from .module_survey import ModuleCall, ModuleLayout
from .part_memory import PartMemory
from .part_passes import Context, GraphedPart, PartPasses


class PartReport(NamedTuple):
    """One module of a step that is captured by itself, as it is called once in the step.

    Attributes:
        module: its path in the model; "" is the model itself.
        number: of this call of the module in the step, counted from 0.
        kernels: operations of its forward that compute something.
        replays: how often its graphs were replayed.
        eager: its other calls, by reason.
    """

    module: str
    number: int
    kernels: int
    replays: int
    eager: dict[str, int]


class Parts:
    """The modules of a step that are captured one by one. Within `installed`, their calls replay graphs.

    Args:
        choice: which calls are captured.
        runs: neighbours that are called as one module, some of which are chosen.
        memory: of their graphs.
    """

    def __init__(self, choice: Choice, runs: ModuleRuns, memory: PartMemory) -> None:
        self.memory = memory
        self._modules = {
            module: {number: _GraphedModule(call, memory) for number, call in calls.items()}
            for module, calls in choice.calls.items()
        }
        self.all = [part for parts in self._modules.values() for part in parts.values()]
        self._runs = runs
        self._tables: list[dict[Any, Any]] = [vars(module) for module in runs.units]
        for module in self._modules:
            for each in module.modules():
                self._tables += hook_tables(each) if each is not module else ()
                self._tables.append(vars(each))
        self._hosted = self._host_state()

    def why_not_now(self) -> str:
        """Return why no graph may be replayed in the step that begins now, "" if there is no reason."""
        if packs_saved_tensors():
            return "hooks pack saved tensors"
        if has_global_hooks():  # a replay would not call them for the modules inside of a captured one
            return "there are hooks on all modules"
        return "" if self._host_state() == self._hosted else CHANGED

    def _host_state(self) -> list[Any]:
        """Return the hooks on modules inside of those that are captured, and the `forward` that modules were given."""
        hooks = [id(hook) for table in self._tables if "training" not in table for hook in table.values()]
        return hooks + [id(table.get("forward")) for table in self._tables if "training" in table]

    @contextmanager
    def installed(self, kept: KeptGradients | None, shares: Shares | None = None) -> Iterator[None]:
        """Context for the forward and backward of one step. With `shares`, the time of each part is measured.

        Gradients of parameters are made where they will be kept, if that can be.
        """
        with self._runs.installed(), Undo() as undo:
            replace(undo, self.memory, "shares", shares)
            replace(undo, self.memory, "kept", kept)
            for module, parts in self._modules.items():
                replace_forward(undo, module, _calls(module.forward, parts))
            undo.note(self.memory.end_call)
            yield

    def reports(self) -> list[PartReport]:
        """Return what happened to the calls."""
        return [
            PartReport(part.call.name, number, part.call.kernels, part.replays, dict(part.eager))
            for parts in self._modules.values()
            for number, part in parts.items()
        ]

    def reset(self) -> None:
        """Free the graphs. Waits for the device."""
        for part in self.all:
            part.reset()


def _calls(original: Callable[..., Any], parts: "dict[int, _GraphedModule]") -> Callable[..., Any]:
    """Return a `forward` that replays the graphs of these parts, by the number of the call."""
    count = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        # Inside of another part, computed again by checkpointing, or called by torch.func, as no survey counts it.
        if Passes.recording or in_backward() or within_transform():
            return original(*args, **kwargs)
        part = parts.get(count)
        count += 1
        return original(*args, **kwargs) if part is None else part(original, args, kwargs)

    return forward


class _GraphedModule:
    """One call of a module in a step, which a survey saw as `call`."""

    def __init__(self, call: ModuleCall, memory: PartMemory) -> None:
        assert call.layout is not None  # or it is not chosen
        self.call = call
        self._layout: ModuleLayout = call.layout
        self._memory = memory
        self._reader = BatchReader(memory.device)
        self._graphs: GraphedPart | None = None
        self._context: Any = None
        self._walk: Walk | None = None
        self._held: Any = None  # where and how the tensors lie, `requires_grad` and modes
        self.replays = 0
        self.eager: Counter[str] = Counter()  # other calls, by reason
        self._failure = ""  # of the capture of its forward

    def __call__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module: replay its graph, or call `original`."""
        leaves, tree = flatten(args, kwargs)
        reason = self.failure or self._why_eager(leaves, tree)
        if not reason and self._graphs is None:
            self._capture(original, leaves)
            reason = self.failure
        if not reason:
            assert self._graphs is not None  # just captured, or before
            results = self._graphs(leaves)
            if results is not PENDING:
                self.replays += 1
                return results
            reason = "its last call, or that of a later module, has yet to be backpropagated"
        self.eager[reason] += 1
        return original(*args, **kwargs)

    def _why_eager(self, leaves: list[Any], tree: Any) -> str:
        try:
            spec, _ = self._reader.spec_and_leaves(*detached(leaves, tree))
        except InputMismatch as error:
            return str(error)
        now = ModuleLayout(spec, wanted_by(leaves), places_of(leaves), torch.is_grad_enabled())
        if now[:-1] != self._layout[:-1]:
            return "its input has another layout"
        if now != self._layout:
            return "it is called with gradients in some steps, and without in others"
        if self._graphs is None:
            return ""
        assert self._walk is not None  # noted with the graphs
        if _context() != self._context:
            return "settings of torch have changed"
        # A line of the step may have changed the module since the call began.
        walk = self._walk
        held = walk.is_current() and (walk.addresses(), walk.layouts(), walk.flags()) == self._held
        return "" if held else _OTHER_STATE

    def _capture(self, original: Callable[..., Any], leaves: list[Any]) -> None:
        """Capture the forward pass. Set `failure` if that cannot be done."""
        try:
            passes = PartPasses(original, self.call, static_inputs(self._layout.spec, leaves), self._memory)
            forward, number = self._memory.graph()
            passes.capture_forward(forward)
        except Exception as error:  # whatever the user's code raises when it is called once more
            self._failure = str(error) if isinstance(error, CaptureError) else describe_failure(error)
            return
        self._graphs = GraphedPart(self._memory, passes, forward, number, self.call.name or "the model")
        self._context, self._walk = _context(), Walk({"": self.call.module})
        # What the graphs hold of the module, beside the objects.
        self._held = self._walk.addresses(), self._walk.layouts(), self._walk.flags()

    @property
    def failure(self) -> str:
        """Why it could not be captured, "" if it could, or may be."""
        return self._failure or ("" if self._graphs is None else self._graphs.failure)

    def reset(self) -> None:
        """Free the graphs."""
        if self._graphs is not None:
            self._graphs.reset()
            self._graphs = None


_OTHER_STATE = "it has other parameters, strides, modes or requires_grad than when it was captured"
CHANGED = "a hook was registered in a captured module, or removed, or a module was given another forward"


def _context() -> tuple[Any, ...]:
    """Return what decides which kernels a module runs, beside its input and its own state."""
    return Context.now(), tuple(map(type, function_modes()))
