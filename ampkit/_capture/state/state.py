"""The training state: the tensors that a step may change, and whether a graph may still be replayed on them."""

import functools
import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._text import CONSTANTS, value_text
from ..._torch.autograd.gradient_nodes import renew_gradient_nodes
from ..._torch.optimizers import step_hooks
from ..._torch.tensors.modes import DeviceContext, function_modes, without_torch_function
from ..._torch.tensors.modules import parts_of
from ..._torch.tensors.settings import SETTINGS, settings
from ..host.constants import HostConstants, ReadValues
from ..host.host_tensors import HostValues
from .bound import Bound, Cell, cells
from .carried import Carried
from .walk import Objects, Walk
from .watch import Look, StateWatch, autocast, default_devices, own_values, packs_saved_tensors


class Generation(NamedTuple):
    """What a graph cannot follow when it changes, beside its input. While it is equal, a graph may be replayed."""

    containers: "Objects"  # optimizer.state, param_groups, their parameters: load_state_dict replaces them
    moments: tuple["Objects", ...]  # in each optimizer.state: the parameters, and a dict for each
    kept: "Kept"  # the tensors in these dicts
    walk: "Walk"  # the parameters, buffers and child modules themselves
    addresses: tuple[int, ...]  # of parameters and buffers: `.data =` and module.to() change them
    layouts: tuple[Any, ...]  # of parameters and buffers: `.data =` may change them at the same address
    sizes: tuple[int, ...]  # parameters per param group
    settings: "Settings"

    def replaced_in(self, new: "Generation") -> str:
        """Return in words which memory was replaced in `new`, so that older graphs are outdated; "" if none was."""
        moment = self.kept.replaced_in(new.kept)
        grew = all(
            len(old.objects) <= len(now.objects) and all(map(operator.is_, old.objects, now.objects))
            for old, now in zip(self.moments, new.moments, strict=True)
        )  # a first step adds some
        words = (
            ("a param group was added or removed", len(self.sizes), len(new.sizes)),
            ("a parameter was added to a param group, or removed", self.sizes, new.sizes),
            ("the optimizer's state was replaced (load_state_dict)", self.containers, new.containers),
            ("the optimizer's state was cleared or replaced", True, grew),
            (f"{moment} in the optimizer's state was replaced by another tensor", "", moment),
            (self.walk.first_change(new.walk), self.walk, new.walk),
            (f"a parameter or buffer was moved to other memory{self._moved(new)}", self.addresses, new.addresses),
            ("a parameter or buffer got another shape, other strides or another dtype", self.layouts, new.layouts),
        )
        return next((text for text, old, now in words if old != now), "")

    def _moved(self, new: "Generation") -> str:
        """Return " (path)" of the first tensor that lies elsewhere in `new`, "" if there is none."""
        pairs = zip(self.walk.tensors, self.addresses, new.addresses, strict=False)
        return next((f" ({self.walk.name_of(tensor)})" for tensor, old, now in pairs if old != now), "")


class Kept:
    """The tensors that optimizers keep of each parameter in these tables, compared by identity."""

    def __init__(self, tables: Sequence[dict[str, Any]]) -> None:
        self._tables = tables  # kept alive, so that no other one gets the same identity
        self._tensors = {
            (id(table), name): value for table in tables for name, value in table.items() if isinstance(value, Tensor)
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self._tensors.keys() == other._tensors.keys() and not self.replaced_in(other)

    def replaced_in(self, new: "Kept") -> str:
        """Return the name of a tensor that is another one in `new`, "" if there is none. Others may have been added."""
        found = new._tensors
        return next((key[1] for key, tensor in self._tensors.items() if found.get(key, tensor) is not tensor), "")


class Settings(NamedTuple):
    """What a graph cannot follow when it changes, but which may change back. Equal settings share graphs."""

    modes: tuple[bool, ...]  # requires_grad per parameter and buffer, training per module
    gradients: tuple[int, ...]  # addresses of gradients at the beginning of the step, if it may find any
    host: tuple[tuple[str, Any], ...]  # hyperparameters, loss-scale rule, the caller's autocast, by name
    torch_settings: tuple[Any, ...]  # settings of torch that decide which kernels run, in the order of `SETTINGS`
    reads: ReadValues  # attributes of modules, and variables
    host_values: HostValues  # of tensors on the host

    def named(self) -> dict[str, Any]:
        """Return every setting by the name that messages use."""
        own = {MODES: self.modes, GRADIENTS: self.gradients, READS: self.reads, HOST_TENSORS: self.host_values}
        return {**own, **dict(self.host), **dict(zip(SETTINGS, self.torch_settings, strict=True))}

    def changed(self, new: "Settings") -> list[str]:
        """Return the names of the settings that differ from `new`."""
        old, now = self.named(), new.named()
        names = [name for name in {**old, **now} if name not in old or name not in now or old[name] != now[name]]
        if READS in names:
            read = self.reads.changed(new.reads)
            kinds = {ATTRIBUTES if name.startswith("the attribute") else VARIABLES: None for name in read}
            names[names.index(READS) : names.index(READS) + 1] = kinds
        return names

    def changes(self, new: "Settings", values: bool = False) -> str:
        """Return in words what differs from `new`, or "" if nothing does.

        With `values`, hyperparameters come with their values, and a change of mode with what to write.
        """
        if self.modes != new.modes:
            return f"{MODES} changed{_AFTER_EVALUATION * values}"
        if self.gradients != new.gradients:
            return "gradients were made, replaced or set to None outside of the step"
        if len(self.host) != len(new.host):
            return "the options of a param group changed"
        pairs = zip(self.host, new.host, strict=True)
        changed = [f"{name} changed{_from_to(old, now) * values}" for (name, old), (_, now) in pairs if old != now]
        read = zip(SETTINGS, self.torch_settings, new.torch_settings, strict=True)
        changed += [f"{name} changed from {old!r} to {now!r}" for name, old, now in read if old != now]
        reads = self.reads.changed(new.reads).items()
        changed += [f"{name} changed{_from_to(old, now) * values}" for name, (old, now) in reads]
        lines = self.host_values.changed(new.host_values)
        changed += [f"a tensor on the host changed, which is read in {line}" for line in lines]
        return ", ".join(changed)


READS, ATTRIBUTES, VARIABLES = "what the step reads", "attributes of modules", "variables that the step reads"
HOST_TENSORS = "tensors on the host that the step reads"
MODES, GRADIENTS = "train/eval mode or requires_grad", "gradients outside of the step"
_AFTER_EVALUATION = " (after an evaluation under model.eval(), call model.train() before the next step)"


def _from_to(old: Any, now: Any) -> str:
    """Return " from ... to ..." for two values, "" if a user would not recognise them."""
    before, after = value_text(old), value_text(now)
    return f" from {before} to {after}" if before and after else ""


class TrainingState(StateWatch[Generation]):
    """The modules, optimizers and scaler that a step may change, and whether anything has changed since the last call.

    Args:
        modules: modules by the name that messages use; more may be added.
        optimizers: optimizers over parameters of these modules.
        scaler: the gradient scaler, or None.
        own: tensors of ampkit's own that a step changes, by name; may grow.
        finds_gradients: whether `param.grad` may hold something when the step begins.
        bare: a module whose parameters have no gradients when a call begins. Gradients that a backward of the caller's
            has left there are cleared.
        sees_hooks: whether graphs contain what hooks of the modules and their parameters do.
        rates: of the optimizers.
        holds_rates: whether graphs hold learning rates as constants.
        functions: those of the user's that a step calls.
        eager_optimizers: further optimizers that steps call, and that no graph can hold.
        problem: why no graph can hold them; "" if there are none.
    """

    @functools.cached_property
    def carried(self) -> Carried:
        """The tensors that calls would replace, and change in place instead."""
        return Carried(self.modules)

    def carrying(self) -> AbstractContextManager[None]:
        """Return the context of a call in which the tensors of `carried` are changed in place."""
        return self.carried.carrying(self.held_tensors)

    def noting_reads(self, in_parts: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context for a step, whose code tells which attributes and variables are compared from then on.

        At its end `in_parts` returns whether the step cannot be captured as a whole.
        """
        modules = list(chain.from_iterable(map(parts_of, self.modules.values())))
        return self.reads.noting(modules, in_parts)

    def constants(self) -> HostConstants:
        """Return the values of the host that the step reads, as they are now."""
        walk = Walk(self.modules)
        with without_torch_function():
            found = [*self.reads.constants(walk.modules, walk.paths()), *self.host_tensors.constants()]
        return HostConstants(dict.fromkeys(found))

    def tensors(self) -> Bound:
        """Return every tensor of modules, optimizers and scaler by a path that a user can read.

        Aliasing: the live tensors.
        """
        bound = {path: table[key] for path, table, key in self._cells()}
        if self.scaler is not None and self.scaler.is_enabled():
            bound.update({f"scaler.{name}": tensor for name, tensor in self.scaler.tensors().items()})
        return Bound(bound | self.carried.tensors(), self.modules)

    def fitting(self) -> Callable[[], bool] | None:
        """Return what a graph that was just captured needs in front of each replay, see `Carried.fitting`."""
        return self.carried.fitting(self.reads.loads)

    def read_values(self) -> ReadValues:
        """Return the values of the host that calls compare, as they were when the state was looked at last."""
        return self.generation().settings.reads

    def is_undecided(self) -> bool:
        """Return whether the last step waited for the device as later ones will not."""
        return bool(self.optimizers) and self.scaler is not None and self.scaler.is_undecided()

    def renew_gradient_nodes(self) -> None:
        """Have gradients be accumulated on the stream of the next call, though the graph of an earlier one is alive."""
        renew_gradient_nodes(Walk(self.modules).tensors)

    def rebound_since(self, before: dict[str, Tensor]) -> list[str]:
        """Return the paths that hold another tensor than in `before`, an earlier result of `tensors`."""
        return [path for path, tensor in self.tensors().items() if before.get(path) is not tensor]

    def rebind(self, before: Bound) -> None:
        """Put the tensors of `before` back in their places and drop those that came since. Copies nothing."""
        for path, table, key in list(self._cells()):
            if path in before:
                table[key] = before[path]
            elif path in before.others:
                table[key] = before.others[path]
            else:
                del table[key]

    def _cells(self) -> Iterator[Cell]:
        found = cells(self.modules, self.optimizers, self.own)
        carried, loads = self.carried, self.reads.loads
        return (cell for cell in found if not carried.is_output(cell) or loads(cell.key))

    def _described(self, look: Look) -> Generation:
        groups = [group for optimizer in look.optimizers for group in optimizer.param_groups]
        containers: list[Any] = []
        for optimizer in look.optimizers:
            params = [group["params"] for group in optimizer.param_groups]
            containers += [optimizer.state, optimizer.param_groups, *optimizer.param_groups, *params]
            containers += chain.from_iterable(params)
        return Generation(
            containers=Objects(containers),
            moments=tuple([Objects(gc.get_referents(optimizer.state)) for optimizer in look.optimizers]),
            kept=Kept(look.kept),
            walk=look.walk,
            addresses=tuple(look.addresses),
            layouts=tuple(look.layouts),
            sizes=tuple([len(group["params"]) for group in groups]),
            settings=Settings(
                modes=tuple(look.walk.flags()),
                gradients=tuple(look.gradients),
                host=_host(look),
                torch_settings=_unchangeable(settings()),
                reads=look.reads,
                host_values=look.host_values,
            ),
        )


def _host(look: Look) -> tuple[tuple[str, Any], ...]:
    on_cuda, on_cpu = autocast()
    # The rules of a policy for operations are the type of a mode. Those for a module are the module's class.
    modes = function_modes()
    named: list[tuple[str, Any]] = [
        ("cuda autocast around the step", on_cuda),
        ("cpu autocast around the step", on_cpu),
        ("the policy around the step", tuple(kind for kind in map(type, modes) if kind is not DeviceContext)),
        ("torch.get_default_device()", default_devices(modes)),
        # Anomaly mode without this check, as ampkit's own, only says where an error came from.
        ("torch.autograd.detect_anomaly()", torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()),
        # Whether there are any, for they are often functions that are made in each call.
        ("saved_tensors_hooks around the step", packs_saved_tensors()),
        ("the random state of cuDNN's dropout (nn.LSTM, nn.GRU, nn.RNN)", look.dropout_begun),
        ("the policy on the model", tuple(map(type, look.walk.modules))),
        ("hooks of modules and parameters", Objects(look.hooks)),
    ]
    for k, optimizer in enumerate(look.optimizers):
        owner = f"optimizers[{k}]" if len(look.optimizers) > 1 else "the optimizer"
        prefix = f"{owner}." if len(look.optimizers) > 1 else ""
        for i, group in enumerate(optimizer.param_groups):
            # Graphs read the learning rate from a tensor, unless they hold it as a constant.
            frozen = (key for key in group if key not in ("params", *look.followed))
            named.extend((f"{prefix}param_groups[{i}][{key!r}]", _unchangeable(group[key])) for key in frozen)
        named.append((f"{owner}'s step hooks", tuple(step_hooks(optimizer))))
        if look.held:
            values = own_values(optimizer)  # numbers and texts are compared by value, everything else by identity
            compared = (value if isinstance(value, CONSTANTS) else Objects([value]) for value in values)
            named.append((f"{owner}'s attributes and state", tuple(compared)))
    if look.scaler is not None and look.scaler.is_enabled():
        named.extend((f"the scaler's {name}", value) for name, value in look.scaler.rule().items())
    return tuple(named)


def _unchangeable(value: Any) -> Any:
    """Return a value to compare a hyperparameter by: of a tensor the identity, for graphs read it in each replay."""
    if isinstance(value, Tensor):
        return Objects([value])
    return tuple(map(_unchangeable, value)) if type(value) in (list, tuple) else value
