"""Which modules of a step are captured by themselves, as two surveys of it show."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from ..._callables.passes import CAPTURED_AS_THEY_ARE
from ..._capture.keys.inputs import Constant
from .module_survey import ModuleCall, Survey, advice_on


class Choice(NamedTuple):
    """What a step in parts captures."""

    calls: dict[nn.Module, dict[int, ModuleCall]]  # by the number of the call; calls within these are not counted
    reasons: dict[str, str]  # why modules that the loss function calls are not captured as a whole, by their paths


def chosen(first: Survey, second: Survey, fewest: int, failed: dict[ModuleCall, str]) -> Choice:
    """Return the largest calls that can be captured, as two steps with the same layout of the batch have shown.

    They have `fewest` kernels at least. `failed` says why calls of the second step could not be captured, as far as
    that was tried.
    """
    known = {key: call for key, call in _numbered(first.calls)}
    captured: set[ModuleCall] = set()
    reasons: dict[str, str] = {}
    outer = []  # the calls that are made when those that are captured are replayed
    for key, call in _numbered(second.calls):
        if any(above in captured for above in call.chain()):
            continue
        outer.append(call)
        why = failed.get(call) or _why_not(known.get(key), call, fewest)
        if why:
            reasons.setdefault(call.name, why)
        else:
            captured.add(call)
    modules = dict.fromkeys(call.module for call in outer if call in captured)
    numbered = _numbered(call for call in outer if call.module in modules)
    calls: dict[nn.Module, dict[int, ModuleCall]] = {module: {} for module in modules}
    for (module, number), call in numbered:
        if call in captured:
            calls[module][number] = call
    return Choice(calls, reasons)


def _why_not(before: ModuleCall | None, call: ModuleCall, fewest: int) -> str:
    for each in filter(None, (before, call)):
        if each.lines:
            return next(iter(each.lines))
        if each.problems:
            return next(iter(each.problems))
    done = [(each.layout, each.gradients, each.operations) for each in (before, call) if each is not None]
    if before is None or before.module is not call.module or done[0] != done[1]:
        layouts = [each.layout.spec.leaves for each in (before, call) if each is not None and each.layout is not None]
        for old, new in zip(*layouts, strict=False) if len(layouts) == 2 else ():
            constants = isinstance(old, Constant) and isinstance(new, Constant) and new.kind not in CAPTURED_AS_THEY_ARE
            if constants and old.kind is new.kind and old != new:
                return f"it gets another {new.kind.__name__} in each step{advice_on(new.value)}"
        return "it does something else in each step"
    if call.layout is None:
        return "its input cannot be copied"
    return f"it has fewer than {fewest} kernels" if call.kernels < fewest else ""


def _numbered(calls: Iterable[ModuleCall]) -> Iterator[tuple[tuple[nn.Module, int], ModuleCall]]:
    counts: Counter[nn.Module] = Counter()
    for call in calls:
        yield (call.module, counts[call.module]), call
        counts[call.module] += 1
