"""The autograd node around a forward and a backward graph."""

import copy
import functools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ._errors import CaptureError, CaptureWarning, InputMismatch
from ._graph import NOT_THE_USERS, CudaGraph, EmulatedGraph, Graph, Pool, describe_failure
from ._inputs import Constant, Spec, StaticInputs, TensorSpec, path
from ._state import Generation, Settings, TrainingState
from ._torch import (
    TreeSpec,
    cudagraphs_of_its_own,
    fail_on_recompile,
    foreach_copy_,
    has_legacy_backward_hooks,
    hook_tables,
    in_backward,
    keeps_graph,
    module_tables,
    storage_address,
    tree_flatten,
    tree_unflatten,
    version,
)

_MAX_CAPTURES = 32  # per callable, in its life: a shape or a constant that always varies captures in every call


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    sample_kwargs: Any = None,
    graph: str = "auto",
) -> Any:
    """Return callables whose forward pass is one CUDA graph launch, and whose backward pass is another.

    For a network of which only parts can be captured; a whole training step is `graphed_step`. Every call that
    `torch.cuda.make_graphed_callables` takes is taken. Outputs and gradients have the bits of the ungraphed callable.

    Args:
        callables: a module, a function of tensors, or a tuple of these. A module comes back itself, with another
            `forward`: hooks of the module run around it, whether registered before or after.
        sample_args: the arguments of a call: a tuple of trees of tensors and hashable constants; for a tuple of
            callables a tuple of such tuples. Their values do not matter. Layout, constants, `requires_grad`, autocast
            and the modes of submodules decide which graph serves a call.
        num_warmup_iters: forward and backward passes before a capture, at least two.
        allow_unused_input: whether outputs may leave out an input or parameter that requires grad. It gets no gradient.
        pool: a handle as `torch.cuda.graph_pool_handle()` returns it. Callables with the same handle share the scratch
            of their backward passes; without a handle, those of this call do. Their calls and backward passes may come
            in any order. With graphs of other makers nothing is shared.
        sample_kwargs: keyword arguments of the call, a dict; for a tuple of callables a tuple of dicts.
        graph: "auto": CUDA graphs where the tensors are on CUDA. "emulate": the same engine, re-running the callable
            instead of a graph, on any device. "off": eager.

    Returns:
        `callables`, graphed: for a function a function, for a tuple a tuple. That function, or `module.forward`, has
        `close()`, which gives the graphs back and restores `forward`, and counts: `captures`, `replays`, and `eager`
        by reason. A copy of a graphed module, by deepcopy or pickle, is ungraphed.

    Raises:
        ValueError: an argument that cannot work; the message says what to pass.
        CaptureError: an input or parameter is unused and `allow_unused_input` is False.

    A layout that is new is captured at its first call, up to 32 in the life of a callable. Eager, as the callable was
    before, are calls under `torch.no_grad`, in another mode (train or eval) than now, within the capture of another
    graph, and those that come before an earlier call in the same layout was backpropagated, whose activations the
    graph holds. So is what cannot be captured, with one `CaptureWarning` per reason. Where parameters were replaced or
    moved since, graphs are captured again.

    Warm-up and capture leave buffers, random numbers and `param.grad` as they were. What `forward` writes into
    parameters stays written. What it reads on the host, attributes of a module that are no parameters or buffers among
    it, is frozen, and what it writes there is not repeated. Hooks of submodules are part of the capture: what they do
    to tensors is repeated, nothing else.

    Backward is captured without autocast. A second backward pass needs `retain_graph=True` in the first, as ever;
    differentiating twice is an error. An output that the loss leaves out counts as one with zero gradient. A parameter
    or input that is used outside of the callable as well has its gradient summed in another order than without graphs.

    Sync: none in a call; a capture waits for the device. Aliasing: arguments are copied; outputs and gradients belong
    to the caller. Calls may be made on any stream, but in one thread at a time: graphs on one device take turns.
    """
    functions, samples = _parse(callables, sample_args, sample_kwargs)
    _check_options(num_warmup_iters, graph, pool)
    lanes: dict[torch.device, _Lane] = {}
    made = []
    for function, (args, kwargs) in zip(functions, samples, strict=True):
        device = _device(function, (args, kwargs))
        if device not in lanes:
            lanes[device] = _lane(device, graph, pool)
        blocker = _blocker(function, device, graph)
        # Two at least: a pass that is watched is one that torch.compile compiles anew.
        made.append(GraphedCallable(function, lanes[device], max(2, num_warmup_iters), allow_unused_input, blocker))
    for reason in dict.fromkeys(each.blocker for each in made if each.blocker and graph != "off"):
        _warn(f"{reason} Calls are eager; graph='off' says so without a warning.")
    for each, (args, kwargs) in zip(made, samples, strict=True):
        each.prepare(args, kwargs)
    results = tuple([each.install() for each in made])
    return results if isinstance(callables, tuple) else results[0]


class GraphedCallable:
    """A callable whose calls are graph launches. Made by `make_graphed_callables`.

    Attributes:
        captures: pairs of graphs captured so far.
        replays: calls that were a graph launch.
        eager: other calls, by reason.
    """

    def __init__(
        self, function: Callable[..., Any], lane: "_Lane", warmup: int, allow_unused: bool, blocker: str
    ) -> None:
        self._module = function if isinstance(function, nn.Module) else None
        self._original: Callable[..., Any] = function if self._module is None else self._module.forward
        self._was_attribute = self._module is not None and "forward" in vars(self._module)
        self._mode = self._module is not None and self._module.training
        self._state = TrainingState({} if self._module is None else {"module": self._module}, [])
        self._lane = lane
        self._warmup = warmup
        self._allow_unused = allow_unused
        self.blocker = blocker  # why it is never captured, "" if it may be
        self._generation: Generation | None = None
        self._hook_tables: list[dict[int, Any]] = []
        self._hooks: list[int] = []
        self._graphs: dict[_Key, _Passes | None] = {}
        self._warned: set[str] = set()
        self._attempts = 0
        self.captures = 0
        self.replays = 0
        self.eager: Counter[str] = Counter()
        functools.update_wrapper(self, self._original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable: launch its graph, or run it eagerly where no graph may serve this call."""
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        reason = self.blocker or self._why_not_now()
        if not reason:
            leaves, tree = tree_flatten((args, kwargs))
            passes = self._find(leaves, tree)
            if passes is not None and not passes.pending:
                self.replays += 1
                return passes(leaves)
            reason = "not captured" if passes is None else "an earlier call has yet to be backpropagated"
        self.eager[reason] += 1
        return self._original(*args, **kwargs)

    def close(self) -> None:
        """Give the graphs and their memory back, and restore the module's `forward`. Later calls are eager.

        Graphs that a backward pass still needs go after it. Waits for the device.
        """
        self.blocker = "closed"
        for passes in self._graphs.values():
            if passes is not None and not passes.pending:
                passes.reset()
        self._graphs = {}
        self._lane.bury()
        if self._module is not None and vars(self._module).get("forward") is self:
            del self._module.forward
            if self._was_attribute:
                self._module.forward = self._original

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture for a sample. Warns of what cannot be captured; raises if inputs are unused or the callable fails."""
        if not self.blocker:
            leaves, tree = tree_flatten((args, kwargs))
            with torch.enable_grad():
                self._find(leaves, tree, is_sample=True)

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
        if self._module is not None and self._module.training != self._mode:
            return f"module.training is {self._module.training}"
        if _Recording.depth or (self._lane.turns is not None and torch.cuda.is_current_stream_capturing()):
            return "in the capture of another graph"
        if self._module is not None and has_legacy_backward_hooks(self._module):
            self._warn(_LEGACY_HOOK)
            return "register_backward_hook"
        return ""

    def _find(self, leaves: list[Any], tree: TreeSpec, is_sample: bool = False) -> "_Passes | None":
        """Return the graphs for this input, captured now if need be, or None if there can be none."""
        if self._generation is None and self._is_lazy():
            return None  # the call, which is eager, makes the parameters
        try:
            key = self._key(_spec(leaves, tree), leaves)
        except InputMismatch as error:
            self._warn(str(error))
            return None
        if list(chain.from_iterable(self._hook_tables)) != self._hooks:
            self._warn(_LATE_HOOK)
            return None
        if key not in self._graphs:
            if in_backward():
                return None  # a capture there would be of a backward pass in the middle of another
            if self._attempts == _MAX_CAPTURES:
                self._warn(_MANY_LAYOUTS)
                return None
            self._attempts += 1
            self._graphs[key] = self._capture(key, leaves, is_sample)
        return self._graphs[key]

    def _is_lazy(self) -> bool:
        module = self._module or nn.Identity()
        return any(nn.parameter.is_lazy(tensor) for tensor in chain(module.parameters(), module.buffers()))

    def _key(self, spec: Spec, leaves: list[Any]) -> "_Key":
        """Return what decides which graph serves a call, having dropped the graphs that the module outlived."""
        now, before = self._state.generation(), self._generation
        if before is None or before.walk != now.walk or before.addresses != now.addresses:
            if before is not None and any(self._graphs.values()):
                self._warn(f"{before.replaced_in(now)}. Each such change takes a new capture.")
            self._graphs = {}  # graphs that a backward pass still needs live on with its autograd node
            self._hook_tables = [table for module in now.walk.modules[1:] for table in hook_tables(module)]
            self._hooks = list(chain.from_iterable(self._hook_tables))
        self._generation = now
        wants_grad = tuple([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])
        return _Key(spec, wants_grad, now.settings, torch.is_autocast_cache_enabled())

    def _capture(self, key: "_Key", leaves: list[Any], is_sample: bool) -> "_Passes | None":
        """Return graphs for this key, or None if it cannot be captured."""
        try:
            passes = self._record(key, leaves)
        except CaptureError as error:
            if is_sample and isinstance(error, _UnusedError):
                raise
            self._warn(f"{error} Calls are eager.")
            return None
        except Exception as error:
            if is_sample:
                raise  # the callable itself does not work
            self._warn(f"{describe_failure(error)} The call is eager.")
            return None
        self.captures += 1
        return passes

    def _record(self, key: "_Key", leaves: list[Any]) -> "_Passes":
        """Warm up and capture, leaving everything as it was, whether that succeeds or not."""
        assert self._generation is not None  # set by _key
        walk = self._generation.walk
        tensors = list(dict.fromkeys(walk.tensors))
        _check_tensors(self._lane.device, leaves, tensors)
        memory = _Memory(StaticInputs(key.spec, leaves), key.wants_grad, tensors, self._lane.device)
        with torch.no_grad():
            memory.inputs.copy_(leaves)
        before = _Before(self._state, walk.modules, self._lane.device)
        try:
            program = _Program(self._original, walk.modules, memory)
            passes = _capture(program, self._lane, self._warmup, self._allow_unused)
            if changes := before.changes():
                self.blocker = "not captured"  # if eager calls do so, too, each of them would be a reason to try again
                raise CaptureError(
                    f"{changes}; a replay would neither read nor keep the new value. Return it, or change the tensor "
                    "in place (copy_, add_)."
                )
        finally:
            before.restore()
        return passes

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _warn(message)


class _Key(NamedTuple):
    spec: Spec
    wants_grad: tuple[bool, ...]  # per leaf of the input
    settings: Settings
    autocast_cache: bool  # decides whether two uses of a weight share a cast, so in which dtype its gradient is summed


# -------------------------------------------------------------------------------------------------- memory and order


class _Turns:
    """The stream that every capture on a device is made on, and the order of the graphs.

    What cuBLAS keeps for that stream is part of the graphs: two of them must not run at a time, on whatever streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)
        self._last: torch.cuda.Stream | None = None

    def take(self) -> torch.cuda.Stream:
        """Have the current stream wait for the graphs that were launched on another one. Return it."""
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
        return current


_turns = functools.cache(_Turns)


class _Lane:
    """What callables that share memory have in common.

    Each forward graph has a pool of its own. Activations stay in it until the backward pass; in a common pool those of
    one graph may lie where an earlier graph, replayed again meanwhile, has its scratch. A backward graph leaves nothing
    but gradients, which are copied out at once: all of them have one pool, whatever order they run in.
    """

    def __init__(self, device: torch.device, emulated: bool) -> None:
        self.device = device
        self.turns = None if emulated else _turns(device)
        self._pool = Pool()
        self._dead: list[Graph] = []

    def graphs(self) -> tuple[Graph, Graph]:
        """Return a forward and a backward graph to capture."""
        if self.turns is None:
            return EmulatedGraph(), EmulatedGraph()
        return CudaGraph(self.turns.stream, Pool()), CudaGraph(self.turns.stream, self._pool)

    def bury_with(self, owner: object, graph: Graph) -> None:
        """Have a graph of the common pool reset when its owner is gone, at a time when the device may be waited for."""
        if self.turns is not None:
            weakref.finalize(owner, self._dead.append, graph).atexit = False

    def bury(self) -> None:
        """Reset the graphs whose owners are gone. Waits for the device if there are any."""
        while self._dead:
            self._dead.pop().reset()

    def take_turn(self) -> None:
        """Have the current stream wait for other graphs."""
        if self.turns is not None:
            self.turns.take()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context on the stream of warm-up and capture."""
        self.bury()
        if self.turns is None:
            yield
            return
        current, stream = self.turns.take(), self.turns.stream
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)


# By handle: torch's allocator does not tell which graphs captured into a pool, nor in which order they will run.
_lanes: "weakref.WeakValueDictionary[tuple[Any, torch.device, bool], _Lane]" = weakref.WeakValueDictionary()


def _lane(device: torch.device, graph: str, pool: Any) -> _Lane:
    """Return the lane of a pool handle, or a new one."""
    emulated = graph != "auto" or device.type != "cuda"
    if pool is None:
        return _Lane(device, emulated)
    key = (pool, device, emulated)
    lane = _lanes.get(key)
    if lane is None:
        lane = _lanes[key] = _Lane(device, emulated)
    return lane


class _Memory:
    """What the two graphs of a layout read and write, at addresses that never change.

    Gradients are taken with respect to aliases of the parameters, which share their memory. A parameter itself would
    bring along its hooks, which run again where the gradient arrives, and its gradient accumulator, which belongs to
    the stream it was first used on: as long as an autograd graph of the caller's keeps it, that stream is drawn into
    the capture and ends it.
    """

    def __init__(
        self, inputs: StaticInputs, wants_grad: tuple[bool, ...], tensors: list[Tensor], device: torch.device
    ) -> None:
        self.inputs = inputs
        self.device = device
        self.leaves = tree_flatten((inputs.args, inputs.kwargs))[0]
        self.entries = [i for i, wanted in enumerate(wants_grad) if wanted]
        self.params = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
        self.aliases = {param: nn.Parameter(param.data) for param in self.params}
        for param, alias in self.aliases.items():
            vars(alias).update(vars(param))
        self.tensors = tensors
        self._kept = [tensor.data for tensor in tensors]  # a graph reads them where they are, replaced or not
        self.wrt = [self.leaves[i].requires_grad_() for i in self.entries] + list(self.aliases.values())
        self.outputs: list[Any] = []
        self.tree: TreeSpec | None = None
        self.seeds: list[Tensor] = []  # gradients of the differentiable outputs
        self.grads: Sequence[Tensor | None] = ()  # in the order of wrt

    @property
    def results(self) -> list[Tensor]:
        """The tensors among the outputs."""
        return [output for output in self.outputs if isinstance(output, Tensor)]

    def rebuild(self, results: Sequence[Tensor]) -> Any:
        """Return what the callable returns, with these tensors in it."""
        assert self.tree is not None  # set by the first forward pass
        fresh = iter(results)
        return tree_unflatten([next(fresh) if isinstance(o, Tensor) else o for o in self.outputs], self.tree)


# ---------------------------------------------------------------------------------------------------------- recording


class _Recording:
    """Context in which every graphed callable is eager, for it is part of what is being recorded."""

    depth = 0

    def __enter__(self) -> None:
        _Recording.depth += 1

    def __exit__(self, *_: object) -> None:
        _Recording.depth -= 1


class _Program:
    """What the graphs record: a callable's forward pass on static inputs, and its backward pass."""

    def __init__(self, function: Callable[..., Any], modules: list[nn.Module], memory: _Memory) -> None:
        self._function = function
        self._cells = [
            (module, key, memory.aliases[param])
            for module in modules
            for key, param in module_tables(module)[0].items()
            if param in memory.aliases
        ]
        self.memory = memory

    def forward(self) -> None:
        """Run the callable; leave its outputs in memory, with their autograd graph."""
        memory = self.memory
        args, kwargs = tree_unflatten(memory.leaves, memory.inputs.spec.tree)  # anew: it may change a list or dict
        with self._aliased(), torch.enable_grad():
            memory.outputs, memory.tree = tree_flatten(self._function(*args, **kwargs))

    def backward(self) -> None:
        """Run the backward pass of the last forward pass; leave the gradients in memory."""
        memory = self.memory
        wanted = [result for result in memory.results if result.requires_grad]
        # Retained: what this pass would free, a second one after the same forward pass needs.
        with self._aliased(), torch.autocast(memory.device.type, enabled=False):
            memory.grads = torch.autograd.grad(wanted, memory.wrt, memory.seeds, retain_graph=True, allow_unused=True)

    def warm_up(self, passes: int) -> tuple[set[int], list[set[int]]]:
        """Run both passes.

        Returns:
            The addresses of memory that autograd saves, and for each tensor in `wrt` the differentiable outputs that
            depend on it.

        Raises:
            CaptureError: a replay would not do what the callable does.
        """
        memory, saved = self.memory, set[int]()

        def note(tensor: Tensor) -> Tensor:
            saved.add(storage_address(tensor))
            return tensor

        versions, known = memory.inputs.versions(), None
        for i in range(passes):
            with saved_tensors_hooks(note, lambda tensor: tensor) if i == 0 else nullcontext():
                self.forward()
            known = known or _signature(memory)
            _check_outputs(memory, known)
            if i == 0:
                dependents = _dependents(memory)
                memory.seeds = [torch.zeros_like(result) for result in memory.results if result.requires_grad]
            if memory.seeds and memory.wrt:
                self.backward()
        if versions != memory.inputs.versions():
            raise CaptureError("it writes into its input, which a replay would not. Clone the input before.")
        return saved, dependents

    @contextmanager
    def _aliased(self) -> Iterator[None]:
        """Context in which the modules have the aliases for parameters, and nothing is in autocast's cache before or
        after: a cast that a capture made is memory of the graph, and one that it found would be frozen into it."""
        params = [(module, key, module_tables(module)[0][key]) for module, key, _ in self._cells]
        with _Recording():
            torch.clear_autocast_cache()
            try:
                _set(self._cells)
                yield
            finally:
                _set(params)
                torch.clear_autocast_cache()


def _set(cells: Sequence[tuple[nn.Module, str, Any]]) -> None:
    for module, key, param in cells:
        setattr(module, key, param)  # not in the table: RNNs keep a list of their own


class _Before:
    """What warm-up and capture must leave as it was."""

    def __init__(self, state: TrainingState, modules: list[nn.Module], device: torch.device) -> None:
        self._state = state
        self._device = device
        self._attributes = [(vars(module), dict(vars(module))) for module in modules]
        self._tensors = state.tensors()
        self._values = [
            (tensor, tensor.detach().clone())
            for tensor in self._tensors.values()
            if not isinstance(tensor, nn.Parameter)
        ]
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def changes(self) -> str:
        """Return in words which tensors of the modules are others now, or ""."""
        with_grad = [
            f"module attribute {key}"
            for attributes, before in self._attributes
            for key, value in attributes.items()
            if isinstance(value, Tensor) and value.requires_grad and before.get(key) is not value
        ]
        rebound = self._state.rebound_since(self._tensors) + with_grad
        return f"{', '.join(rebound[:3])}: made or rebound in forward" if rebound else ""

    def restore(self) -> None:
        """Put everything back, attributes of modules by identity and buffers by value."""
        for attributes, before in self._attributes:
            for key in attributes.keys() - before.keys():
                del attributes[key]
            attributes.update(before)
        self._state.rebind(self._tensors)
        for tensor, value in self._values:
            # By .data: the bits are what they were, so autograd need not take the tensor for changed.
            tensor.data.copy_(value)
        torch.set_rng_state(self._random)
        if self._cuda_random is not None:
            torch.cuda.set_rng_state(self._cuda_random, self._device)


def _capture(program: _Program, lane: _Lane, warmup: int, allow_unused: bool) -> "_Passes":
    """Warm up and capture. Waits for the device."""
    memory = program.memory
    forward, backward = lane.graphs()
    try:
        with lane.aside(), warnings.catch_warnings():
            # Of an empty graph: the backward pass of x + 1 launches nothing.
            warnings.filterwarnings("ignore", "The captured step launched no CUDA kernel", CaptureWarning)
            saved, dependents = program.warm_up(warmup)
            known = _signature(memory)
            if memory.seeds and memory.wrt and not allow_unused:
                _check_used(memory)
            memory.outputs, memory.grads = [], ()  # so that nothing is freed in mid-capture
            with fail_on_recompile():
                forward.capture(program.forward)
                forward.replay()  # an emulated graph has no outputs before
                _check_outputs(memory, known)
                if memory.seeds and memory.wrt:
                    backward.capture(program.backward)
    except BaseException:
        forward.reset()
        backward.reset()
        raise
    # The autograd graph goes, and with it whatever hooks and custom functions in it hold. Its memory is the pool's,
    # from which nothing is captured any more.
    differentiable = [result.requires_grad for result in memory.results]
    memory.outputs = [output.detach() if isinstance(output, Tensor) else output for output in memory.outputs]
    read = [tensor for tensor in memory.tensors if storage_address(tensor) in saved - {0}]
    passes = _Passes(lane, memory, forward, backward, differentiable, dependents, read)
    lane.bury_with(passes, backward)
    return passes


def _signature(memory: _Memory) -> tuple[Any, ...]:
    """Return what of the outputs must be the same in each pass."""
    return memory.tree, [
        (output.shape, output.dtype, output.device, output.requires_grad)
        if isinstance(output, Tensor)
        else Constant(type(output), output)
        for output in memory.outputs
    ]


_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def _check_outputs(memory: _Memory, known: tuple[Any, ...]) -> None:
    for output in memory.outputs:
        if isinstance(output, Tensor):
            if type(output) not in _PLAIN or output.layout is not torch.strided or output.device != memory.device:
                raise CaptureError(
                    f"it returned a {type(output).__name__} of layout {output.layout} on {output.device}. Return "
                    f"strided tensors on {memory.device}."
                )
        elif type(output) not in _CONSTANTS:
            raise CaptureError(
                f"it returned a {type(output).__name__}, which a replay cannot compute anew. Return tensors, in "
                "tuples, lists and dicts."
            )
    if _signature(memory) != known:
        raise CaptureError("it returned something else each time that it was called with the same input.")


def _dependents(memory: _Memory) -> list[set[int]]:
    """Return for each tensor in `wrt` the differentiable outputs, by number, that depend on it.

    Raises:
        CaptureError: an output depends on another tensor that requires grad, whose gradient would be lost.
    """
    numbers = {id(tensor): j for j, tensor in enumerate(memory.wrt)}
    dependents: list[set[int]] = [set() for _ in memory.wrt]
    for i, result in enumerate(result for result in memory.results if result.requires_grad):
        for leaf in _autograd_leaves(result):
            if id(leaf) not in numbers:
                raise CaptureError(
                    f"it uses a tensor of shape {tuple(leaf.shape)} that requires grad and is neither an argument nor "
                    "a parameter of the module, so its gradient would be lost. Pass the tensor as an argument, or the "
                    "module that owns it as the callable."
                )
            dependents[numbers[id(leaf)]].add(i)
    return dependents


def _autograd_leaves(result: Tensor) -> Iterator[Tensor]:
    if result.grad_fn is None:
        yield result
        return
    seen, nodes = {result.grad_fn}, [result.grad_fn]
    for node in nodes:  # grows below
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


class _UnusedError(CaptureError):
    """An input or parameter is unused, which `allow_unused_input` would permit."""


def _check_used(memory: _Memory) -> None:
    for j, grad in enumerate(memory.grads):
        if grad is None:
            kind = "an input" if j < len(memory.entries) else "a parameter"
            raise _UnusedError(
                f"make_graphed_callables: {kind} of shape {tuple(memory.wrt[j].shape)} requires grad, but no output "
                "depends on it. Pass allow_unused_input=True, or one that does not require grad."
            )


# ----------------------------------------------------------------------------------------------------------- replaying


class _Passes:
    """The forward and the backward graph of one layout.

    Args:
        lane: whose turns they take.
        memory: what they read and write.
        forward: of the forward pass.
        backward: of the backward pass; not captured where there is none.
        differentiable: per tensor among the outputs.
        dependents: see `_dependents`.
        read: parameters and buffers that autograd saved, so that backward reads them where they are.
    """

    def __init__(
        self,
        lane: _Lane,
        memory: _Memory,
        forward: Graph,
        backward: Graph,
        differentiable: list[bool],
        dependents: list[set[int]],
        read: list[Tensor],
    ) -> None:
        self._lane = lane
        self._memory = memory
        self._forward = forward
        self._backward = backward
        self._differentiable = differentiable
        self._dependents = dependents
        self._read = read
        self._last: weakref.ref[_Call] | None = None

    @property
    def pending(self) -> bool:
        """Whether the activations of the last call may still be needed."""
        last = None if self._last is None else self._last()
        return last is not None and not last.done

    def __call__(self, leaves: list[Any]) -> Any:
        """Replay the forward graph on this input. Sync: none. Aliasing: none."""
        memory = self._memory
        call = _Call(self)
        results = _node(call, leaves, *[leaves[i] for i in memory.entries], *memory.params)
        self._last = weakref.ref(call)
        return memory.rebuild(results)

    def forward(self, leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of the outputs, and those of them that are not differentiable."""
        self._lane.take_turn()
        self._memory.inputs.copy_(leaves)
        self._forward.replay()
        results = _copies(self._memory.results)
        constant = [r for r, differentiable in zip(results, self._differentiable, strict=True) if not differentiable]
        return results, constant

    def backward(self, call: "_Call", grads: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Return copies of the gradients for these gradients of the outputs."""
        if self._last is None or self._last() is not call:
            raise RuntimeError(_OVERWRITTEN)
        if call.versions != self.versions():
            raise RuntimeError(_MODIFIED)
        self._lane.take_turn()
        given = [grad for grad, differentiable in zip(grads, self._differentiable, strict=True) if differentiable]
        for seed, grad in zip(self._memory.seeds, given, strict=True):
            _ = seed.zero_() if grad is None else seed.copy_(grad, non_blocking=True)
        self._backward.replay()
        call.done = not keeps_graph()
        reached = {i for i, grad in enumerate(given) if grad is not None}
        found = [
            (j, grad)
            for j, grad in enumerate(self._memory.grads)
            if grad is not None and wanted[j] and not self._dependents[j].isdisjoint(reached)
        ]
        returned: list[Tensor | None] = [None] * len(wanted)
        for (j, _), grad in zip(found, _copies([grad for _, grad in found]), strict=True):
            returned[j] = grad
        return returned

    def versions(self) -> list[int]:
        """Return a number per parameter and buffer that backward reads, which every change in place raises."""
        return [version(tensor) for tensor in self._read]

    def reset(self) -> None:
        """Give the graphs up. Waits for the device."""
        self._last = None
        self._forward.reset()
        self._backward.reset()


class _Call:
    """One replay of a forward graph. Its autograd node holds it, so that it lives while backward may still come."""

    def __init__(self, passes: _Passes) -> None:
        self.passes = passes
        self.done = False
        self.versions: list[int] = []


class _Node(torch.autograd.Function):
    """Forward and backward of one call, by replays."""

    @staticmethod
    def forward(ctx: Any, call: _Call, leaves: list[Any], *_: Tensor) -> tuple[Tensor, ...]:
        results, constant = call.passes.forward(leaves)
        call.versions = call.passes.versions()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            returned = ctx.call.passes.backward(ctx.call, grads, ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # create_graph=True
            # once_differentiable does this only where a gradient that comes in requires grad.
            present = [grad for grad in returned if grad is not None]
            once = iter(_once(torch.empty(0, requires_grad=True), *present))
            returned = [None if grad is None else next(once) for grad in returned]
        return None, None, *returned


class _Once(torch.autograd.Function):
    """Identity of gradients that cannot be differentiated, and say so rather than being taken for constants."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple([grad.detach() for grad in grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "make_graphed_callables: a graphed callable can be differentiated once, not twice. Call close() on it "
            "(module.forward.close()), or leave it out of callables, where create_graph=True is needed."
        )


_node: Callable[..., tuple[Tensor, ...]] = _Node.apply
_once: Callable[..., tuple[Tensor, ...]] = _Once.apply


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies that belong to the caller, made by one kernel where there are many tensors of one dtype."""
    if len(tensors) < 2 or any(tensor.layout is not torch.strided for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    foreach_copy_(copies, list(tensors))
    return copies


_OVERWRITTEN = (
    "make_graphed_callables: backward for a second time through a call whose activations are gone, for a later call "
    "was replayed or the callable was closed. Pass retain_graph=True to the first backward: calls are eager until then."
)
_MODIFIED = (
    "make_graphed_callables: a parameter or buffer that backward needs has been modified by an inplace operation since "
    "the forward pass. Step the optimizer after backward."
)

# ------------------------------------------------------------------------------------------------ arguments, messages


_PLAIN = (Tensor, nn.Parameter)
_MANY_LAYOUTS = (
    f"{_MAX_CAPTURES} captures so far, so inputs of other layouts are eager from now on. Pass numbers that vary as "
    "tensors, and pad shapes that vary to a few."
)
_LEGACY_HOOK = (
    "a hook of register_backward_hook sees the last operation of a module, which is inside the graph. Calls are eager. "
    "Use register_full_backward_hook."
)
_LATE_HOOK = (
    "a hook was registered on a submodule since capture, or removed from one. Calls are eager while it is so. Register "
    "hooks of submodules before."
)


def _spec(leaves: list[Any], tree: TreeSpec) -> Spec:
    """Return the layout of an input.

    Raises:
        InputMismatch: a leaf is a sparse tensor, of a tensor subclass, or not hashable.
    """
    keys: list[TensorSpec | Constant] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            keys.append(Constant(type(leaf), leaf))
            try:
                hash(leaf)
            except TypeError:
                raise InputMismatch(
                    f"{path(tree, i)} is a {type(leaf).__name__}, which is neither a tensor nor hashable. Such calls "
                    "are eager. Pass a tensor (torch.as_tensor) or a number, string or None."
                ) from None
        elif type(leaf) in _PLAIN and leaf.layout is torch.strided:
            keys.append(TensorSpec(leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        else:
            raise InputMismatch(
                f"{path(tree, i)} is a {type(leaf).__name__} of layout {leaf.layout}. Such calls are eager; a graph "
                "takes strided tensors."
            )
    return Spec(tree, tuple(keys))


def _check_tensors(device: torch.device, leaves: list[Any], tensors: list[Tensor]) -> None:
    """Raise CaptureError if a graph would not read one of these where it is: it reads host memory only once."""
    for tensor in chain(tensors, (leaf for leaf in leaves if isinstance(leaf, Tensor))):
        if tensor.device != device:
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}, others are on {device}. Move all "
                f"inputs, parameters and buffers with .to({str(device)!r})."
            )
        if type(tensor.data) is not Tensor:
            raise CaptureError(f"a parameter is a {type(tensor.data).__name__}; a graph takes plain tensors.")


def _parse(callables: Any, sample_args: Any, sample_kwargs: Any) -> tuple[tuple[Any, ...], list[tuple[Any, Any]]]:
    """Return functions and for each the arguments of its sample."""
    if not isinstance(callables, tuple):
        callables, sample_args = (callables,), (sample_args,)
        sample_kwargs = None if sample_kwargs is None else (sample_kwargs,)
    elif len(callables) != len(sample_args):
        raise ValueError(
            f"make_graphed_callables: {len(callables)} callables, but {len(sample_args)} sample_args. Pass a tuple of "
            "arguments for each callable."
        )
    kwargs = [{}] * len(callables) if sample_kwargs is None else list(sample_kwargs)
    if len(kwargs) != len(callables):
        raise ValueError(
            f"make_graphed_callables: {len(callables)} callables, but {len(kwargs)} sample_kwargs. Pass one dict each."
        )
    for function, args, named in zip(callables, sample_args, kwargs, strict=True):
        _check_sample(function, args, named)
    return callables, [(tuple(args), dict(named)) for args, named in zip(sample_args, kwargs, strict=True)]


def _check_sample(function: Any, args: Any, named: Any) -> None:
    if not callable(function):
        raise ValueError(
            f"make_graphed_callables(callables): expected a module, a function or a tuple of them, got "
            f"{type(function).__name__}."
        )
    if isinstance(args, Tensor) or not isinstance(args, Sequence) or not isinstance(named, dict):
        raise ValueError(
            f"make_graphed_callables: a sample is a tuple of arguments and a dict of keyword arguments, got "
            f"{type(args).__name__} and {type(named).__name__}. For one argument write sample_args=(x,)."
        )
    if isinstance(function, nn.Module) and has_legacy_backward_hooks(function):
        raise ValueError(f"make_graphed_callables: {_LEGACY_HOOK}")


def _check_options(num_warmup_iters: object, graph: object, pool: object) -> None:
    if isinstance(num_warmup_iters, bool) or not isinstance(num_warmup_iters, int) or num_warmup_iters < 0:
        raise ValueError(f"make_graphed_callables(num_warmup_iters={num_warmup_iters!r}): expected an int, 0 or more.")
    if graph not in ("auto", "emulate", "off"):
        raise ValueError(f"make_graphed_callables(graph={graph!r}): expected one of 'auto', 'emulate', 'off'.")
    if pool is not None and not isinstance(pool, tuple):
        raise ValueError(
            f"make_graphed_callables(pool={type(pool).__name__}): expected a handle as torch.cuda.graph_pool_handle() "
            "returns it, or None."
        )


def _device(function: Any, sample: Any) -> torch.device:
    """Return the CUDA device of the sample and parameters, or another device if none is on CUDA."""
    tensors = [leaf for leaf in tree_flatten(sample)[0] if isinstance(leaf, Tensor)]
    if isinstance(function, nn.Module):
        tensors += [*function.parameters(), *function.buffers()]
    devices = sorted({tensor.device for tensor in tensors}, key=lambda device: device.type != "cuda")
    return devices[0] if devices else torch.device("cpu")


def _blocker(function: Any, device: torch.device, graph: str) -> str:
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


def _warn(message: str) -> None:
    """Warn, naming the innermost line that is neither torch's nor ampkit's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"make_graphed_callables: {message}", CaptureWarning, stacklevel=level)
