"""The training state: the tensors that a step may change, and whether a graph may still be replayed on them."""

import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._text import value_text
from .._torch.modes import DeviceContext, UnseenFunctionMode, function_mode_stack, without_torch_function
from .._torch.modules import module_tables
from .._torch.optimizers import HOOKS_OF_ALL, hooks_of_one, step_hooks
from .._torch.settings import SETTINGS, SETTINGS_READERS
from .bound import Bound, cells


class Generation(NamedTuple):
    """What a graph cannot follow when it changes, beside its input. While it is equal, a graph may be replayed."""

    containers: "_Objects"  # optimizer.state, param_groups, their parameters: load_state_dict replaces them
    moments: tuple["_Objects", ...]  # in each optimizer.state: the parameters, and a dict for each
    walk: "_Walk"  # the parameters, buffers and child modules themselves
    addresses: tuple[int, ...]  # of parameters and buffers: `.data =` and module.to() change them
    sizes: tuple[int, ...]  # parameters per param group
    settings: "Settings"

    def replaced_in(self, new: "Generation") -> str:
        """Return in words which memory was replaced in `new`, so that older graphs are outdated; "" if none was."""
        words = (
            ("a param group was added or removed", len(self.sizes), len(new.sizes)),
            ("a parameter was added to a param group, or removed", self.sizes, new.sizes),
            ("the optimizer's state was replaced (load_state_dict)", self.containers, new.containers),
            ("the optimizer's state was cleared or replaced", True, _grew(self.moments, new.moments)),
            (self.walk.first_change(new.walk), self.walk, new.walk),
            ("a parameter or buffer was moved to other memory", self.addresses, new.addresses),
        )
        return next((text for text, old, now in words if old != now), "")


class Settings(NamedTuple):
    """What a graph cannot follow when it changes, but which may change back. Equal settings share graphs."""

    modes: tuple[bool, ...]  # requires_grad per parameter and buffer, training per module
    gradients: tuple[int, ...]  # addresses of gradients at the beginning of the step, if it may find any
    host: tuple[tuple[str, Any], ...]  # hyperparameters, loss-scale rule, the caller's autocast, by name
    torch_settings: tuple[Any, ...]  # settings of torch that decide which kernels run, in the order of `SETTINGS`

    def named(self) -> dict[str, Any]:
        """Return every setting by the name that messages use."""
        read = zip(SETTINGS, self.torch_settings, strict=True)
        return {MODES: self.modes, GRADIENTS: self.gradients, **dict(self.host), **dict(read)}

    def changed(self, new: "Settings") -> list[str]:
        """Return the names of the settings that differ from `new`."""
        old, now = self.named(), new.named()
        return [name for name in {**old, **now} if name not in old or name not in now or old[name] != now[name]]

    def changes(self, new: "Settings", values: bool = False) -> str:
        """Return in words what differs from `new`, or "" if nothing does.

        Args:
            new: the later ones.
            values: whether hyperparameters come with their values.
        """
        if self.modes != new.modes:
            return f"{MODES} changed"
        if self.gradients != new.gradients:
            return "gradients were made, replaced or set to None outside of the step"
        if len(self.host) != len(new.host):
            return "the options of a param group changed"
        pairs = zip(self.host, new.host, strict=True)
        changed = [f"{name} changed{_from_to(old, now) * values}" for (name, old), (_, now) in pairs if old != now]
        read = zip(SETTINGS, self.torch_settings, new.torch_settings, strict=True)
        changed += [f"{name} changed from {old!r} to {now!r}" for name, old, now in read if old != now]
        return ", ".join(changed)


MODES, GRADIENTS = "train/eval mode or requires_grad", "gradients outside of the step"


def _from_to(old: Any, now: Any) -> str:
    """Return " from ... to ..." for two values, "" if a user would not recognise them."""
    before, after = value_text(old), value_text(now)
    return f" from {before} to {after}" if before and after else ""


class _Objects:
    """A list of objects, compared by identity. It keeps them alive, so that no other object gets the same identity."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Objects) and self.are(other.objects)

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.objects)))

    def are(self, others: list[Any]) -> bool:
        """Return whether the others are the very same objects."""
        return _are(self.objects, others)


def _are(ones: list[Any], others: list[Any]) -> bool:
    """Return whether these are the very same objects. It uses no `==`, which waits for the device with tensors."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def _grew(old: tuple[_Objects, ...], new: tuple[_Objects, ...]) -> bool:
    """Return whether the new ones begin with all of the old ones. A first step adds some."""
    grew = (
        len(a.objects) <= len(b.objects) and all(map(operator.is_, a.objects, b.objects))
        for a, b in zip(old, new, strict=True)
    )
    return all(grew)


class _StateReading(NamedTuple):
    """What every call reads of the state. Equal readings belong to the same generation.

    It is read without a loop in Python over the parameters. Hyperparameters are compared by identity. If one is another
    object, the generation is made anew, which compares its value.
    """

    addresses: list[int]
    flags: list[bool]
    kinds: list[type[nn.Module]]
    gradients: list[int]
    sizes: list[int]
    host: _Objects
    moments: tuple[_Objects, ...]
    torch_settings: list[Any]


class Rates(Protocol):
    """The tensors that a captured optimizer reads its learning rates from."""

    def refresh(self) -> None:
        """Bring them up to date with `group["lr"]`. Sync: none."""


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


class _Walk:
    """The modules below some roots with everything in them, kept as long as no table of any of them changes."""

    def __init__(self, roots: dict[str, nn.Module]) -> None:
        self.modules = list(roots.values())
        self._roots = roots
        seen = set(self.modules)  # a module may be registered under two names
        for module in self.modules:  # grows below
            for child in module_tables(module)[2].values():
                if child is not None and child not in seen:
                    seen.add(child)
                    self.modules.append(child)
        self._tables = tuple([table for module in self.modules for table in module_tables(module)])
        # These keep the objects alive, so that no other object gets the same identity.
        self._objects = _Objects(gc.get_referents(*self._tables))
        self.tensors = [found for found in self._objects.objects if isinstance(found, Tensor)]
        self._training = _training_of(self.modules)
        self._names = self._paths()  # now, because the tables may change

    def is_current(self) -> bool:
        """Return whether every table still has the very same objects in it."""
        return self._objects.are(gc.get_referents(*self._tables))  # all values of all tables, in one call of C

    def flags(self) -> list[bool]:
        """Return what may change in place: requires_grad per tensor, training per module."""
        return [*map(_requires_grad, self.tensors), *self._training()]

    def first_change(self, new: "_Walk") -> str:
        """Return in words the first difference from a walk of the same roots."""
        pairs = zip(self._names, self._objects.objects, new._names, new._objects.objects, strict=False)
        for old_name, old, new_name, now in pairs:
            if old_name != new_name:
                return f"{new_name} was added or {old_name} removed"
            if old is not now:
                return f"{new_name} was replaced"
        return "a parameter, buffer or module was added or removed"

    def _paths(self) -> list[str]:
        paths = {module: path for root, top in self._roots.items() for path, module in top.named_modules(prefix=root)}
        owners = (paths.get(module, "?") for module in self.modules for _ in range(3))  # three tables each
        return [f"{owner}.{key}" for owner, table in zip(owners, self._tables, strict=True) for key in table]


class TrainingState:
    """The modules, optimizers and scaler that a step may change.

    Args:
        modules: modules by the name that messages use; more may be added.
        optimizers: optimizers over parameters of these modules.
        scaler: the gradient scaler, or None.
        own: tensors of ampkit's own that a step changes, by name; may grow.
        finds_gradients: whether `param.grad` may hold something when the step begins.
        rates: of the optimizers.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Scaler | None = None,
        *,
        own: dict[str, Tensor] | None = None,
        finds_gradients: bool = False,
        rates: Sequence[Rates] = (),
    ) -> None:
        self.modules = modules
        self.optimizers = tuple(optimizers)
        self.scaler = scaler
        self.own = {} if own is None else own
        self.finds_gradients = finds_gradients
        self._rates = tuple(rates)
        self._held = False  # whether graphs hold all numbers of the optimizers as constants
        self._filled: list[Any] = [_NOT_FILLED]  # the learning rates that the tensors were filled with
        self._walk: _Walk | None = None
        self._walked = 0
        self._reading: _StateReading | None = None
        self._generation: Generation | None = None

    def hold(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take these optimizers for the ones that a step changes, with all their numbers as constants of a graph."""
        self.optimizers, self._rates, self._held = tuple(optimizers), (), True
        self.look_again()

    def look_again(self) -> None:
        """Have the next generation be another object, so that its user looks at what belongs to it."""
        self._generation = None

    def refresh_rates(self) -> None:
        """Bring the tensors that optimizers read their learning rates from up to date.

        It launches one kernel per rate that changed. Sync: none.
        """
        now = [group.get("lr") for optimizer in self.optimizers for group in optimizer.param_groups]
        # A rate that is a tensor may have been written to. A number that is the same object is unchanged.
        if _NUMBERS.issuperset(map(type, now)) and _are(now, self._filled):
            return
        for rates in self._rates:
            rates.refresh()
        self._filled = now

    def generation(self) -> Generation:
        """Return the present generation: the same object as before if nothing has changed since.

        Learning rates, which graphs read from tensors, are brought up to date. Every call does this. It takes about
        60 us for the 320 tensors and 151 modules of a ResNet-50. Sync: none.
        """
        self.refresh_rates()
        if self._walk is None or len(self.modules) != self._walked or not self._walk.is_current():
            self._walk, self._generation, self._walked = _Walk(self.modules), None, len(self.modules)
        with without_torch_function():
            reading = self._read(self._walk)
        if self._generation is None or reading != self._reading:
            self._reading, self._generation = reading, self._new_generation(self._walk, reading)
        return self._generation

    def _read(self, walk: _Walk) -> _StateReading:
        modes = _function_modes()
        host: list[Any] = [*map(type, modes), *_default_devices(modes), *_autocast()]
        sizes = []
        for optimizer in self.optimizers:
            host += _containers(optimizer)
            if any((*HOOKS_OF_ALL, *hooks_of_one(optimizer))):
                host += step_hooks(optimizer)
            for group in optimizer.param_groups:
                sizes.append(len(group["params"]))
                options = dict(group)
                for key in _FROZEN_RATES if self._held else _NOT_FROZEN:
                    options.pop(key, None)
                host += options
                host += options.values()
                if list in map(type, options.values()):  # betas out of a JSON file: its numbers may change in place
                    host += chain.from_iterable(value for value in options.values() if type(value) is list)
            if self._held:
                host += _own_values(optimizer)
        if self.scaler is not None and self.scaler.is_enabled():
            host += self.scaler.rule().values()
        return _StateReading(
            addresses=list(map(Tensor.data_ptr, walk.tensors)),
            flags=walk.flags(),
            kinds=list(map(type, walk.modules)),
            gradients=_gradient_addresses(walk.tensors) if self.finds_gradients else [],
            sizes=sizes,
            host=_Objects(host),
            moments=tuple([_Objects(gc.get_referents(optimizer.state)) for optimizer in self.optimizers]),
            torch_settings=[read() for read in SETTINGS_READERS],
        )

    def _new_generation(self, walk: _Walk, reading: _StateReading) -> Generation:
        return Generation(
            containers=_Objects([part for optimizer in self.optimizers for part in _containers(optimizer)]),
            moments=reading.moments,
            walk=walk,
            addresses=tuple(reading.addresses),
            sizes=tuple(reading.sizes),
            settings=Settings(
                modes=tuple(reading.flags),
                gradients=tuple(reading.gradients),
                host=self._host(walk),
                torch_settings=_unchangeable(reading.torch_settings),
            ),
        )

    def _host(self, walk: _Walk) -> tuple[tuple[str, Any], ...]:
        named: list[tuple[str, Any]] = []
        named += zip(("cuda autocast around the step", "cpu autocast around the step"), _autocast(), strict=True)
        # The rules of a policy for operations are the type of a mode. Those for a module are the module's class.
        modes = _function_modes()
        policies = tuple(kind for kind in map(type, modes) if kind is not DeviceContext)
        named.append(("the policy around the step", policies))
        named.append(("torch.get_default_device()", _default_devices(modes)))
        named.append(("the policy on the model", tuple(map(type, walk.modules))))
        for k, optimizer in enumerate(self.optimizers):
            owner = f"optimizers[{k}]" if len(self.optimizers) > 1 else "the optimizer"
            prefix = f"{owner}." if len(self.optimizers) > 1 else ""
            for i, group in enumerate(optimizer.param_groups):
                # Graphs read the learning rate from a tensor, unless they hold it as a constant.
                frozen = (key for key in group if key not in (_FROZEN_RATES if self._held else _NOT_FROZEN))
                named.extend((f"{prefix}param_groups[{i}][{key!r}]", _unchangeable(group[key])) for key in frozen)
            named.append((f"{owner}'s step hooks", tuple(step_hooks(optimizer))))
            if self._held:
                named.append((f"{owner}'s attributes and state", tuple(map(_by_value, _own_values(optimizer)))))
        if self.scaler is not None and self.scaler.is_enabled():
            named.extend((f"the scaler's {name}", value) for name, value in self.scaler.rule().items())
        return tuple(named)

    def tensors(self) -> Bound:
        """Return every tensor of modules, optimizers and scaler by a path that a user can read.

        Aliasing: the live tensors.
        """
        bound = {path: table[key] for path, table, key in cells(self.modules, self.optimizers, self.own)}
        if self.scaler is not None and self.scaler.is_enabled():
            bound.update({f"scaler.{name}": tensor for name, tensor in self.scaler.tensors().items()})
        return Bound(bound, self.modules)

    def is_undecided(self) -> bool:
        """Return whether the last step waited for the device as later ones will not."""
        return bool(self.optimizers) and self.scaler is not None and self.scaler.is_undecided()

    def rebound_since(self, before: dict[str, Tensor]) -> list[str]:
        """Return the paths that hold another tensor than in `before`, an earlier result of `tensors`."""
        return [path for path, tensor in self.tensors().items() if before.get(path) is not tensor]

    def rebind(self, before: Bound) -> None:
        """Put the tensors of `before` back in their places and drop those that came since. Copies nothing."""
        before.restore(cells(self.modules, self.optimizers, self.own))


_requires_grad: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")
_gradient: Callable[[Tensor], Tensor | None] = operator.attrgetter("grad")


def _training_of(modules: list[nn.Module]) -> Callable[[], Iterator[bool]]:
    """Return a function that reads `training` of the modules.

    It reads the `__dict__` of the modules, in a third of the time, if `training` is there and no class defines it.
    """
    tables = list(map(vars, modules))
    if all("training" in table and not hasattr(type(m), "training") for m, table in zip(modules, tables, strict=True)):
        return lambda: map(operator.itemgetter("training"), tables)
    return lambda: map(operator.attrgetter("training"), modules)


def _unchangeable(value: Any) -> Any:
    """Return a value to compare a hyperparameter by: of a tensor the identity, for graphs read it in each replay."""
    if isinstance(value, Tensor):
        return _Objects([value])
    return tuple(map(_unchangeable, value)) if type(value) in (list, tuple) else value


def _containers(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = optimizer.param_groups
    params = [group["params"] for group in groups]
    return [optimizer.state, groups, *groups, *params, *chain.from_iterable(params)]


def _own_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what the optimizer's attributes and the state of each parameter hold."""
    kept = [value for name, value in vars(optimizer).items() if name not in _OTHERS]
    return [*kept, *chain.from_iterable(map(operator.methodcaller("values"), optimizer.state.values()))]


def _by_value(value: Any) -> Any:
    """Return something to compare a value by: a number or a text by itself, everything else by its identity."""
    return value if value is None or isinstance(value, (bool, int, float, complex, str)) else _Objects([value])


def _gradient_addresses(tensors: list[Tensor]) -> list[int]:
    """Return [] if there is no gradient, else an address per tensor, 0 for a tensor without gradient."""
    found = list(map(_gradient, tensors))
    if not any(map(operator.is_not, found, repeat(None))):
        return []
    return [0 if gradient is None else gradient.data_ptr() for gradient in found]


def _function_modes() -> list[Any]:
    """Return the function modes of the caller, outermost first, without those that ampkit uses to observe."""
    return [mode for mode in function_mode_stack() if not isinstance(mode, UnseenFunctionMode)]


def _default_devices(modes: list[Any]) -> tuple[torch.device, ...]:
    """Return the devices that were set as default device, the innermost one last."""
    return tuple([mode.device for mode in modes if type(mode) is DeviceContext])


def _autocast() -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes of the caller's autocast on CUDA and on the CPU, None where it is off."""
    on_cuda = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return on_cuda, torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


_NOT_FILLED = object()
_NUMBERS = frozenset((float, int, type(None)))
_NOT_FROZEN = ("params", "lr", "initial_lr")
_FROZEN_RATES = ("params", "initial_lr")  # what is left of it if a graph holds learning rates
# The attributes of an optimizer that are looked at by themselves, or that torch and ampkit set for a step.
_OTHERS = frozenset(("state", "param_groups", "step", "found_inf", "grad_scale", "_opt_called"))
