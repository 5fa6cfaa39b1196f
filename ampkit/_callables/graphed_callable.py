"""Modules and functions whose calls replay a graph: which graph a call replays, or why it is eager."""

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._capture.graph.capture_query import Answer, captures, noting_questions
from .._capture.graph.graph import describe_failure
from .._capture.keys.inputs import Spec, flatten, read_batch
from .._capture.ranks.ranks import several_processes
from .._capture.state.state import Generation, Settings, TrainingState
from .._errors import AmpkitError, CaptureError, CaptureWarning, InputMismatch
from .._torch.autograd.autograd import in_backward
from .._torch.autograd.backward_thread import run_backwards_here
from .._torch.compile import cudagraphs_of_its_own
from .._torch.tensors.modes import modes, within_transform
from .._torch.tensors.modules import GLOBAL_HOOKS, has_legacy_backward_hooks, hook_tables
from .._torch.tensors.tree import TreeSpec
from .._undo import Undo, call
from .._user_line import WarnOnce
from .arguments import LEGACY_HOOK, check_options, device_of, parse
from .autograd_node import PENDING, GraphedPasses
from .input_leaves import Wants, detached, places_of, static_inputs, wanted_by
from .passes import Passes, UnusedError, undone
from .shared_memory import SharedMemory, shared_memory_of

_NAME = "make_graphed_callables"
_MAX_CAPTURES = 32  # per callable; otherwise an input with a new shape or constant in each call is always captured


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    sample_kwargs: Any = None,
    graph: str = "auto",
    capturing: str | bool = "auto",
) -> Any:
    """Return callables whose forward pass is one CUDA graph launch, and whose backward pass is another.

    Use it for a network of which only parts can be captured; for a whole training step there is `graphed_step`. It
    accepts every call that `torch.cuda.make_graphed_callables` accepts. Outputs and gradients have the same bits as
    those of the callable without graphs.

    Args:
        callables: a module, a function of tensors, or a tuple of these. A module is returned itself, with another
            `forward`, so its hooks run around the graph, whether they are registered before or after.
        sample_args: the arguments of a call: a tuple of trees of tensors and hashable constants; for a tuple of
            callables a tuple of such tuples. Their values do not matter. Layout, constants, `requires_grad`, autocast
            and the modes of submodules decide which graph a call replays. So does whether autocast keeps a cast of an
            input: with its cache on, it keeps one of each float32 leaf tensor that requires grad. A sample counts as
            the output of another module, of which autocast keeps none.
        num_warmup_iters: forward and backward passes before a capture, at least two.
        allow_unused_input: whether an input or parameter that requires grad may have no part in any output. It gets no
            gradient.
        pool: a handle as `torch.cuda.graph_pool_handle()` returns it. Callables with the same handle share the
            temporary memory of their backward passes; without a handle, the callables of this call do. Their calls and
            backward passes may come in any order. No memory is shared with graphs that ampkit did not make.
        sample_kwargs: keyword arguments of the call, a dict; for a tuple of callables a tuple of dicts.
        graph: "auto": CUDA graphs where the tensors are on CUDA. "emulate": the same engine, re-running the callable
            instead of a graph, on any device. "off": eager.
        capturing: the answer that the callable's code gets from `torch.cuda.is_current_stream_capturing()`. True or
            False: this answer, in all calls, also with `graph="off"`. "auto": False, as in eager training. If only the
            branch for True can be captured, the answer is True from then on, in eager calls too; a warning says so, and
            `told` is True. With several processes, "auto" always answers False. Code from torch.compile gets torch's
            own answer.

    Returns:
        `callables`, graphed: a function for a function, a tuple for a tuple. That function, or `module.forward`, has a
        method `close()`, which frees the graphs and restores `forward`, the counts `captures`, `replays`, and
        `eager` by reason, and `told`: whether its code is told that it is being captured. A copy of a graphed module,
        by deepcopy or pickle, has no graphs.

    Raises:
        ValueError: an argument that cannot work; the message says what to pass.
        CaptureError: an input or parameter is unused and `allow_unused_input` is False.
        NotImplementedError: an eager call that is told True asks within a checkpointed function, which backward would
            call again without being told.

    A new layout is captured at its first call; a callable is captured 32 times at most. These calls run eagerly, as
    before: calls under `torch.no_grad`, calls in another mode (train or eval) than now, calls within the capture of
    another graph, and calls that cannot be captured, with one `CaptureWarning` per reason. A call is also eager if an
    earlier call in the same layout has yet to be backpropagated, because the graph holds its activations. If parameters
    were replaced or moved, graphs are captured again.

    Warm-up and capture leave buffers, random numbers and `param.grad` as they were. What `forward` writes into
    parameters stays written. What it reads on the host is a constant in the graph, including attributes of a module
    that are no parameters or buffers; what it writes on the host is not written again in a replay. Hooks of submodules
    are captured: a replay repeats what they do to tensors, and nothing else.

    Backward is captured without autocast; one that begins under autocast warns that its bits may be others. A second
    backward pass needs `retain_graph=True` in the first, as usual; differentiating twice is an error. An output that is
    not part of the loss counts as one with zero gradient. The gradient of a parameter or input that is also used
    outside of the callable is summed in another order than without graphs.

    Sync: none in a call; a capture waits for the device. Aliasing: arguments are copied; outputs and gradients belong
    to the caller. Calls may be made on any stream and in any thread, and graphs on one device take turns. If one thread
    calls a callable while another one captures it, that is an error.
    """
    functions, samples = parse(callables, sample_args, sample_kwargs)
    check_options(num_warmup_iters, allow_unused_input, graph, pool, capturing)
    handle = object() if pool is None else pool
    made = []
    for function, sample in zip(functions, samples, strict=True):
        device = device_of(function, sample)
        shared = shared_memory_of(handle, device, emulated=graph != "auto" or device.type != "cuda")
        # At least two, because saved_tensors_hooks are on in the first one, for which torch.compile compiles anew.
        warmup, blocker = max(2, num_warmup_iters), _why_never_captured(function, device, graph)
        made.append(GraphedCallable(function, shared, warmup, allow_unused_input, blocker, capturing))
    for reason in dict.fromkeys(each.blocker for each in made if each.blocker and graph != "off"):
        WarnOnce(_NAME, CaptureWarning)(f"{reason} Calls are eager; graph='off' makes them eager without a warning.")
    for each, sample in zip(made, samples, strict=True):
        each.prepare(*sample)
    results = tuple([each.install() for each in made])
    return results if isinstance(callables, tuple) else results[0]


class GraphedCallable:
    """A callable whose calls replay graphs. Made by `make_graphed_callables`.

    Attributes:
        captures: pairs of graphs captured so far.
        replays: calls that replayed a graph.
        eager: other calls, by reason.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        shared: SharedMemory,
        warmup: int,
        allow_unused: bool,
        blocker: str,
        capturing: str | bool,
    ) -> None:
        self._module = function if isinstance(function, nn.Module) else None
        self._original: Callable[..., Any] = function if self._module is None else self._module.forward
        self._was_attribute = self._module is not None and "forward" in vars(self._module)
        self._mode = self._module is not None and self._module.training
        # Hooks of the module and of its parameters run around the graph.
        self._state = TrainingState({} if self._module is None else {"module": self._module}, [], sees_hooks=False)
        self._shared, self._warmup, self._allow_unused = shared, warmup, allow_unused
        self.blocker = blocker  # why it is never captured, "" if it may be
        self._generation: Generation | None = None
        self._hook_tables: list[dict[int, Any]] = []
        self._hooks: list[int] = []
        self._graphs: dict[_GraphKey, GraphedPasses | None] = {}
        self._warn = WarnOnce(_NAME, CaptureWarning)
        self._attempts = 0
        self._capturing_thread: int | None = None
        self.captures = self.replays = 0
        self.eager: Counter[str] = Counter()
        self._capturing = capturing
        self._answer = self._first_answer()
        functools.update_wrapper(self, self._original, updated=())

    def _first_answer(self) -> Answer:
        may_change = self._capturing == "auto" and not several_processes()  # each process would decide by itself
        return Answer(self._capturing is True, may_change=may_change)

    @property
    def told(self) -> bool:
        """Whether its code is told that it is being captured, whenever it asks."""
        return self._answer.sees_capture

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable: replay its graph, or run it eagerly if no graph can do what this call does."""
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        if self._capturing_thread not in (None, threading.get_ident()) and not in_backward():
            raise AmpkitError(_RECORDED)
        with self._shared.call():
            return call(self._call, args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reason = self.blocker or self._why_not_now()
        if not reason:
            leaves, tree = flatten(args, kwargs)
            passes = self._graphs_for(leaves, tree)
            if passes is not None and (results := passes(leaves)) is not PENDING:
                self.replays += 1
                return results
            reason = "not captured" if passes is None else "an earlier call has yet to be backpropagated"
        self.eager[reason] += 1
        with Undo() as undo:
            run_backwards_here(undo)
            if not self.told:
                return self._original(*args, **kwargs)
            with noting_questions(True):
                result = self._original(*args, **kwargs)
                if captures.asked_in_checkpoint and torch.is_grad_enabled():
                    raise NotImplementedError(_CHECKPOINTED)
            return result

    def close(self) -> None:
        """Free the graphs and restore the module's `forward`. Later calls are eager.

        Graphs that a backward pass still needs are freed after it. Waits for the device.
        """
        self.blocker = "closed"
        for passes in self._graphs.values():
            if passes is not None and not passes.pending:
                passes.reset()
        self._graphs = {}
        if self._module is not None and vars(self._module).get("forward") is self:
            del self._module.forward
            if self._was_attribute:
                self._module.forward = self._original

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture a sample. Warns if it cannot be captured; raises if inputs are unused or the callable fails."""
        if not self.blocker:
            with torch.inference_mode(False), torch.enable_grad():
                call(self._graphs_for, *flatten(args, kwargs), is_sample=True)

    def install(self) -> Any:
        """Return the graphed callable: this object for a function, and for a module the module with a new `forward`."""
        if self._module is None:
            return self
        self._module.forward = self
        return self._module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)  # bound to the module's copy

    def __reduce__(self) -> Any:
        return functools.partial, (self._original,)

    def _why_not_now(self) -> str:
        """Return why this call must be eager, whatever its input, or ""."""
        if not torch.is_grad_enabled():
            return "no_grad"
        if within_transform():
            return "within a transform of torch.func"
        if self._module is not None and self._module.training != self._mode:
            return f"module.training is {self._module.training}"
        # Also in the eager call that a capture is compared with, which must do what the capture will do.
        elsewhere = self._shared.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if Passes.recording or captures.recorded or elsewhere:
            return "in the capture of another graph"
        if captures.answer is True and not self.told:
            return "the call around it is told that it is being captured"
        if self._module is not None and has_legacy_backward_hooks(self._module):
            self._warn(LEGACY_HOOK)
            return "register_backward_hook"
        return ""

    def _graphs_for(self, leaves: list[Any], tree: TreeSpec, is_sample: bool = False) -> GraphedPasses | None:
        """Return the graphs for this input, captured now if need be, or None if there can be none."""
        if self._generation is None and self._module is not None:
            tensors = chain(self._module.parameters(), self._module.buffers())
            if any(map(nn.parameter.is_lazy, tensors)):
                return None  # the call is eager and creates the parameters
        try:
            key = self._key(leaves, tree, is_sample)
        except InputMismatch as error:
            self._warn(f"{error} Such calls are eager.")
            return None
        if list(chain.from_iterable(self._hook_tables)) != self._hooks:
            self._warn(_LATE_HOOK)
            return None
        if key not in self._graphs:
            if in_backward():
                return None  # a backward pass cannot be captured within another one
            if self._attempts == _MAX_CAPTURES:
                self._warn(_MANY_LAYOUTS)
                return None
            self._attempts += 1
            self._graphs[key] = self._capture(key, leaves, is_sample)
        return self._graphs[key]

    def _key(self, leaves: list[Any], tree: TreeSpec, is_sample: bool) -> "_GraphKey":
        """Return what decides which graph a call replays. Drop all graphs if the module has other tensors by now."""
        wants_grad = wanted_by(leaves, samples=is_sample)
        spec, _ = read_batch(*detached(leaves, tree), self._shared.device)
        now, before = self._state.generation(), self._generation
        held = None if before is None else (before.walk, before.addresses, before.layouts)
        if held != (now.walk, now.addresses, now.layouts):
            if before is not None and any(self._graphs.values()):
                self._warn(f"{before.replaced_in(now)}. Each such change takes a new capture.")
            self._graphs = {}  # an autograd node keeps the graphs that its backward pass still needs
            self._hook_tables = [table for module in now.walk.modules[1:] for table in hook_tables(module)]
            if self._hook_tables:  # those of all modules are called for the modules inside, too
                self._hook_tables += GLOBAL_HOOKS
            self._hooks = list(chain.from_iterable(self._hook_tables))
        self._generation = now
        return _GraphKey(spec, wants_grad, places_of(leaves), now.settings)

    def _capture(self, key: "_GraphKey", leaves: list[Any], is_sample: bool) -> GraphedPasses | None:
        """Return graphs for this key, or None if it cannot be captured."""
        try:
            with Undo() as undo:
                undo.note(setattr, self, "_capturing_thread", None)
                undo.note(modes())
                self._capturing_thread = threading.get_ident()
                passes = self._record_either(key, leaves)
        except Exception as error:
            is_refused = isinstance(error, CaptureError)
            if is_sample and (isinstance(error, UnusedError) or not is_refused):
                raise  # an error other than a CaptureError means that the callable itself does not work
            self._warn(f"{error} Calls are eager." if is_refused else f"{describe_failure(error)} The call is eager.")
            return None
        self.captures += 1
        return passes

    def _record_either(self, key: "_GraphKey", leaves: list[Any]) -> GraphedPasses:
        """Warm up and capture. If that fails because of a branch for eager calls, do so with the other branch."""
        if not self._answer.may_change:
            return self._record(key, leaves)
        blocker = self.blocker
        try:
            with noting_questions(False):
                return self._record(key, leaves)
        except UnusedError:
            raise
        except CaptureError as error:
            if captures.asked_in_checkpoint or not self._answer.try_other(str(error)):
                raise
            after, self.blocker = self.blocker, blocker
            try:
                passes = self._record(key, leaves)
            except Exception:
                self._answer, self.blocker = self._first_answer(), after
                raise error from None
        self._answer.keep()
        self._graphs = {}  # other layouts are captured again, with this answer
        self._warn(self._answer.take_news("now"))
        return passes

    def _record(self, key: "_GraphKey", leaves: list[Any]) -> GraphedPasses:
        """Warm up and capture. Modules and random numbers are as before afterwards, also if that fails."""
        assert self._generation is not None  # set by _key
        walk, device = self._generation.walk, self._shared.device
        tensors = list(dict.fromkeys(walk.tensors))
        for tensor in chain(tensors, (leaf for leaf in leaves if isinstance(leaf, Tensor))):
            if tensor.device != device or type(tensor.data) is not Tensor:
                raise CaptureError(
                    f"a {type(tensor.data).__name__} of shape {tuple(tensor.shape)} is on {tensor.device}. A graph "
                    f"takes plain tensors on {device}. Move inputs, parameters and buffers with .to({str(device)!r})."
                )
        inputs = static_inputs(key.spec, leaves)
        passes = Passes(self._original, walk.modules, tensors, inputs, key.wants_grad, device, self.told)
        with undone(walk.modules, device) as rebound:
            graphs = passes.capture(self._shared, self._warmup, self._allow_unused)
            passes.free_autograd_graph()
            if names := rebound():
                self.blocker = "not captured"  # eager calls may rebind, too, and each would lead to another attempt
                raise CaptureError(
                    f"{', '.join(names[:3])}: made or rebound in forward; a replay would neither read nor keep the new "
                    "value. Return it, or change the tensor in place (copy_, add_)."
                )
        return GraphedPasses(self._shared, passes, *graphs)


class _GraphKey(NamedTuple):
    """What decides which graph a call replays."""

    spec: Spec
    wants_grad: tuple[Wants, ...]  # per leaf of the input
    places: tuple[int, ...]  # per leaf
    settings: Settings


_MANY_LAYOUTS = (
    f"{_MAX_CAPTURES} captures so far, so calls with inputs of other layouts are eager from now on. Pass numbers that "
    "vary as tensors, and pad shapes that vary to a few sizes."
)
_RECORDED = (
    "make_graphed_callables: a callable was called while another thread captures it, with other tensors in place of "
    "its parameters. Call it once in each layout before threads share it."
)
_CHECKPOINTED = (
    "make_graphed_callables: this call is eager, and code asks torch.cuda.is_current_stream_capturing() within a "
    "checkpointed function. It was told True, but backward will call it again, and it would be told False there. Leave "
    "that function out of the checkpoint, use graphed_step, or pass capturing=False."
)
_LATE_HOOK = (
    "a hook was registered on a submodule since the capture, or on all modules, or was removed. Calls are eager until "
    "that is undone. Register hooks of submodules before the first capture."
)


def _why_never_captured(function: Any, device: torch.device, graph: str) -> str:
    """Return why a callable is never captured, or ""."""
    if graph == "off":
        return "graph='off'"
    if graph == "auto" and device.type != "cuda":
        return f"the tensors are on {device}, and CUDA graphs need a CUDA device."
    if isinstance(function, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel prepares each pass on the host. Graph the module first, then wrap it."
    if cudagraphs_of_its_own(function):
        return "it is compiled with CUDA graphs of its own. Compile in the default mode, torch.compile(module)."
    return ""
