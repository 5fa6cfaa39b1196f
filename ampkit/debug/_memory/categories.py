"""Whose bytes they are: storages are watched from birth to death, and each is given one category, in hindsight."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..._text import dtype_name
from ..._torch.autograd import current_node, newest_sequence_number, sequence_number
from ..._torch.compile import without_compiled_code
from ..._torch.modes import TorchDispatchMode
from ..._torch.modules import module_tables
from ..._torch.operators import METADATA_OPS, TO_COPY
from ..._torch.tensors import storage_address
from ..._torch.tree import tensors_in
from ..._user_line import Blame
from .profile import CATEGORIES, Holder, Mark, MemoryProfile

HOLDERS = 100  # how many are named
BLOCK = 512  # bytes; the CUDA allocator's kMinBlockSize: every size is a multiple of it
_UNSPLIT = 1 << 20  # bytes; the CUDA allocator's kSmallSize: a large block is not split where no more would be left
_ACCUMULATES = "torch::autograd::AccumulateGrad"  # the node that makes a gradient a leaf's `.grad`


@dataclass(eq=False)
class Life:
    """A piece of memory.

    Attributes:
        bytes: how much it is now.
        born: the phase that it was made in, "" if it was there before.
        category: what is known of it so far, "" for nothing.
        asked: the size that was asked for. What is taken may be more.
    """

    bytes: int
    born: str
    module: str = ""
    line: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    category: str = ""
    asked: int = 0

    @property
    def settled(self) -> str:
        """The category, now that all is known."""
        return self.category or ("autograd detail" if self.born == "backward" else "temporary")


class _Event(NamedTuple):
    at: float
    life: Life
    change: int


class Sizes:
    """How much memory a storage of a size takes: on a CPU, as much as it asks for."""

    def taken(self, key: int, size: int) -> int:
        """Return what a new storage takes."""
        return size

    def freed(self, key: int) -> None:
        """A storage is gone."""

    def beside(self, func: Any, in_backward: bool) -> int:
        """Return what an operation takes for good, beside its results."""
        return 0


class Blocks(Sizes):
    """Sizes of whole blocks, as the CUDA allocator gives them out."""

    def taken(self, key: int, size: int) -> int:
        """Return the size in whole blocks."""
        return -(-size // BLOCK) * BLOCK


class Ledger(TorchDispatchMode):
    """Context that writes down every storage of one device that is made or freed in it.

    What belongs to whom is known only later: that a result was kept for backward, when backward begins; that one was a
    gradient, when it is accumulated. So each storage has one category from its birth on, settled by what becomes of it.

    What torch.compile made runs as eager code in the context, so that its storages are seen, and compiled again behind
    it.

    Args:
        device: whose memory.
        model: its parameters and buffers are parameters, and its modules give paths. Hooks are on it in the context.
        optimizers: their state is optimizer state. Hooks are on them in the context.
        inputs: a tree of tensors that are the batch.
        entered: the frame that enters the context. Its callers' lines are not named.
        sizes: what storages take.
        watches_allocator: on CUDA, count what is not tensors too. It resets the peak statistics of the device.

    Sync: none. Keeps no tensor alive.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        inputs: Any,
        entered: FrameType,
        sizes: Sizes,
        watches_allocator: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._node: Any = None
        self._device = device
        self._model = model
        self._optimizers = optimizers
        self._inputs = inputs
        self._blame = Blame(entered, lenient=False)
        self._sizes = sizes
        self._left = ExitStack()
        self._lives: dict[int, tuple[Life, weakref.ref[Any]]] = {}
        self._before: list[tuple[Life, int]] = []
        self._events: list[_Event] = []
        self._marks: list[Mark] = []
        self._path: list[str] = []
        self._recomputed: list[Life] = []
        self._made: dict[int, tuple[str, str]] = {}  # module and line of a node's forward, by its number
        self._names: dict[int, str] = {}  # the module of a parameter, by the parameter's id
        self._phase = ""
        self._stepping = False
        self._steps = 0
        self._counts_steps = True
        self._level = 0
        self._unseen = _Unseen(device) if device.type == "cuda" and watches_allocator else None
        self._library, self._pool = (Life(0, "", category=category) for category in ("temporary", "graph pool"))
        self._start = 0.0

    # ------------------------------------------------------------------------------------------------------ context

    def __enter__(self) -> "Ledger":
        if self._unseen is not None:
            self._unseen.read_pools()  # what lies in them is not counted again
        self._own()
        self.read(self._inputs)
        with ExitStack() as entered:
            entered.enter_context(without_compiled_code())
            for hook in self._hooks():
                entered.callback(hook.remove)
            self._left = entered.pop_all()
        self._start = time.perf_counter()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if kind is not None and self._phase == "forward":  # ended early: a backward would have found these
            self._keep_forward()
        self._left.close()
        self._own()
        self._read_pools()
        self._lives.clear()  # nothing is written down after this

    def at_node(self, node: Any) -> None:
        """Say which node of the graph runs, in a backward that autograd's engine does not run; None behind the last."""
        self._node = node

    def read(self, tree: Any) -> None:
        """Say that tensors are read, also by an operation that the context does not see."""
        for tensor in tensors_in(tree):
            self._there(tensor, "input")

    def begin_step(self) -> None:
        """Say that a step begins. Without it, one begins with a forward that follows an optimizer."""
        self._counts_steps = False
        self._mark_step()

    def _mark_step(self, at: int | None = None) -> None:
        self._read_pools()
        self._marks.append(Mark(len(self._events) + 1 if at is None else at, f"step {self._steps}"))
        self._steps += 1
        self._phase = ""

    # -------------------------------------------------------------------------------------------------------- hooks

    def _hooks(self) -> Iterator[RemovableHandle]:
        for name, module in () if self._model is None else self._model.named_modules():
            yield module.register_forward_pre_hook(partial(self._push, name), prepend=True)
            yield module.register_forward_hook(partial(self._pop, name), always_call=True)
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before_step)
            yield optimizer.register_step_post_hook(self._after_step)

    def _push(self, name: str, module: nn.Module, args: Any) -> None:
        self._path.append(name)

    def _pop(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        while self._path and self._path.pop() != name:
            pass  # a module inside raised, and the error was caught
        if not self._path:  # the end of a recomputation, if it was one
            self._keep(life for life in self._recomputed if life.bytes)
            self._recomputed.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Notice that an optimizer steps. Returns its arguments if a closure is one, whose forward is one as any."""
        self._stepping = True
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._watched(closure)}
        if len(args) > 1 and callable(args[1]):  # behind the optimizer itself
            return (args[0], self._watched(args[1]), *args[2:]), kwargs
        self._continue_step()
        return None

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that says when it runs."""
        before = self._phase

        def watched() -> Any:
            nonlocal before
            if self._phase != before:  # the optimizer did something first: no forward in its step begins the next one
                self._phase = ""
            before = "in the step"
            self._stepping = False
            result = closure()
            self._stepping = True
            self._continue_step()
            return result

        return watched

    def _continue_step(self) -> None:
        self._own()
        self._begin("optimizer")

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = False
        self._own()

    def _own(self) -> None:
        """Find out which storages are parameters, gradients and optimizer state now."""
        for name, module in () if self._model is None else self._model.named_modules():
            params, buffers, _ = module_tables(module)
            for tensor in (param for param in params.values() if param is not None):
                self._names.setdefault(id(tensor), name)
                self._there(tensor, "parameter", name)
                if tensor.grad is not None:
                    self._there(tensor.grad, "gradient", name)
            for tensor in (buffer for buffer in buffers.values() if buffer is not None):
                self._there(tensor, "parameter", name)
        for optimizer in self._optimizers:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                name = self._names.get(id(param), "")
                self._there(param, "parameter", name)
                if param.grad is not None:
                    self._there(param.grad, "gradient", name)
                for tensor in tensors_in(dict(optimizer.state.get(param, {}))):
                    self._there(tensor, "optimizer state", name)

    # --------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_OPS or func.namespace == "profiler":  # an optimizer's step tells the profiler
            return func(*args, **kwargs)
        node = current_node() or self._node
        self._turn(node)
        sources = tensors_in((args, kwargs))
        self.read(sources)
        module, line = self._place(node)
        watched = self._unseen is not None and self._unseen.begin(self._level)
        result = func(*args, **kwargs)
        # Only what makes something is a forward: `zero_grad(set_to_none=False)` belongs to the step before.
        # A module may run without gradients, as reentrant checkpointing runs it.
        forward = node is None and not self._stepping and (torch.is_grad_enabled() or bool(self._path))
        made = [self._born(tensor, module, line, forward) for tensor in tensors_in(result)]
        born = [life for life in made if life is not None]
        if func is TO_COPY and sources[0].device != self._device:
            for life in born:
                life.category = "input"
        self._change(self._library, self._sizes.beside(func, node is not None))
        if watched:
            self._add_unseen(born, module, line)
        for tensor in sources:
            self._resized(tensor)
        if node is not None and node.name() == _ACCUMULATES:
            self._accumulated(node, result)
        return result

    def _turn(self, node: Any) -> None:
        """Notice that another phase begins with the operation that comes."""
        if not self._marks:
            self._mark_step(at=1)  # what a loop does before its first operation belongs to its first step
        if node is not None:
            self._begin("backward")
        elif self._stepping:
            self._begin("optimizer")
        elif self._phase == "backward" and not torch.is_grad_enabled():
            self._begin("optimizer")  # unscaling and clipping belong to it

    def _begin(self, phase: str) -> None:
        if phase == self._phase:
            return
        if phase == "forward" and self._phase == "optimizer" and self._counts_steps:
            self._mark_step()
        if phase == "backward":
            self._keep_forward()
        self._phase = phase
        self._marks.append(Mark(len(self._events) + 1, phase))  # event 0 is what was there before

    def _keep_forward(self) -> None:
        self._keep(life for life, _ in self._lives.values() if life.born == "forward")

    def _keep(self, lives: Iterator[Life]) -> None:
        for life in lives:
            life.category = life.category or "activation"

    def _place(self, node: Any) -> tuple[str, str]:
        """Return module and line of an operation; in backward those of its forward."""
        if node is not None and not self._path and (made := self._made.get(sequence_number(node))):
            return made
        place = self._blame()
        here = self._path[-1] if self._path else "", "" if place is None else place.line
        if node is None or self._path:
            self._made.setdefault(newest_sequence_number(), here)
        return here

    def _accumulated(self, node: Any, result: Any) -> None:
        for tensor in tensors_in(result):
            if (key := self._key(tensor)) in self._lives:
                life, _ = self._lives[key]
                life.category = "gradient"
                life.module = self._names.get(id(node.variable), life.module)

    # ----------------------------------------------------------------------------------------------------- storages

    def _key(self, tensor: Tensor) -> int:
        """Return what tells storages apart that are alive, 0 for one of another device or none."""
        if tensor.device != self._device:
            return 0
        storage = _storage(tensor)
        return 0 if storage is None else id(storage)  # a storage that has a weak reference keeps its Python object

    def _born(self, tensor: Tensor, module: str, line: str, forward: bool) -> Life | None:
        """Write down a storage that is new; None if it is not, or is no business of ours."""
        key = self._key(tensor)
        if not key or key in self._lives or (self._unseen is not None and self._unseen.in_pool(tensor)):
            return None
        if forward:
            self._begin("forward")
        life = self._watch(key, tensor, Life(0, self._phase or "nothing"))
        life.module, life.line = module, line
        if self._path and self._phase == "backward":
            life.born = "recomputation"
            self._recomputed.append(life)
        life.asked = tensor.untyped_storage().nbytes()
        self._change(life, self._sizes.taken(key, life.asked))
        return life

    def _there(self, tensor: Tensor, category: str, module: str = "") -> None:
        """Give a storage a category; one that nobody saw being made was there before."""
        key = self._key(tensor)
        if not key:
            return
        if key in self._lives:
            life, _ = self._lives[key]
            if category != "input" and life.category != "parameter":
                life.category, life.module = category, module or life.module
            return
        if self._unseen is not None and self._unseen.in_pool(tensor):
            return
        life = self._watch(key, tensor, Life(0, "", module, category=category))
        life.asked = tensor.untyped_storage().nbytes()
        self._before.append((life, self._sizes.taken(key, life.asked)))
        life.bytes = self._before[-1][1]
        self._level += life.bytes

    def _watch(self, key: int, tensor: Tensor, life: Life) -> Life:
        life.shape, life.dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        self._lives[key] = life, weakref.ref(tensor.untyped_storage(), partial(self._died, key))
        return life

    def _died(self, key: int, reference: object) -> None:
        life, _ = self._lives.pop(key, (None, None))
        if life is not None:
            self._sizes.freed(key)
            self._change(life, -life.bytes)

    def _resized(self, tensor: Tensor) -> None:
        if (key := self._key(tensor)) not in self._lives:
            return
        life, size = self._lives[key][0], tensor.untyped_storage().nbytes()
        if size != life.asked:
            life.asked = size
            self._sizes.freed(key)
            self._change(life, self._sizes.taken(key, size) - life.bytes)

    def _change(self, life: Life, change: int) -> None:
        if change:
            life.bytes += change
            self._level += change
            self._events.append(_Event(time.perf_counter(), life, change))

    # -------------------------------------------------------------------------------------------- beside the tensors

    def _add_unseen(self, born: list[Life], module: str, line: str) -> None:
        """Write down what an operation took beside its results: for good, and while it ran."""
        assert self._unseen is not None
        left, passing = self._unseen.end(self._level)
        if born and 0 < left <= _UNSPLIT:  # a block that was not worth splitting
            self._change(max(born, key=lambda life: life.bytes), left)
        else:
            self._change(self._library, left)
        workspace = Life(0, self._phase, module, line, category="temporary")
        self._change(workspace, passing)
        self._change(workspace, -workspace.bytes)

    def _read_pools(self) -> None:
        if self._unseen is not None:
            self._change(self._pool, self._unseen.read_pools() - self._pool.bytes)

    # ------------------------------------------------------------------------------------------------------- result

    def profile(self, label: str, forecast: bool) -> MemoryProfile:
        """Return what was written down, categories settled."""
        before = [_Event(self._start, life, change) for life, change in self._before]
        level = dict.fromkeys(CATEGORIES, 0)
        for _, life, change in before:
            level[life.settled] += change
        levels = [tuple(level.values())]
        for _, life, change in self._events:
            level[life.settled] += change
            levels.append(tuple(level.values()))
        totals = [sum(values) for values in levels]
        alive: dict[Life, int] = {}
        for _, life, change in [*before, *self._events[: totals.index(max(totals))]]:
            alive[life] = alive.get(life, 0) + change
        largest = sorted((item for item in alive.items() if item[1]), key=lambda item: -item[1])[:HOLDERS]
        return MemoryProfile(
            label=label,
            device=str(self._device),
            times_ms=(0.0, *((event.at - self._start) * 1e3 for event in self._events)),
            series=dict(zip(CATEGORIES, zip(*levels, strict=True), strict=True)),
            marks=tuple(self._marks),
            holders=tuple(
                Holder(size, life.settled, life.module, life.line, life.shape, life.dtype) for life, size in largest
            ),
            forecast=forecast,
        )


class _Unseen:
    """What a CUDA device's allocator gave out and no operation returned: workspaces of libraries, pools of graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = self._level = 0
        self._pools: list[tuple[int, int]] = []  # address and size of the segments

    def begin(self, level: int) -> bool:
        """An operation begins; return whether it is one to watch. In a capture all goes into the pool."""
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated, self._level = torch.cuda.memory_allocated(self._device), level
        return True

    def end(self, level: int) -> tuple[int, int]:
        """Return what the operation took beside its results: for good, and beyond that while it ran."""
        now = torch.cuda.memory_allocated(self._device)
        left = now - self._allocated - (level - self._level)
        return left, torch.cuda.max_memory_allocated(self._device) - max(now, self._allocated)

    def read_pools(self) -> int:
        """Return the bytes of the segments that are in pools of graphs."""
        private = [
            part
            for part in torch.cuda.memory_snapshot(include_traces=False)
            if tuple(part["segment_pool_id"]) != (0, 0)
        ]
        self._pools = [(part["address"], part["total_size"]) for part in private if self._is_here(part)]
        return sum(size for _, size in self._pools)

    def _is_here(self, part: dict[str, Any]) -> bool:
        return bool(part["device"] == self._device.index)

    def in_pool(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in a pool."""
        if torch.cuda.is_current_stream_capturing():
            return True
        address = storage_address(tensor)
        return any(start <= address < start + size for start, size in self._pools)


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return None
