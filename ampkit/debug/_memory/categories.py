"""Which category each allocation belongs to: decided by what becomes of it between its creation and its end."""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..._arguments import uninitialized
from ..._text import dtype_name
from ..._torch.autograd.autograd import current_node, in_graph_task, newest_sequence_number, sequence_number
from ..._torch.compile import without_compiled_code
from ..._torch.ranks.sharding import ShardedModules, buffers_of_collective
from ..._torch.tensors.fast_paths import autocast_of_parts, note_autocast_of_fast_paths
from ..._torch.tensors.modes import TorchDispatchMode
from ..._torch.tensors.modules import module_tables
from ..._torch.tensors.operators import METADATA_OPS, TO_COPY
from ..._torch.tensors.tensors import inner_tensors, local_shard, storage_of
from ..._torch.tensors.tree import tensors_in
from ..._undo import Undo
from ..._user_line import UserLineFinder
from .allocator import SMALL, Allocator, UntrackedMemory
from .backward import ACCUMULATE_GRAD
from .profile import MemoryProfile
from .timeline import Allocation, Timeline


class MemoryTracker(TorchDispatchMode):
    """Context that records each storage of one device that is made or freed in it.

    The category of a storage is often known only later. A result is an activation if it is still there when backward
    begins, and a gradient if it is accumulated into a `.grad`. The profile is made at the end, so each storage has one
    category in all of it.

    Model and optimizers have hooks in the context.

    Args:
        device: the device whose memory is recorded.
        model: its parameters and buffers are parameters, and its modules give paths.
        optimizers: their state is optimizer state.
        inputs: a tree of tensors that are the batch.
        entered: the frame that enters the context. No lines of its callers are named.
        allocator: says how many bytes a storage takes.
        forecast: the tensors are fake. Otherwise, on CUDA, what belongs to no tensor is counted too. This resets the
            peak statistics of the device.

    Sync: none. Keeps no tensor alive.
    """

    def __init__(
        self,
        device: torch.device,
        model: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        inputs: Any,
        entered: FrameType,
        allocator: Allocator,
        forecast: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation there
        self._device = device
        self._model = model
        self._optimizers = optimizers
        self._shards = ShardedModules(nn.Module() if model is None else model)
        self._inputs = inputs
        self._user_lines = UserLineFinder(entered, skip_torch=False)
        self._allocator = allocator
        self._forecast = forecast
        self._untracked = UntrackedMemory(device, device.type == "cuda" and not forecast)
        self._exit = ExitStack()
        self._timeline = Timeline()
        self._allocations: dict[int, Allocation] = {}  # by `_storage_key`
        self._references: dict[int, weakref.ref[Any]] = {}  # by `_storage_key`; they tell when a storage is freed
        self._libraries = Allocation(0, "", category="temporary")
        self._pools = Allocation(0, "", category="graph pool")
        self._modules: list[str] = []  # paths of the modules whose forward runs, outermost first
        self._recomputed: list[Allocation] = []
        self._forward_places: dict[int, tuple[str, str]] = {}  # module and line, by the autograd node's number
        self._module_of_param: dict[int, str] = {}  # by the parameter's id
        self._node: Any = None  # that runs in a backward without autograd's engine
        self._phase = ""
        self._in_optimizer = False
        self._steps = 0
        self._finds_steps = True  # by itself, as long as nobody calls `begin_step`

    supports_higher_order_operators = True  # torch.cond and flex_attention are one operation each

    def __enter__(self) -> "MemoryTracker":
        self._untracked.read_pools()  # so that tensors in them are not counted once more
        self._categorize_state()
        self.add_inputs(self._inputs)
        with ExitStack() as entered:
            entered.enter_context(without_compiled_code())  # what that allocates is not seen
            note_autocast_of_fast_paths(entered.enter_context(Undo()))
            for name, module in () if self._model is None else self._model.named_modules():
                before = module.register_forward_pre_hook(
                    lambda *_, name=name: self._modules.append(name), prepend=True
                )
                after = module.register_forward_hook(partial(self._leave_module, name), always_call=True)
                entered.callback(before.remove)
                entered.callback(after.remove)
            for optimizer in self._optimizers:
                entered.callback(optimizer.register_step_pre_hook(self._before_optimizer).remove)
                entered.callback(optimizer.register_step_post_hook(self._after_optimizer).remove)
            self._exit = entered.pop_all()
        self._timeline.start = time.perf_counter()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no annotation there
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]  # torch has no annotation there
        if kind is not None and self._phase == "forward":  # it failed: a backward would have found these
            self._categorize_activations()
        self._exit.close()
        self._categorize_state()
        self._timeline.resize(self._pools, self._untracked.read_pools() - self._pools.bytes)
        self._references.clear()  # what is freed after this is not recorded

    def at_node(self, node: Any) -> None:
        """Say which node of the autograd graph runs, in a backward without autograd's engine; None after the last."""
        self._node = node

    def add_inputs(self, tree: Any) -> None:
        """Record tensors that an operation reads. Those that are new to the tracker were there before: inputs."""
        for tensor in tensors_in(tree):
            self._categorize(tensor, "input")

    def begin_step(self) -> None:
        """Say that a step begins. If this is never called, a forward that follows an optimizer begins a step."""
        self._finds_steps = False
        self._mark_step()

    def profile(self, label: str) -> MemoryProfile:
        """Return what was recorded until now."""
        return self._timeline.profile(label, self._device, self._forecast)

    # -------------------------------------------------------------------------------------------------------- hooks

    def _leave_module(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        while self._modules and self._modules.pop() != name:
            pass  # the hook of an inner module did not run: it raised, and the error was caught
        if not self._modules:  # if this was a recomputation, it is over
            for allocation in self._recomputed:
                if allocation.bytes:
                    allocation.category = allocation.category or "activation"
            self._recomputed.clear()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Note that an optimizer steps. If it has a closure, return its arguments with a closure that sets phases."""
        self._in_optimizer = True
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._with_phases(closure)}
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
            return (args[0], self._with_phases(args[1]), *args[2:]), kwargs
        self._categorize_state()
        self._begin_phase("optimizer")
        return None

    def _with_phases(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose forward and backward are phases of the step that the optimizer belongs to."""
        phase_before: str | None = self._phase

        def closure_with_phases() -> Any:
            nonlocal phase_before
            # After an update by the optimizer, a forward would begin a new step. Without a phase it begins none. The
            # first call needs this only if the optimizer did something before; each further call follows an update.
            if self._phase != phase_before:
                self._phase = ""
            phase_before = None
            self._in_optimizer = False
            result = closure()
            self._in_optimizer = True
            self._categorize_state()
            self._begin_phase("optimizer")
            return result

        return closure_with_phases

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        self._categorize_state()

    # --------------------------------------------------------------------------------------------- steps and phases

    def _mark_step(self, at: int | None = None) -> None:
        self._timeline.resize(self._pools, self._untracked.read_pools() - self._pools.bytes)
        self._timeline.mark(f"step {self._steps}", at)
        self._steps += 1
        self._phase = ""

    def _update_phase(self, in_backward: bool) -> None:
        """Begin another phase if the operation that comes belongs to one."""
        if not self._timeline.marks:
            self._mark_step(at=1)  # what a loop does before its first operation belongs to its first step
        if in_backward:
            self._begin_phase("backward")
        elif self._in_optimizer or (self._phase == "backward" and not torch.is_grad_enabled()):
            self._begin_phase("optimizer")  # unscaling and clipping belong to it

    def _begin_phase(self, phase: str) -> None:
        if phase == self._phase:
            return
        if phase == "forward" and self._phase == "optimizer" and self._finds_steps:
            self._mark_step()
        if phase == "backward":
            self._categorize_activations()
        self._phase = phase
        self._timeline.mark(phase)

    # --------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_OPS or func.namespace == "profiler":  # an optimizer's step calls the profiler
            return func(*args, **kwargs)
        node = current_node() or self._node
        in_backward = node is not None or in_graph_task()  # hooks of tensors run before their node
        self._update_phase(in_backward)
        self._follow_gathered()
        sources = _held_in((args, kwargs))
        self.add_inputs(sources)
        module, line = self._module_and_line(node)
        reads_device = self._untracked.begin_operation(self._timeline.level)
        with autocast_of_parts(func):
            result = func(*args, **kwargs)
        # Forward begins with an operation that makes a tensor: `zero_grad(set_to_none=False)` makes none, and belongs
        # to the step before. A module may run without gradients, as in reentrant checkpointing.
        is_forward = not in_backward and not self._in_optimizer and (torch.is_grad_enabled() or bool(self._modules))
        made = [self._add_new(tensor, module, line, is_forward) for tensor in _held_in(result)]
        new = [allocation for allocation in made if allocation is not None]
        if func is TO_COPY and sources[0].device != self._device:
            for allocation in new:
                allocation.category = "input"
        self._timeline.resize(self._libraries, self._allocator.workspace(func, in_backward))
        if reads_device:
            self._add_untracked(new, module, line)
        for tensor in sources:
            self._update_size(tensor)
        self._follow_gathered()
        for tensor in buffers_of_collective(func, args, kwargs, in_backward):
            if buffer := self._allocations.get(self._storage_key(tensor)):
                buffer.category = buffer.category or "temporary"
        for tensor in tensors_in(result) if node is not None and node.name() == ACCUMULATE_GRAD else ():
            if gradient := self._allocations.get(self._storage_key(tensor)):
                # It is temporary before `fully_shard` reduces it.
                gradient.category = "temporary" if self._shards.is_whole(node.variable) else "gradient"
                gradient.module = self._module_of_param.get(id(node.variable), gradient.module)
        return result

    def _module_and_line(self, node: Any) -> tuple[str, str]:
        """Return module and line of an operation, or in backward those of the forward operation."""
        if node is not None and not self._modules and (made := self._forward_places.get(sequence_number(node))):
            return made
        here = self._modules[-1] if self._modules else "", self._user_lines.line()
        if node is None or self._modules:
            self._forward_places.setdefault(newest_sequence_number(), here)
        return here

    def _follow_gathered(self) -> None:
        """Record what `fully_shard` has gathered or freed since the last operation: it resizes storages."""
        for tensor in self._shards.newly_gathered():
            self._categorize(tensor, "temporary")
            self._update_size(tensor)

    def _add_untracked(self, new: list[Allocation], module: str, line: str) -> None:
        """Record what an operation took beyond the allocations of its results, which are `new`."""
        kept, passing = self._untracked.end_operation(self._timeline.level)
        if new and 0 < kept <= SMALL:  # the remainder of a large block that the allocator did not split
            self._timeline.resize(max(new, key=lambda allocation: allocation.bytes), kept)
        else:
            self._timeline.resize(self._libraries, kept)
        workspace = Allocation(0, self._phase, module, line, category="temporary")
        self._timeline.resize(workspace, passing)
        self._timeline.resize(workspace, -workspace.bytes)

    # --------------------------------------------------------------------------------------------------- categories

    def _categorize_state(self) -> None:
        """Find the storages that are parameters, gradients and optimizer state now."""
        for name, module in () if self._model is None else self._model.named_modules():
            params, buffers, _ = module_tables(module)
            for key in (key for key, tensor in {**params, **buffers}.items() if is_lazy(tensor)):
                raise uninitialized("debug.memory", f"model.{name}.{key}" if name else f"model.{key}")
            for param in (param for param in params.values() if param is not None):
                self._module_of_param.setdefault(id(param), name)
                self._categorize_parameter(param, name)
            for buffer in (buffer for buffer in buffers.values() if buffer is not None):
                self._categorize(buffer, "parameter", name)
        for optimizer in self._optimizers:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                name = self._module_of_param.get(id(param), "")
                self._categorize_parameter(param, name)
                kept = tensors_in(dict(optimizer.state.get(param, {})))
                for tensor in kept:  # grows below
                    kept += inner_tensors(tensor).values()
                    self._categorize(tensor, "optimizer state", name)

    def _categorize_parameter(self, param: Tensor, module: str) -> None:
        self._categorize(param, "parameter", module)
        if param.grad is not None:
            self._categorize(param.grad, "gradient", module)

    def _categorize_activations(self) -> None:
        """Make what forward made, and what is still there, activations unless they have a category."""
        for allocation in self._allocations.values():
            if allocation.phase == "forward":
                allocation.category = allocation.category or "activation"

    def _categorize(self, tensor: Tensor, category: str, module: str = "") -> None:
        """Give a storage a category. One that is new to the tracker was there before."""
        for held in _held_in(tensor):
            key = self._storage_key(held)
            if not key:
                continue
            if allocation := self._allocations.get(key):
                if category != "input" and allocation.category != "parameter":
                    allocation.category, allocation.module = category, module or allocation.module
            elif not self._untracked.in_pool(held):
                allocation = self._track(key, held, Allocation(0, "", module, category=category))
                self._timeline.add_existing(allocation, self._allocator.allocate(key, allocation.requested))

    # ----------------------------------------------------------------------------------------------------- storages

    def _storage_key(self, tensor: Tensor) -> int:
        """Return a number that identifies a tensor's storage while it is alive; 0 for none or on another device."""
        if tensor.device != self._device or inner_tensors(tensor):  # these have the memory
            return 0
        storage = storage_of(tensor)
        # The weak reference that `_track` takes makes a storage keep its Python object, and so this id.
        return 0 if storage is None else id(storage)

    def _add_new(self, tensor: Tensor, module: str, line: str, is_forward: bool) -> Allocation | None:
        """Record a storage that an operation has made; return None if it is known, or not to be recorded."""
        key = self._storage_key(tensor)
        if not key or key in self._allocations or self._untracked.in_pool(tensor):
            return None
        if is_forward:
            self._begin_phase("forward")
        allocation = self._track(key, tensor, Allocation(0, self._phase, module, line))
        if self._modules and self._phase == "backward":
            allocation.phase = "recomputation"
            self._recomputed.append(allocation)
        self._timeline.resize(allocation, self._allocator.allocate(key, allocation.requested))
        return allocation

    def _track(self, key: int, tensor: Tensor, allocation: Allocation) -> Allocation:
        """Follow a storage until it is freed."""
        tensor = local_shard(tensor)
        storage = tensor.untyped_storage()
        allocation.shape, allocation.dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        allocation.requested = storage.nbytes()
        self._allocations[key] = allocation
        self._references[key] = weakref.ref(storage, partial(self._on_free, key))
        return allocation

    def _on_free(self, key: int, reference: object) -> None:
        self._references.pop(key, None)
        if allocation := self._allocations.pop(key, None):
            self._allocator.free(key)
            self._timeline.resize(allocation, -allocation.bytes)

    def _update_size(self, tensor: Tensor) -> None:
        """Record that an operation has resized a storage."""
        key = self._storage_key(tensor)
        allocation = self._allocations.get(key)
        if allocation and allocation.requested != (size := local_shard(tensor).untyped_storage().nbytes()):
            allocation.requested = size
            self._allocator.free(key)
            self._timeline.resize(allocation, self._allocator.allocate(key, size) - allocation.bytes)


def _held_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree. One that is made of others (torchao's float8) has no memory of its own."""
    found: list[Tensor] = []
    for tensor in tensors_in(tree):
        made_of_others: Any = tensor if hasattr(local_shard(tensor), "__tensor_flatten__") else None
        if made_of_others is None:
            found.append(tensor)
        else:
            found += _held_in([getattr(made_of_others, name) for name in made_of_others.__tensor_flatten__()[0]])
    return found
