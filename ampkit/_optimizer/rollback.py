"""What an optimizer's step changes, learned from eager steps, so that a skipped step can be undone on the device."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._text import CONSTANTS
from .._torch.tensors.modes import WatchingMode
from .._torch.tensors.operators import INDEXING, all_written, kind_of, written_arguments
from .._torch.tensors.tensors import inner_tensors, is_wrapper, storage_address
from .._torch.tensors.tree import tensors_in
from .._user_line import compiler_runs, wraps_operations
from .step_kind import gradients, parameters

wraps_operations(__file__)

# The attributes, keys and indices that lead from the optimizer to a value. For a key that is a parameter, its id.
_Path = tuple[Any, ...]


@dataclass(eq=False)
class StepChanges:
    """Which tensors an optimizer's step changes, for a step whose code is not torch.optim's.

    These are all tensors in the optimizer's attributes, state and param groups, and every other tensor that a watched
    step was seen to change. Restoring them undoes the step if it reads no tensor on the host, changes no number there,
    binds no new tensor or memory, and draws no random number. A step that does any of this is not undone. A step that
    creates state tells nothing about the next one, which changes that state, so another step is watched.
    """

    incomplete: str = ""  # why a step cannot be undone, in words that follow the optimizer's name
    only_draws: bool = False  # whether that is because it draws from a generator of the device, which a graph can do
    wanted: bool = False  # whether steps are to be watched even if no scaler has to undo any of them
    _settled: "_StepSignature | None" = None
    _seen: set[_Path] = field(default_factory=set)
    _others: list[Tensor] = field(default_factory=list)
    _watched: int = 0  # how many steps in a row were watched

    def known(self, optimizer: Optimizer) -> list[Tensor] | None:
        """Return every tensor that the next step may change, or None if it must be watched, or cannot be undone."""
        if self._settled is None or (self.incomplete and not self.only_draws):
            return None
        reached = Reachable(optimizer)
        now = _StepSignature.of(optimizer, reached)
        if not self._settled.covers(now):
            return None
        self._watched = 0
        changed = [*reached.changeable(now.with_gradient, self._seen), *self._others]
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in {id(tensor): tensor.detach() for tensor in changed if tensor.numel()}.values():
            by_storage.setdefault(storage_address(tensor), []).append(tensor)
        covering: list[Tensor] = []  # the same memory, but no byte twice: a shared one would be restored twice
        for tensor, *others in by_storage.values():
            first, last = _range(tensor)
            if not others and last - first == tensor.numel() * tensor.element_size():  # it has no gaps
                covering.append(tensor)
                continue
            covering.append(_whole(tensor))
        return covering

    def watch(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call `step`, which steps the optimizer, learn what that changes, and return what it returned."""
        if self.incomplete and not self.only_draws:
            return step()
        before = Reachable(optimizer)
        with _StepWatch({param.device for param in parameters(optimizer)}) as watch:
            result = step()
        after = Reachable(optimizer)
        self._watched += 1
        in_gradients = set(map(storage_address, gradients(optimizer)))
        kept = in_gradients.union(map(storage_address, tensors_in([result, *after.tensors.values()])))
        created = (reference() for reference in watch.created)
        elsewhere = any(tensor is not None and storage_address(tensor) not in kept for tensor in created)
        grew = before.tensors.keys() != after.tensors.keys() or before.numbers.keys() != after.numbers.keys()
        problem = (
            ("" if grew else watch.beyond)
            or before.changed_to(after)
            or after.why_not_undone(optimizer, [] if grew else watch.written)
            or ("keeps a tensor that it makes outside of its state" if elsewhere else "")
        )
        self.only_draws = bool(watch.draws) and not problem
        self.incomplete = problem or watch.draws
        written = [tensor for tensor in watch.written if storage_address(tensor) not in in_gradients]
        storages = set(map(storage_address, written))
        self._seen |= {path for path, tensor in after.tensors.items() if storage_address(tensor) in storages}
        known = {id(tensor) for tensor in (*after.tensors.values(), *self._others)}
        self._others += [tensor for tensor in written if id(tensor) not in known and not after.contain(tensor)]
        if not grew and not problem:
            self._settled = _StepSignature.of(optimizer, after)
        if self._watched > _PATIENCE:
            self.incomplete = "has other entries in its state or options in each step"
        return result


_PATIENCE = 4  # watched steps in a row; as a rule the first one creates state, and the second shows what a step changes
# Attributes that do not decide what a step does: torch keeps them in the optimizer, or ampkit sets them for a step.
_OF_TORCH = frozenset(
    {
        "_need_device_dtype_check_for_fused",
        "_opt_called",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
        "defaults",
        "found_inf",
        "grad_scale",
        "step",
    }
)
_RATES = ("lr", "initial_lr")  # schedulers change them between steps
_OPAQUE = (Tensor, nn.Module, ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)
_DEPTH = 8  # how long a path may be to look into a container
_DEPTH_OF_OBJECTS = 2  # or into an object; a few attributes further, everything in the program can be reached


class Reachable:
    """Everything that can be reached from an optimizer, by path: tensors, and values on the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.tensors: dict[_Path, Tensor] = {}
        self.places: dict[_Path, Any] = {}  # where in memory each tensor lies, which `.data =` and `set_` change
        self.numbers: dict[_Path, Any] = {}  # other values, in a form that can be compared with those of a later step
        self._seen: set[int] = {id(optimizer)}
        for name, value in list(vars(optimizer).items()):
            if name not in _OF_TORCH and not name.endswith("_hooks"):
                self._walk((name,), value)

    def _walk(self, path: _Path, value: Any) -> None:
        if isinstance(value, Tensor):
            if path[0] == "state" and inner_tensors(value):
                self.numbers[path] = type(value)
                for name, child in list(vars(value).items()):
                    self._walk((*path, name), child)
                return
            self.tensors[path] = value
            if value.layout is torch.strided:
                self.places[path] = (storage_address(value), value.storage_offset(), value.shape, value.stride())
            return
        below: Iterable[tuple[Any, Any]] | None = None  # keys and values of a container, or attributes
        if isinstance(value, Mapping) and len(path) <= _DEPTH:
            below = list(value.items())
        elif isinstance(value, (list, tuple, deque)) and len(path) <= _DEPTH:
            below = list(enumerate(value))
        elif not isinstance(value, _OPAQUE) and hasattr(value, "__dict__") and len(path) <= _DEPTH_OF_OBJECTS:
            below = list(vars(value).items())
        if below is None:
            self.numbers[path] = repr(value) if type(value) in CONSTANTS else _SameObject(value)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self.numbers[path] = type(value)
            for key, child in below:
                self._walk((*path, id(key) if isinstance(key, Tensor) else key), child)

    def changed_to(self, after: "Reachable") -> str:
        """Return in words what the step did between the two that restoring tensors would not undo; "" if nothing."""
        for path, number in self.numbers.items():
            if path in after.numbers and after.numbers[path] != number:
                return f"changes {_text(path)} on the host"
        for path, tensor in self.tensors.items():
            if after.tensors.get(path) is not tensor:
                return f"puts a new tensor in the place of {_text(path)}, instead of changing it in place"
            if after.places.get(path) != self.places.get(path):
                return f"gives {_text(path)} other memory (.data = ...), instead of changing it in place"
        return "removes what it kept" if self.numbers.keys() - after.numbers.keys() else ""

    def why_not_undone(self, optimizer: Optimizer, written: list[Tensor]) -> str:
        """Return why one of the tensors cannot be restored on the device, "" if each of them can."""
        devices = {param.device for param in parameters(optimizer)}
        if any(tensor.device.type == "cpu" and tensor.device not in devices for tensor in written):
            return "changes tensors on the host"
        for path, tensor in self.tensors.items():
            if tensor.layout is not torch.strided or is_wrapper(tensor):
                return f"keeps a {type(tensor).__name__} of layout {tensor.layout} in {_text(path)}"
        return ""

    def changeable(self, with_gradient: frozenset[int], seen: set[_Path]) -> Iterator[Tensor]:
        """Yield what a step may change: a parameter without gradient, and its state, only if a watched step did so."""
        devices = {tensor.device for tensor in self.tensors.values() if id(tensor) in with_gradient}
        without = {id(t) for p, t in self.tensors.items() if "params" in p[2:3] and id(t) not in with_gradient}
        for path, tensor in self.tensors.items():
            idle = id(tensor) in without or (path[0] == "state" and path[1] in without) or path[-1] in _RATES
            if path in seen or (not idle and tensor.device in devices):
                yield tensor

    def contain(self, tensor: Tensor) -> bool:
        """Return whether a tensor is part of a tensor that was reached, which is restored as a whole."""
        first, last = _range(tensor)
        return any(
            storage_address(whole) == storage_address(tensor)
            and whole.is_contiguous()
            and _range(whole)[0] <= first
            and last <= _range(whole)[1]
            for whole in self.tensors.values()
        )


class _StepSignature(NamedTuple):
    """What decides which code a step runs. As long as it stays the same, a step does what the watched one did."""

    paths: frozenset[_Path]
    numbers: Mapping[_Path, Any]
    with_gradient: frozenset[int]

    @classmethod
    def of(cls, optimizer: Optimizer, reached: Reachable) -> "_StepSignature":
        """Return the signature of the next step."""
        paths = frozenset(path for path in reached.tensors if path[-1] not in _RATES)
        numbers = {path: number for path, number in reached.numbers.items() if path[-1] not in _RATES}
        return cls(paths, numbers, frozenset(id(param) for param in parameters(optimizer) if param.grad is not None))

    def covers(self, now: "_StepSignature") -> bool:
        """Return whether a step now does what the watched one did, for some or all of its parameters."""
        return self.paths == now.paths and self.numbers == now.numbers and self.with_gradient >= now.with_gradient


@dataclass(eq=False)
class _SameObject:
    """Stands for an object. It is equal to another one if they stand for the same object, which it keeps alive."""

    _value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]  # never a key


class _StepWatch(WatchingMode):
    """Context that notes which tensors a step changes, which ones it creates, and what else it does.

    Args:
        devices: of the parameters.
    """

    def __init__(self, devices: set[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._devices = devices
        self.draws = ""  # in words, that it draws from the default generator of a device; "" if it does not
        self.written: list[Tensor] = []  # from before the step; or the views of them that it changed
        self.beyond = ""  # in words, what the step did besides changing tensors on the device
        self._new: set[int] = set()  # the addresses of the memory that the step allocated
        self.created: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what it does."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if any(map(inner_tensors, given)):
            return NotImplemented  # its class calls operations on the tensors in it, which come here
        written = written_arguments(op, args, kwargs) if hasattr(op, "overloadpacket") else iter(given)
        self.written += [tensor for tensor in written if storage_address(tensor) not in self._new]
        result = op(*args, **kwargs)
        returned = tensors_in(result)
        known = {storage_address(tensor) for tensor in given}
        new = [tensor for tensor in returned if storage_address(tensor) not in known]
        self._new.update(map(storage_address, new))
        if compiler_runs():  # it draws what it times kernels with, copies what they write to the host, keeps constants
            return result
        self.created += map(weakref.ref, new)
        tags = getattr(op, "tags", ())
        fetches = any(t.device.type != "cpu" for t in given) and any(t.device.type == "cpu" for t in returned)
        if torch.Tag.nondeterministic_seeded in tags:
            text = f"draws random numbers ({op}), which later draws would show"
            if {tensor.device for tensor in returned} <= self._devices and kwargs.get("generator") is None:
                self.draws = self.draws or text
            else:
                self.beyond = self.beyond or text
        elif not self.beyond:
            reads = fetches or torch.Tag.data_dependent_output in tags
            reads = reads or (torch.Tag.dynamic_output_shape in tags and not _selects_by_integers(op, args))
            self.beyond = f"reads a tensor on the host ({op})" if reads else ""
        return result


def _selects_by_integers(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether this is `x[codes]` with integers on the device of x, whose result has their shape."""
    if kind_of(op).name not in INDEXING:
        return False
    indices = tensors_in(args[1])
    return all(each.dtype in (torch.int32, torch.int64) and each.device == args[0].device for each in indices)


class WrittenBackup(WatchingMode):
    """Context that copies memory from before it in front of the first operation that writes to it.

    Args:
        left_out: tensors that need not be put back.
    """

    def __init__(self, left_out: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._known = set(map(storage_address, left_out))  # addresses of memory that is new, saved or left out
        self._saved: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Save what an operation writes to, and run it."""
        kwargs = kwargs or {}
        for tensor in all_written(op, args, kwargs) if hasattr(op, "overloadpacket") else ():
            if (address := storage_address(tensor)) not in self._known:
                self._known.add(address)
                whole = _whole(tensor)
                self._saved.append((whole, whole.clone()))
        result = op(*args, **kwargs)
        given = set(map(storage_address, tensors_in((args, kwargs))))
        self._known |= set(map(storage_address, tensors_in(result))) - given
        return result

    def put_back(self, where: Tensor) -> None:
        """Give all that was written the bits from before if `where` (shape ()) is above 0. Sync: none."""
        for tensor, before in self._saved:
            tensor.copy_(torch.where(where.to(tensor.device, non_blocking=True) > 0, before, tensor))


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of the memory that a tensor lies in, as integers."""
    storage = tensor.untyped_storage()
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.int8
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)


def _text(path: _Path) -> str:
    if path[0] == "state" and len(path) > 2:
        return f"state[parameter]{''.join(f'[{key!r}]' for key in path[2:])}"
    return f"its {path[0]}{''.join(f'[{key!r}]' for key in path[1:])}"


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address behind its last one."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()
