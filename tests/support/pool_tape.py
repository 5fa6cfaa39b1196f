"""The pool of a step in parts, for the CPU: each tensor of a capture lies in it until nothing keeps it any more.

On CUDA, a graph writes where it has written in its capture, and memory that a capture has let go is used by later ones.
A replay in a wrong place then overwrites what another one needs. Emulated graphs allocate anew in each replay, so they
show nothing of this, nor of what such a pool takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ampkit._capture.graph.graph import Pool, describe_failure
from ampkit._errors import CaptureError
from ampkit._step.parts.part_memory import PartMemory
from ampkit._torch.device.streams import capturing_builtin
from ampkit._torch.tensors.tensors import unowned

_is_capturing = capturing_builtin()
_BLOCK = 512  # bytes, as in torch's allocator on CUDA
_MAKE_MEMORY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_")


class TapePool:
    """Memory from which graphs allocate, the first gap that is large enough."""

    def __init__(self, nbytes: int = 2**24) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.nbytes = 0  # that were ever in use
        self._blocks: list[tuple[int, int, StorageWeakRef]] = []

    @property
    def span(self) -> tuple[int, int]:
        """Where it begins and ends."""
        start = self.memory.data_ptr()
        return start, start + self.memory.numel()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in it."""
        return self.span[0] <= tensor.untyped_storage().data_ptr() < self.span[1]

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy that lies in the pool."""
        size = tensor.untyped_storage().nbytes()
        start, wanted = 0, -(-size // _BLOCK) * _BLOCK
        self._blocks = [block for block in self._blocks if not block[2].expired()]
        for begin, end, _ in sorted(self._blocks, key=lambda block: block[0]):
            if start + wanted <= begin:
                break
            start = end
        self.nbytes = max(self.nbytes, start + wanted)
        piece = self.memory[start : start + size]
        assert piece.numel() == size, "the pool is too small for this test"
        piece.copy_(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
        # Its storage does not keep the pool, and is gone with the last tensor in it.
        own = torch._C._construct_storage_from_data_pointer(piece.data_ptr(), piece.device, size)
        self._blocks.append((start, start + wanted, StorageWeakRef(own)))
        return torch.empty(0, dtype=tensor.dtype).set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Tape(TorchDispatchMode):
    """Records operations, and has their outputs lie in a pool."""

    def __init__(self, pool: TapePool) -> None:
        super().__init__()
        self.pool = pool
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what was read or written outside of it, and its values

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        read = tree_map(self._alias, (args, kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        for tensor in given:
            storage = tensor.untyped_storage()
            if not self.pool.holds(tensor) and storage.data_ptr() not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.before[storage.data_ptr()] = whole, whole.clone()
        outputs = func(*args, **(kwargs or {}))

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.untyped_storage().nbytes() or self.pool.holds(value):
                return value
            return value if value.untyped_storage().data_ptr() in known else self.pool.moved(value)

        outputs = tree_map(placed, outputs)
        name = func.overloadpacket.__name__
        if name in _MAKE_MEMORY:
            fills = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
            if fills and name != "set_" and outputs.numel():
                self.calls.append((torch.Tensor.fill_, (self._alias(outputs), 77), {}, [None]))
        else:
            self.calls.append((func, *read, tree_leaves(tree_map(self._alias, outputs))))
        return outputs

    def _alias(self, value: Any) -> Any:
        """Return another view of a tensor, which does not keep memory of the pool."""
        if not isinstance(value, Tensor):
            return value
        return unowned(value) if self.pool.holds(value) else value.detach()


class PooledGraph:
    """Takes the place of a CUDA graph."""

    records: ClassVar[bool] = False  # whether one is being captured

    def __init__(self, pool: TapePool) -> None:
        self._pool, self._tape, self._outputs = pool, _Tape(pool), None

    def capture(self, fn: Callable[[], Any], context: Any = None, then: Any = None) -> None:
        """Record what `fn` does, and undo it."""
        memory, random_state = self._pool.memory.clone(), torch.get_rng_state()
        PooledGraph.records = True
        try:
            with self._tape:
                fn()
        except Exception as error:
            raise CaptureError(describe_failure(error)) from error
        finally:
            PooledGraph.records = False
            self._pool.memory.copy_(memory)
            for whole, before in self._tape.before.values():
                whole.copy_(before)
            self._tape.before = {}
            torch.set_rng_state(random_state)

    def replay(self) -> None:
        """Run what was recorded, in the same memory."""
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):  # the casts are among the operations
            for func, args, kwargs, outputs in self._tape.calls:
                for old, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        """Forget everything."""
        self._tape = _Tape(self._pool)


def in_capture() -> bool:
    """Return whether what runs now is captured, by such a graph or by a CUDA graph."""
    return PooledGraph.records or (torch.cuda.is_initialized() and _is_capturing())


@contextmanager
def pooled() -> Iterator[list[TapePool]]:
    """Make steps in parts with `graph="emulate"` use such graphs. Yields the pools: the shared one comes first."""
    pools: list[TapePool] = []
    by_pool: dict[Pool, TapePool] = {}
    on_cuda = PartMemory._graph_in, PartMemory.spans

    def graph_in(memory: PartMemory, pool: Pool) -> Any:
        if not memory.emulated:
            return on_cuda[0](memory, pool)
        is_kept = any(pool is each for each in memory._pools)
        tape_pool = by_pool.get(pool) or TapePool()
        if is_kept and pool not in by_pool:
            by_pool[pool] = tape_pool
            pools.append(tape_pool)
        return PooledGraph(tape_pool)

    def spans(memory: PartMemory) -> Any:
        return [by_pool[pool].span for pool in memory._pools] if memory.emulated else on_cuda[1](memory)

    def move_memory(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        _ = storage.resize_(storage.nbytes()) if storage.resizable() else storage.share_memory_()

    moved = mock.patch("ampkit._capture.state.kept_gradients.move_memory", move_memory)
    with moved, mock.patch.multiple(PartMemory, _graph_in=graph_in, spans=spans):
        yield pools


def pooled_bytes(fn: Callable[[], Any]) -> int:
    """Return how large a pool gets in which a graph of this function is captured."""
    pool = TapePool()
    PooledGraph(pool).capture(fn)
    return pool.nbytes
