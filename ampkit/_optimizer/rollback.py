"""What a step of an optimizer changes, seen in eager steps: one that must be skipped is then undone on the device."""

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch.modes import TorchDispatchMode
from .._torch.operators import written_arguments
from .._torch.tensors import is_wrapper, storage_address
from .._torch.tree import tensors_in

_Path = tuple[Any, ...]  # of attributes, keys and indices below the optimizer; a parameter that is a key as its id


class StepChanges:
    """What is known of the tensors that an optimizer's step changes, for a step whose code is not torch.optim's.

    Undone is every tensor that is found in the optimizer's attributes, state and param groups, and every other one that
    a watched step was seen to change. That is complete if the step reads no tensor on the host, changes no number
    there, binds no new tensor or memory, and draws no random number: a step that does is not undone. A step that makes
    state says nothing of the next one, which changes it, so another is watched.

    Attributes:
        incomplete: why a step cannot be undone, in words that follow the optimizer's name; "" if it can, as far as is
            known.
    """

    def __init__(self) -> None:
        self.incomplete = ""
        self._settled: _StepSignature | None = None
        self._seen: set[_Path] = set()
        self._others: list[Tensor] = []
        self._watched = 0  # steps in a row

    def known(self, optimizer: Optimizer) -> list[Tensor] | None:
        """Return every tensor that the next step may change, or None if that is not known."""
        if self.incomplete or self._settled is None:
            return None
        found = _Found(optimizer)
        if not self._settled.covers(_StepSignature.of(optimizer, found)):
            return None
        self._watched = 0
        with_gradient = _with_gradient(optimizer)
        return _without_overlap([*found.changeable(with_gradient, self._seen), *self._others])

    def watch(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Step the optimizer with these arguments, learn what that changes, and return what it returned."""
        if self.incomplete:
            return optimizer.step(*args, **kwargs)
        before = _Found(optimizer)
        with _StepWatch() as watch:
            result: Any = optimizer.step(*args, **kwargs)
        after = _Found(optimizer)
        self._watched += 1
        gradients = {storage_address(param.grad) for param in _parameters(optimizer) if param.grad is not None}
        kept = [result, *after.tensors.values()]
        self.incomplete = (
            watch.beyond
            or before.changed_to(after)
            or after.why_not_undone(optimizer, watch.written)
            or watch.escaped({storage_address(tensor) for tensor in tensors_in(kept)} | gradients)
        )
        written = [tensor for tensor in watch.written if storage_address(tensor) not in gradients]
        self._seen |= after.paths_of(written)
        known = {id(tensor) for tensor in (*after.tensors.values(), *self._others)}
        self._others += [tensor for tensor in written if id(tensor) not in known and not after.contain(tensor)]
        grew = before.tensors.keys() != after.tensors.keys() or before.numbers.keys() != after.numbers.keys()
        if not grew and not self.incomplete:
            self._settled = _StepSignature.of(optimizer, after)
        if self._watched > _PATIENCE:
            self.incomplete = "has another layout of state or options in each step"
        return result


_PATIENCE = 4  # watched steps in a row: the first makes state, the second is to settle it
# What torch keeps in an optimizer and its steps change without a meaning for the next, and what ampkit hands to it.
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
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (Tensor, nn.Module, ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)
_DEPTH = 8  # of containers; of objects 2, for behind a few attributes lies the whole program
_DEPTH_OF_OBJECTS = 2


class _Found:
    """Everything that is found below an optimizer: tensors, and what is on the host, by path."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.tensors: dict[_Path, Tensor] = {}
        self.places: dict[_Path, Any] = {}  # of the tensors: what `.data =` and `set_` change
        self.numbers: dict[_Path, Any] = {}
        self._seen: set[int] = {id(optimizer)}
        for name, value in list(vars(optimizer).items()):
            if name not in _OF_TORCH and not name.endswith("_hooks"):
                self._walk((name,), value)

    def _walk(self, path: _Path, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors[path] = value
            if value.layout is torch.strided:
                self.places[path] = (storage_address(value), value.storage_offset(), value.shape, value.stride())
            return
        below = _children(value, len(path))
        if below is None:
            self.numbers[path] = repr(value) if type(value) in _NUMBERS else _Same(value)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self.numbers[path] = type(value)
            for key, child in below:
                self._walk((*path, id(key) if isinstance(key, Tensor) else key), child)

    def changed_to(self, after: "_Found") -> str:
        """Return what the step did, in words, that undoing tensors does not undo; "" if nothing."""
        for path, number in self.numbers.items():
            if path in after.numbers and after.numbers[path] != number:
                return f"changes {_text(path)} on the host"
        for path, tensor in self.tensors.items():
            if after.tensors.get(path) is not tensor:
                return f"binds another tensor to {_text(path)}, where it could change the one that is there"
            if after.places.get(path) != self.places.get(path):
                return f"gives {_text(path)} other memory (.data = ...), where it could change what is there"
        return "removes what it kept" if self.numbers.keys() - after.numbers.keys() else ""

    def why_not_undone(self, optimizer: Optimizer, written: list[Tensor]) -> str:
        """Return why arithmetic on the device does not reach one of these tensors, "" if it reaches all."""
        devices = {param.device for param in _parameters(optimizer)}
        if any(tensor.device.type == "cpu" and tensor.device not in devices for tensor in written):
            return "changes tensors on the host"
        for path, tensor in self.tensors.items():
            if tensor.layout is not torch.strided or is_wrapper(tensor):
                return f"keeps a {type(tensor).__name__} of layout {tensor.layout} in {_text(path)}"
        return ""

    def changeable(self, with_gradient: frozenset[int], seen: set[_Path]) -> Iterator[Tensor]:
        """Yield the tensors that a step may change: of parameters without gradient only those that were seen to be."""
        device = {tensor.device for tensor in self.tensors.values() if id(tensor) in with_gradient}
        without = {id(t) for p, t in self.tensors.items() if "params" in p[2:3] and id(t) not in with_gradient}
        for path, tensor in self.tensors.items():
            idle = id(tensor) in without or (path[0] == "state" and path[1] in without) or path[-1] in _RATES
            if path in seen or (not idle and tensor.device in device):
                yield tensor

    def paths_of(self, written: list[Tensor]) -> set[_Path]:
        """Return where tensors lie that share memory with one of these."""
        storages = {storage_address(tensor) for tensor in written}
        return {path for path, tensor in self.tensors.items() if storage_address(tensor) in storages}

    def contain(self, tensor: Tensor) -> bool:
        """Return whether a tensor is part of one of these, which is undone as a whole."""
        first, last = _range(tensor)
        return any(
            storage_address(whole) == storage_address(tensor)
            and whole.is_contiguous()
            and _range(whole)[0] <= first
            and last <= _range(whole)[1]
            for whole in self.tensors.values()
        )


class _StepSignature(NamedTuple):
    """What decides which code a step runs. A step is as the watched one while this is."""

    paths: frozenset[_Path]
    numbers: Mapping[_Path, Any]
    with_gradient: frozenset[int]

    @classmethod
    def of(cls, optimizer: Optimizer, found: _Found) -> "_StepSignature":
        """Return the layout of what was found."""
        paths = frozenset(path for path in found.tensors if path[-1] not in _RATES)
        numbers = {path: number for path, number in found.numbers.items() if path[-1] not in _RATES}
        return cls(paths, numbers, _with_gradient(optimizer))

    def covers(self, now: "_StepSignature") -> bool:
        """Return whether a step now does what the watched one did, for some or all of its parameters."""
        return self.paths == now.paths and self.numbers == now.numbers and self.with_gradient >= now.with_gradient


class _Same:
    """Compares by identity, and keeps what it compares alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]  # never a key


class _StepWatch(TorchDispatchMode):
    """Context that notes which tensors are changed, which are made, and what else a step does.

    Attributes:
        written: tensors from before that were changed, as they were passed: views of them too.
        beyond: what the step did, in words, beside changing tensors on the device; "" if nothing.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is; else torch.compile runs it eagerly, and never compiles what is new here."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self.written: list[Tensor] = []
        self.beyond = ""
        self._new: set[int] = set()  # where the memory of tensors starts that were made here
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what it does."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        written = written_arguments(op, args, kwargs) if hasattr(op, "overloadpacket") else iter(given)
        self.written += [tensor for tensor in written if storage_address(tensor) not in self._new]
        result = op(*args, **kwargs)
        made = tensors_in(result)
        if not self.beyond:
            self.beyond = _beyond_tensors(op, given, made)
        known = {storage_address(tensor) for tensor in given}
        for tensor in made:
            if (address := storage_address(tensor)) not in known:
                self._new.add(address)
                self._made.append(weakref.ref(tensor))
        return result

    def escaped(self, kept: set[int]) -> str:
        """Return that a tensor which was made here is alive elsewhere than in the memory at these addresses, or ""."""
        alive = [tensor for reference in self._made if (tensor := reference()) is not None]
        if any(storage_address(tensor) not in kept for tensor in alive):
            return "keeps a tensor that it makes outside of its state"
        return ""


def _beyond_tensors(op: Any, given: list[Tensor], made: list[Tensor]) -> str:
    tags = getattr(op, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return f"draws random numbers ({op}), which later draws would show"
    fetches = any(t.device.type != "cpu" for t in given) and any(t.device.type == "cpu" for t in made)
    if fetches or torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return f"reads a tensor on the host ({op})"
    return ""


def _children(value: Any, depth: int) -> Iterator[tuple[Any, Any]] | None:
    """Return what a container or a plain object holds, by key; None for what holds nothing that is looked at."""
    if isinstance(value, Mapping) and depth <= _DEPTH:
        return iter(list(value.items()))
    if isinstance(value, (list, tuple, deque)) and depth <= _DEPTH:
        return iter(list(enumerate(value)))
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__") or depth > _DEPTH_OF_OBJECTS:
        return None
    return iter(list(vars(value).items()))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _with_gradient(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(param) for param in _parameters(optimizer) if param.grad is not None)


def _text(path: _Path) -> str:
    if path[0] == "state" and len(path) > 2:
        return f"state[parameter]{''.join(f'[{key!r}]' for key in path[2:])}"
    return f"its {path[0]}{''.join(f'[{key!r}]' for key in path[1:])}"


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor's elements, and the first behind them."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()


def _without_overlap(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors over the same memory, of which no two share a byte: arithmetic would undo that byte twice."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in {id(tensor): tensor.detach() for tensor in tensors if tensor.numel()}.values():
        by_storage.setdefault(storage_address(tensor), []).append(tensor)
    return [group[0] if _is_apart(group) else _whole(group[0]) for group in by_storage.values()]


def _is_apart(group: list[Tensor]) -> bool:
    return len(group) == 1 and _range(group[0])[1] - _range(group[0])[0] == group[0].numel() * group[0].element_size()


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole memory that a tensor is a part of, as integers."""
    storage = tensor.untyped_storage()
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.int8
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)
