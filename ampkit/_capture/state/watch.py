"""What every call looks at to see whether the training state is as it was: it compares, and builds nothing."""

import copy
import ctypes
import gc
import operator
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from types import MethodType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..._optimizer.param_groups import CapturableGroups
from ..._torch.device.rnn_dropout import RnnDropout
from ..._torch.optimizers import HOOKS_OF_ALL, hooks_of_one, step_hooks
from ..._torch.tensors.modes import (
    DeviceContext,
    function_mode_count,
    function_modes,
    is_any_autocast_enabled,
    saved_tensors_hooks,
    without_torch_function,
)
from ..._torch.tensors.modules import hooks_made, is_of_torch, tables_with_hooks
from ..._torch.tensors.settings import ENUM_READERS, PLAIN_READERS
from ..._torch.tensors.tensors import inner_tensors, layout_check, local_shard
from ..host.constants import getter, place_of, tells_its_size
from ..host.host_tensors import HostTensors
from ..host.left_tensors import LeftTensors
from ..host.reads import Reads
from .walk import Walk, requires_grad, take_in_parameters

_G = TypeVar("_G")


class Scaler(Protocol):
    """What training state asks of a gradient scaler."""

    def is_enabled(self) -> bool:
        """Return whether it scales at all."""

    def rule(self) -> dict[str, Any]:
        """Return the host values that decide how the scale moves, by name."""

    def tensors(self) -> dict[str, Tensor]:
        """Return scale and counters by name, {} before they are made."""

    def is_undecided(self) -> bool:
        """Return whether the last step waited for the device as later ones will not."""


class Look:
    """What one call has seen of the state, and how the next call sees whether anything is different.

    Everything that has an identity is in one tuple of objects: modules, tensors, flags, types, param groups and their
    entries. It is compared with that of the next call by addresses, in one call of C. If a hyperparameter is another
    object of the same value, the state is read anew, which compares the values.

    Args:
        walk: the modules.
        state: what is looked at. It is not kept, for it keeps the look.
        bare: parameters that have no gradient.

    Attributes:
        held: whether graphs hold all numbers of the optimizers as constants, but for what they follow.
        tensors: those outside of the modules' parameters and buffers that are compared.
        dropout_begun: how often cuDNN's dropout has begun anew.
        followed: the entries of a param group whose changes graphs follow.
        addresses, layouts: of parameters and buffers.
        gradients: addresses of gradients, [] if there are none.
        hooks: those of modules, parameters and buffers, behind the table that has them.
        reads, host_values: what is compared of attributes and variables, and of tensors on the host.
        kept: what the optimizers keep of each parameter.
    """

    def __init__(self, walk: Walk, state: "StateWatch[Any]", bare: Sequence[Tensor]) -> None:
        self.walk, self.optimizers, self.scaler, self.held = walk, state.optimizers, state.scaler, state.held
        self._compares_gradients, self._bare, self._sees_hooks = state.compares_gradients, bare, state.sees_hooks
        self._host_tensors, self._rnn_dropout = state.host_tensors, state.rnn_dropout
        self.dropout_begun = self._rnn_dropout.times
        self._with_hooks = [(optimizer, hooks_of_one(optimizer)) for optimizer in self.optimizers]
        self.followed = ("initial_lr",) if state.holds_rates else ("lr", "initial_lr")
        self.layouts = walk.layouts()
        # One call of C in place of several per tensor. It sees no `requires_grad` where gradients are off, and of
        # DTensors it is given the parts.
        self._has_layouts = layout_check(walk.local())
        is_seen = self._has_layouts is not None and torch.is_grad_enabled() and not walk.is_split
        # Torch refuses `requires_grad` for integers, such as the counters of batch norm.
        self._differentiable = [] if is_seen else [t for t in walk.tensors if t.is_floating_point() or t.is_complex()]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        # Each with what reads the entries that a graph cannot follow.
        self._groups = [(group, getter([key for key in group if key not in self.followed])) for group in groups]
        # The params are a list, and betas out of a JSON file, too. What is in them may change in place.
        lists = [value for group in groups for value in group.values() if type(value) is list]
        # What the optimizers keep of each parameter, which someone may replace to begin anew.
        self.kept = [table for each in self.optimizers for table in each.state.values() if type(table) is dict]
        self.kept += [value.__dict__ for table in self.kept for value in table.values() if inner_tensors(value)]
        self._tables: tuple[Any, ...] = (
            *walk.tables,
            *[part for optimizer in self.optimizers for part in (optimizer.state, optimizer.param_groups)],
            *self.kept,
            *lists,
        )
        self._hooks_made = hooks_made()
        hooks = tables_with_hooks(walk.modules, walk.tensors) if state.sees_hooks else []
        self.hooks = _with_contents(hooks)
        self._tables += tuple(hooks)  # so that hooks that are removed are noticed
        reading = state.reads.look(walk.modules, walk.paths)
        self.reads, self._readers = reading.values, (reading.readers, reading.read)
        self._tables += tuple(reading.cells)
        self._classed, self._functions = reading.objects, reading.functions
        self.tensors, self._places = reading.tensors, list(map(place_of, reading.tensors))
        self._lists: list[Any] = [*lists, *[table for table in reading.tables if tells_its_size(type(table))]]
        self._lengths = list(map(len, self._lists))
        self._read_numbers()
        self.host_values = self._host_tensors.values()
        self._host_bytes = list(self.host_values.found.values())
        self.addresses = walk.addresses()
        self.gradients = gradient_addresses(walk.tensors) if state.compares_gradients else []
        self._settings = self._read_settings()

    def with_numbers(self) -> "Look | None":
        """Return the same with other numbers of the optimizers. None if there is something else that is different."""
        try:
            entries = list(chain.from_iterable(frozen(group) for group, frozen in self._groups))
        except KeyError:
            return None
        changed = [now for now, old in zip(reversed(entries), reversed(self._objects), strict=False) if now is not old]
        if not _PLAIN.issuperset(map(type, changed)) or not self.is_current(but_last=len(entries)):
            return None
        now = copy.copy(self)
        now._read_numbers()
        return now

    def _read_numbers(self) -> None:
        self._objects = self._read_objects()  # kept, so that no other object gets the same identity
        self._read_identities = _pointers_of(len(self._objects)) if _READS_TUPLES else _ids
        self._identities = self._read_identities(self._objects)

    def is_current(self, *, but_last: int = 0) -> bool:
        """Return whether the state is still what was seen.

        Args:
            but_last: how many entries of param groups are left out, which are the last objects.
        """
        end = -_POINTER * but_last or None
        try:
            objects = self._read_objects()
            local = self.walk.local() if self.walk.is_split else self.walk.tensors
        except (KeyError, IndexError):  # an entry of a param group, an attribute, or what a variable leads to, is gone
            return False
        return (
            len(objects) == len(self._objects)
            and self._read_identities(objects)[:end] == self._identities[:end]
            and list(map(Tensor.data_ptr, local)) == self.addresses
            and list(map(place_of, self.tensors)) == self._places
            and (self.walk.layouts() == self.layouts if self._has_layouts is None else self._has_layouts(*local))
            and (hooks_made() == self._hooks_made or self._hooks_are_same())
            and self._read_settings() == self._settings
            and self._rnn_dropout.times == self.dropout_begun
            and list(map(len, self._lists)) == self._lengths
            and (not self._host_bytes or self._host_tensors.bytes_now() == self._host_bytes)
            and (not self._compares_gradients or gradient_addresses(self.walk.tensors) == self.gradients)
            and not gradients(self._bare)
        )

    def _hooks_are_same(self) -> bool:
        """Return whether the hooks that were registered since are none of these modules and tensors."""
        if not self._sees_hooks:
            return True
        made = hooks_made()
        hooks = _with_contents(tables_with_hooks(self.walk.modules, self.walk.tensors))
        if len(hooks) != len(self.hooks) or not all(map(operator.is_, hooks, self.hooks)):
            return False
        self._hooks_made = made
        return True

    def _read_settings(self) -> list[Any]:
        return [read() for read in PLAIN_READERS] + [number(read()) for read, number in ENUM_READERS]

    def _read_objects(self) -> tuple[Any, ...]:
        walk = self.walk
        found: list[Any] = gc.get_referents(*self._tables)  # all values of all tables and lists, in one call of C
        found += map(requires_grad, self._differentiable)
        found += walk.training()
        found += map(type, chain(walk.modules, self._classed))
        found += chain.from_iterable(map(_code_and_defaults, self._functions))
        for optimizer, hooks in self._with_hooks:
            found += optimizer.state, optimizer.param_groups
            if any((*HOOKS_OF_ALL, *hooks)):
                found += step_hooks(optimizer)
            if self.held:
                found += own_values(optimizer)
        for group, _ in self._groups:
            found += group
        found += chain.from_iterable(map(_call, *self._readers))
        if function_mode_count():
            modes = function_modes()
            found += map(type, modes)
            found += default_devices(modes)
        if is_any_autocast_enabled():
            found += autocast()
        if saved_tensors_hooks() is not None:
            found += (packs_saved_tensors(),)
        if torch.is_anomaly_enabled():
            found += (torch.is_anomaly_check_nan_enabled(),)
        if self.scaler is not None and self.scaler.is_enabled():
            found += self.scaler.rule().values()
        for group, frozen in self._groups:  # last, see `with_numbers`
            found += frozen(group)
        return tuple(found)


def _with_contents(tables: Sequence[dict[int, Any]]) -> list[Any]:
    """Return the tables, each with its hooks behind it; of a method, which is a new object each time, what makes it."""
    found: list[Any] = []
    for table in tables:
        found.append(table)
        for hook in table.values():
            found += (hook.__self__, hook.__func__) if isinstance(hook, MethodType) else (hook,)
    return found


class StateWatch(Generic[_G]):
    """What `TrainingState` notices when the state is no longer what it was in the call before. It has the arguments.

    Attributes:
        held: whether graphs hold all numbers of the optimizers as constants.
        compares_gradients: whether another gradient in `param.grad` may make a call another one.
        reads: which attributes of the modules and which variables are compared.
        host_tensors: which tensors on the host are compared.
        rnn_dropout: notices when cuDNN's dropout begins anew.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Scaler | None = None,
        *,
        own: dict[str, Tensor] | None = None,
        finds_gradients: bool = False,
        bare: nn.Module | None = None,
        sees_hooks: bool = True,
        rates: Sequence[CapturableGroups] = (),
        holds_rates: bool = False,
        functions: Sequence[Any] = (),
        eager_optimizers: Sequence[torch.optim.Optimizer] = (),
        problem: str = "",
    ) -> None:
        self.modules = modules
        self.optimizers: tuple[torch.optim.Optimizer, ...] = tuple(optimizers)
        self.eager_optimizers: tuple[torch.optim.Optimizer, ...] = tuple(eager_optimizers)
        self.problem = problem
        self.scaler = scaler
        self.own: dict[str, Tensor] = {} if own is None else own
        self.finds_gradients = finds_gradients
        self.sees_hooks = sees_hooks
        self.holds_rates: bool = holds_rates
        self._bare, self._rates, self._functions = bare, rates, tuple(functions)
        self.reads: Reads = Reads(functions)
        self.host_tensors: HostTensors = HostTensors()
        self.rnn_dropout: RnnDropout = RnnDropout()
        self.held: bool = False
        self.compares_gradients: bool = finds_gradients
        self._uses_gradients = False
        self._filled: list[Any] = [_NOT_FILLED]  # the learning rates that the tensors were filled with
        self._walk: Walk | None = None
        self._walked = 0
        self._strangers: list[Tensor] = []  # parameters of the optimizers that are not the model's
        self._seen: tuple[Look, _G] | None = None

    @abstractmethod
    def _described(self, look: Look) -> _G:
        """Return what stands for the state that was looked at."""

    def hold(self, optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[CapturableGroups] = ()) -> None:
        """Take these optimizers for the ones that a step changes, with all their numbers as constants of a graph.

        But `rates`, if there are any, are read from tensors.
        """
        self.optimizers, self._rates, self.held, self.holds_rates = tuple(optimizers), rates, True, not rates
        self.look_again()

    def take_in(self, optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[CapturableGroups]) -> None:
        """Take these optimizers, too, for ones that a step changes. They read their learning rates from tensors."""
        self.optimizers, self._rates = (*self.optimizers, *optimizers), (*self._rates, *rates)
        self.look_again()

    def note_gradients(self, *, used: bool) -> None:
        """Take note of whether a call that is to be captured uses gradients. As long as none does, none is compared."""
        self._uses_gradients |= used
        self.compares_gradients = self.finds_gradients and self._uses_gradients

    def look_again(self) -> None:
        """Have the next generation be another object, so that its user looks at what belongs to it."""
        self._seen = None

    def leave_out(self, function: Any) -> None:
        """Take note that steps do not call this function any more: what only that reads is no part of them."""
        self._functions, before = tuple(each for each in self._functions if each is not function), self.reads
        self.reads = Reads(self._functions)
        self.reads.may_stop, self.reads.some_may_stop = before.may_stop, before.some_may_stop
        self.look_again()

    def held_tensors(self) -> LeftTensors:
        """Return what modules and variables hold now, to be told behind a call what that has left there."""
        modules = [] if self._walk is None else self._walk.modules
        reads, (places, values) = self.reads, self.reads.places_and_values()
        allowed, some = reads.may_stop, reads.some_may_stop
        return LeftTensors(modules, self._functions, places, values, may_stop=allowed, may_grow=some)

    def rates(self) -> list[Tensor]:
        """Return the tensors that optimizers read their learning rates from."""
        return [tensor for rates in self._rates for tensor in rates.tensors()]

    def refresh_rates(self) -> None:
        """Bring the tensors that optimizers read their learning rates from up to date.

        It launches one kernel per rate that changed. Sync: none.
        """
        now = [group.get("lr") for optimizer in self.optimizers for group in optimizer.param_groups]
        # A rate that is a tensor may have been written to. A number that is the same object is unchanged.
        if len(now) == len(self._filled) and all(map(operator.is_, now, self._filled)):
            return
        for rates in self._rates:
            rates.refresh()
        self._filled = now if _NUMBERS.issuperset(map(type, now)) else [_NOT_FILLED]

    def generation(self) -> _G:
        """Return what stands for the present state: the same object as before if nothing has changed since.

        Learning rates, which graphs read from tensors, are brought up to date. Every call does this. Sync: none.
        """
        self.refresh_rates()
        refuse_gradients(self._strangers)
        if self.rnn_dropout.device is not None:
            self.rnn_dropout.look()
        if self._seen is not None and len(self.modules) == self._walked:
            with without_torch_function():
                if self._seen[0].is_current():
                    return self._seen[1]
                if (look := self._seen[0].with_numbers()) is not None:
                    self._seen = look, self._described(look)
                    return self._seen[1]
        self._seen = None
        if self.finds_gradients:
            take_in_parameters(self.modules, self.optimizers, {rates.device for rates in self._rates})
        if self._walk is None or len(self.modules) != self._walked or not self._walk.is_current():
            self._walk, self._walked = Walk(self.modules), len(self.modules)
            self.rnn_dropout.watch(self._walk.modules)
        with without_torch_function():
            bare = [] if self._bare is None else list(self._bare.parameters())
            for param in bare:
                param.grad = None
            self._strangers = [] if self._bare is None else strangers(self.optimizers, self._walk.tensors)
            look = Look(self._walk, self, bare)
            now = self._described(look)
        self._seen = look, now
        return now


# New in Python 3.11, a call of C.
_call: Callable[..., Any] = getattr(operator, "call", lambda function, argument: function(argument))
_gradient: Callable[[Tensor], Tensor | None] = operator.attrgetter("grad")
_code_and_defaults = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def strangers(optimizers: Iterable[torch.optim.Optimizer], known: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of optimizers that are not among the tensors of the modules."""
    ours = set(map(id, known))
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return [param for group in groups for param in group["params"] if id(param) not in ours]


def refuse_gradients(params: Sequence[Tensor]) -> None:
    """Raise a `ValueError` if one of these parameters, which are not the model's, has a gradient."""
    for param in params:
        if param.grad is not None:
            raise ValueError(
                f"graphed_step(optimizer): since the step was made it has got a parameter of shape "
                f"{tuple(param.shape)} that is not the model's, and that has a gradient, which the step would not set "
                "to None. Put it into the model, as an nn.Parameter. No optimizer step was done."
            )


def packs_saved_tensors() -> bool:
    """Return whether hooks around the call pack what autograd saves: those of the user, for others change no bit."""
    hooks = saved_tensors_hooks()
    return hooks is not None and not is_of_torch(hooks[0])


def gradients(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each tensor, [] if none of them has one. No Python code runs for each of them."""
    found = list(map(_gradient, tensors))
    return found if any(map(operator.is_not, found, repeat(None))) else []


def gradient_addresses(tensors: list[Tensor]) -> list[int]:
    """Return [] if there is no gradient, else an address per tensor, 0 for a tensor without gradient."""
    return [0 if gradient is None else local_shard(gradient).data_ptr() for gradient in gradients(tensors)]


def own_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what the optimizer's attributes and the state of each parameter hold."""
    kept = [value for name, value in vars(optimizer).items() if name not in _OTHERS]
    return [*kept, *chain.from_iterable(map(operator.methodcaller("values"), optimizer.state.values()))]


def default_devices(modes: list[Any]) -> tuple[torch.device, ...]:
    """Return the devices that these function modes have set as default device, the innermost one last."""
    return tuple([mode.device for mode in modes if type(mode) is DeviceContext])


def autocast() -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes of the caller's autocast on CUDA and on the CPU, None where it is off."""
    on_cuda = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return on_cuda, torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


# ---------------------------------------------------------------------------------------------------------- identities


def _ids(objects: tuple[Any, ...]) -> bytes:
    """Return the identities of some objects."""
    return b"".join([id(found).to_bytes(_POINTER, sys.byteorder) for found in objects])


def _pointers_of(count: int) -> Callable[[tuple[Any, ...]], bytes]:
    """Return what does as `_ids` for that many objects, in less time: in CPython a tuple is an array of them."""
    at = (ctypes.c_char * (_POINTER * count)).from_address
    return lambda objects: at(id(objects) + _HEAD).raw


_POINTER = ctypes.sizeof(ctypes.c_void_p)
_HEAD = tuple.__basicsize__  # bytes in front of the items
_TRIED: tuple[tuple[Any, ...], ...] = ((), (None,), (True, _ids, "", 1.5), tuple(map(object.__class__, range(100))))
# Whether `_pointers_of` works in this interpreter. In others than CPython it is not tried.
_READS_TUPLES = sys.implementation.name == "cpython" and all(
    _pointers_of(len(objects))(objects) == _ids(objects) for objects in _TRIED
)
_NOT_FILLED = object()
_NUMBERS = frozenset((float, int, type(None)))
_PLAIN = _NUMBERS | {bool, str, tuple}
# The attributes of an optimizer that are looked at by themselves, or that torch and ampkit set for a step.
_OTHERS = frozenset(("state", "param_groups", "step", "found_inf", "grad_scale", "_opt_called"))
