"""Neighbours in an `nn.Sequential` that are captured together, where the whole of it cannot be."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..._callables.passes import replace_forward
from ..._torch.tensors.modules import hook_tables, module_tables
from ..._undo import Undo
from .module_survey import OUTPUT_SHARES, WRITES, ModuleCall


class ModuleRun(nn.Sequential):
    """Neighbours in an `nn.Sequential`, as a module of its own. Only its `forward` is called."""


@dataclass(frozen=True, eq=False)
class ModuleRuns:
    """The runs of neighbours in modules of a model. While they are installed, each run is called as one module."""

    units: dict[nn.Sequential, list[nn.Module]]  # what each calls one after the other: runs, and children in none
    _names: dict[nn.Sequential, str]  # their paths

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the runs, each with a name that reads like a slice of its `nn.Sequential`."""
        for module, units in self.units.items():
            start = 0
            for unit in units:
                length = len(unit) if isinstance(unit, ModuleRun) else 1
                if isinstance(unit, ModuleRun):
                    yield f"{self._names[module]}[{start}:{start + length}]", unit
                start += length

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the `nn.Sequential` modules call the runs."""
        with Undo() as undo:
            for module, units in self.units.items():
                if "forward" not in vars(module):  # else somebody has replaced it since
                    replace_forward(undo, module, _calling(module, units))
            yield


def _calling(module: nn.Sequential, units: list[nn.Module]) -> Callable[..., Any]:
    """Return a `forward` that does what that of the module does, and calls runs as modules."""
    original: Any = module.forward
    children = [child for unit in units for child in (unit if isinstance(unit, ModuleRun) else [unit])]

    def forward(input: Any) -> Any:
        if list(module_tables(module)[2].values()) != children:  # modules are equal if they are the same
            return original(input)
        for unit in units:
            # A run has no hooks of its own, but those on all modules would be called for it.
            call: Any = unit.forward if isinstance(unit, ModuleRun) else unit
            input = call(input)
        return input

    return forward


def runs_in(calls: Sequence[ModuleCall], fewest: int) -> ModuleRuns:
    """Return the runs that are worth a try, as one step has shown.

    They are in each `nn.Sequential` that cannot be captured whole: neighbours without an uncapturable line that have
    `fewest` kernels or more together. Whether a run can be captured is for a survey to find out that watches it as a
    module. The calls are in the order in which they began.
    """
    children: dict[ModuleCall, list[ModuleCall]] = defaultdict(list)
    by_module: dict[nn.Sequential, list[ModuleCall]] = defaultdict(list)
    captured: set[ModuleCall] = set()
    for call in calls:
        if any(above in captured for above in call.chain()):
            continue
        if not call.lines and not call.problems and call.kernels >= fewest:
            captured.add(call)
        elif isinstance(call.module, nn.Sequential) and "forward" not in vars(call.module):
            kind = type(call.module)  # else it does not just call its children one after the other
            if kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__:
                by_module[call.module].append(call)
        if call.parent is not None:
            children[call.parent].append(call)
    units = {module: _units(module, [children[call] for call in own], fewest) for module, own in by_module.items()}
    found = {module: parts for module, parts in units.items() if any(isinstance(part, ModuleRun) for part in parts)}
    return ModuleRuns(found, {module: by_module[module][0].name for module in found})


def _units(module: nn.Sequential, calls: list[list[ModuleCall]], fewest: int) -> list[nn.Module]:
    """Return what to call one after the other in a module, which has called its children in these calls."""
    modules = list(module)
    if any([call.module for call in each] != modules for each in calls):
        return modules  # a line of a child calls another one
    columns = list(zip(*calls, strict=True))
    free = [not any(call.lines or any(hook_tables(call.module)) for call in column) for column in columns]
    may_begin = [ok and not any(call.problems for call in each) for ok, each in zip(free, columns, strict=True)]
    # Within a run, a module may change the output of the one before it in place, or return a view of that.
    harmless = {OUTPUT_SHARES, WRITES}
    may_follow = [
        ok and all(call.problems.keys() <= harmless for call in each) for ok, each in zip(free, columns, strict=True)
    ]
    units: list[nn.Module] = []
    start = 0
    while start < len(modules):
        end = start
        while end < len(modules) and (may_begin if end == start else may_follow)[end]:
            end += 1
        kernels = min(sum(call.kernels for call in each[start:end]) for each in calls)
        if 1 < end - start < len(modules) and kernels >= fewest:
            units.append(ModuleRun(*modules[start:end]))
            start = end
        else:
            units.append(modules[start])
            start += 1
    return units
