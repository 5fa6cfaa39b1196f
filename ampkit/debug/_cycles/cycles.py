"""Which reference cycles keep tensors alive until Python's garbage collector runs."""

import gc
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..._arguments import check_callable
from ..._text import size_text
from ..._torch.autograd.autograd import graph_nodes, saved_by
from ..._torch.tensors.modes import without_torch_function
from .references import UNNAMED_TYPES, chain, lines_of, weak_storage_of

# `Cycle.holds` names the largest tensor that is freed with the cycle. Which tensors are freed is known only afterwards,
# so this many are described before, the largest first.
_CANDIDATES = 16


@dataclass(frozen=True)
class Cycle:
    """Objects that refer to each other in a cycle, and the tensors that they keep alive.

    Attributes:
        loop: the cycle: `Trainer.callbacks -> list[0] -> function Trainer.fit.<locals>.log closure cell 'self' ->
            Trainer`.
        holds: the way from the cycle to its largest tensor: `Trainer.history -> list[3] -> Tensor (64, 3) float32 cpu,
            768 B`.
        lines: lines of the functions and frames involved, as `file:line: source`; if there are none, of the classes.
        advice: what to write instead.
        tensors: how many tensors it keeps alive, those in gradients and autograd graphs too. Tensors that share memory
            count once.
        bytes: how much memory they take.
        count: how many cycles read the same. `tensors` and `bytes` are the sums over all of them.
    """

    loop: str
    holds: str
    lines: tuple[str, ...]
    advice: str
    tensors: int
    bytes: int
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} of this kind)" if self.count > 1 else ""
        lines = [f"{size_text(self.bytes)} in {self.tensors} tensor(s){times}: {self.loop}", f"  holds {self.holds}"]
        return "\n".join([*lines, *(f"  at {line}" for line in self.lines), f"  {self.advice}"])


@dataclass(eq=False, repr=False)
class Cycles:
    """Context that finds the tensors that only reference cycles keep alive. `ampkit.debug.cycles()` makes it.

    Attributes:
        found: the cycles, the one that keeps the most bytes first. It is filled when the context ends.
        bytes: the memory that all of them keep alive, each tensor counted once.
        tensors: how many tensors they keep alive. Tensors that share memory count once.
    """

    found: tuple[Cycle, ...] = ()
    bytes: int = 0
    tensors: int = 0
    _before: tuple[bool, int] = (False, 0)  # whether the collector was enabled, and its flags
    _garbage: int = 0  # length of gc.garbage at the start

    def __enter__(self) -> "Cycles":
        gc.collect()
        self._before = gc.isenabled(), gc.get_debug()
        self._garbage = len(gc.garbage)
        gc.disable()
        # With this flag, what the user's own gc.collect() finds goes to gc.garbage and is not freed, so we see it too.
        gc.set_debug(self._before[1] | gc.DEBUG_SAVEALL)
        return self

    def __exit__(self, *error: object) -> None:
        enabled, flags = self._before
        try:
            gc.collect()
            with without_torch_function():
                described = _described_cycles(gc.garbage[self._garbage :])
        finally:
            del gc.garbage[self._garbage :]
            gc.set_debug(flags & ~gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(flags)
            if enabled:
                gc.enable()
        # The cycles whose tensors were freed now. A tensor that lives on has another owner.
        freed = {ref: size for cycle in described for ref, size in cycle.storages.items() if ref.expired()}
        self.bytes = sum(freed.values())
        self.tensors = len(freed)
        cycles: dict[tuple[str, str, tuple[str, ...]], Cycle] = {}
        for cycle in described:
            sizes = [size for ref, size in cycle.storages.items() if ref in freed]
            if not sizes:
                continue
            holds = next((text for kept, text in cycle.holds if not kept.isdisjoint(freed)), cycle.holds[0][1])
            key = cycle.loop, holds, cycle.lines
            old = cycles.get(key) or Cycle(*key, cycle.advice, tensors=0, bytes=0, count=0)
            tensors, size = old.tensors + len(sizes), old.bytes + sum(sizes)
            cycles[key] = replace(old, tensors=tensors, bytes=size, count=old.count + 1)
        self.found = tuple(sorted(cycles.values(), key=lambda cycle: -cycle.bytes))

    def __str__(self) -> str:
        if not self.found:
            return "No reference cycle keeps a tensor alive."
        count = sum(cycle.count for cycle in self.found)
        kept = f"{size_text(self.bytes)} in {self.tensors} tensor(s)"
        head = f"{count} reference cycle(s) keep {kept} until gc.collect() runs"
        return "\n\n".join([f"{head}:", *map(str, self.found)])


def cycles(function: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Cycles:
    """Find the reference cycles that keep tensors alive until Python's garbage collector happens to run.

    Such memory is neither used nor free. It comes and goes with the collector, and looks like a leak.

    ::

        with ampkit.debug.cycles() as found:
            for batch in itertools.islice(loader, 3):
                train_step(batch)
        print(found)

    For a single call: `print(ampkit.debug.cycles(train_step, batch))`.

    Garbage from before is collected first. The collector is off in the context, so run a few steps there, not an epoch.
    Afterwards the garbage is freed, and the collector is as it was.

    Two kinds of cycles are not seen: a cycle through C++, such as a hook on a tensor that closes over the tensor, which
    no collector can free; and a cycle through a suspended generator, which the collector breaks before anyone can look
    at it.

    Args:
        function: a function to call in the context. What it returns is dropped.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        A context manager with `.found`, `.bytes`, `.tensors`, and a report as its text. With a `function`, it has ended
        already. Cycles are left out if all their tensors have another owner, such as the weights of a model in use.

    Sync: none. Aliasing: none.
    """
    found = Cycles()
    if function is not None:
        check_callable("cycles", "function", function, "a function to call, or None for a context manager")
        with found:
            function(*args, **kwargs)
    return found


_Edges = list[list[int]]  # for each object, by number, the objects that it refers to
_Storages = dict[StorageWeakRef, int]  # bytes of each storage


class _DescribedCycle(NamedTuple):
    """A `Cycle` before it is known which of its tensors have no other owner. It refers to none of its objects."""

    loop: str
    holds: list[tuple[set[StorageWeakRef], str]]  # of some tensors, the largest first: storages, and `Cycle.holds`
    lines: tuple[str, ...]
    advice: str
    storages: _Storages  # those of all tensors


def _described_cycles(garbage: Sequence[object]) -> list[_DescribedCycle]:
    """Describe each cycle among the objects that leads to a tensor."""
    number = {id(thing): i for i, thing in enumerate(garbage)}
    edges = [[number[key] for key in map(id, gc.get_referents(thing)) if key in number] for thing in garbage]
    tensors = {i: storages for i, thing in enumerate(garbage) if (storages := _storages_of(thing))}
    holders = set(_searched(_reversed(edges), tensors))
    described = []
    for objects in _strongly_connected(edges, holders):
        reached = _searched(edges, objects)
        kept = sorted(reached.keys() & tensors.keys(), key=lambda i: -sum(tensors[i].values()))
        # The shortest cycle through the object that is nearest to a tensor. It begins with one that has a name.
        nearest = _path(reached, kept[0])[0]
        onward = [i for i in edges[nearest] if i in objects]
        cycle = [nearest, *_path(_searched(edges, onward, objects), nearest)[:-1]]
        first = next((n for n, i in enumerate(cycle) if type(garbage[i]) not in UNNAMED_TYPES), 0)
        cycle = cycle[first:] + cycle[:first]
        reached = _searched(edges, [i for i in cycle if type(garbage[i]) not in UNNAMED_TYPES] or cycle)
        paths = {i: [garbage[j] for j in _path(reached, i)] for i in kept[:_CANDIDATES]}
        things = [garbage[i] for i in cycle]
        described.append(
            _DescribedCycle(
                loop=chain([*things, things[0]]),
                holds=[(set(tensors[i]), chain(path)) for i, path in paths.items()],
                lines=tuple(lines_of([*things, *paths[kept[0]]])),
                advice=next((text for kind, text in _ADVICE.items() if kind in map(type, things)), _OTHER_ADVICE),
                storages={ref: size for i in kept for ref, size in tensors[i].items()},
            )
        )
    return described


_ADVICE = {
    types.TracebackType: "Keep str(error), not the error, or end with `del error`: its traceback holds every frame.",
    types.FunctionType: "Pass the function what it needs as an argument, or let it close over weakref.ref(object).",
}
_OTHER_ADVICE = "Let one of them hold weakref.ref(other), or break the cycle when it is done with (`self.x = None`)."


def _storages_of(thing: object) -> _Storages:
    """Return what a tensor keeps alive: its memory, that of its gradient, and what its autograd graph has saved.

    The collector sees only the first of these. A loss of four bytes in a cycle can hold the activations of a step.
    """
    if not issubclass(type(thing), Tensor):
        return {}
    assert isinstance(thing, Tensor)
    graph = graph_nodes([thing])
    tensors = [thing, *(saved for node in graph for saved in saved_by(node))]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return dict(filter(None, map(weak_storage_of, tensors)))


def _reversed(edges: _Edges) -> _Edges:
    back: _Edges = [[] for _ in edges]
    for i, following in enumerate(edges):
        for j in following:
            back[j].append(i)
    return back


def _searched(edges: _Edges, starts: Iterable[int], within: Collection[int] | None = None) -> dict[int, int | None]:
    """Return the objects that can be reached from some, and these, each with the one before it on a shortest path."""
    previous: dict[int, int | None] = dict.fromkeys(starts)
    left = deque(previous)
    while left:
        i = left.popleft()
        new = dict.fromkeys((j for j in edges[i] if j not in previous and (within is None or j in within)), i)
        previous.update(new)
        left.extend(new)
    return previous


def _path(previous: Mapping[int, int | None], goal: int) -> list[int]:
    """Return the path on which `_searched` has reached an object, both ends included."""
    path, at = [goal], previous[goal]
    while at is not None:
        path.append(at)
        at = previous[at]
    return path[::-1]


def _strongly_connected(edges: _Edges, objects: set[int]) -> list[set[int]]:
    """Return the sets of objects that can reach each other; a single object only if it refers to itself.

    Kosaraju's algorithm, without recursion: garbage can be a chain of a million objects.
    """
    seen: set[int] = set()
    order = []  # that in which a depth-first search leaves the objects
    for root in objects:
        calls = [] if root in seen else [(root, iter(edges[root]))]
        seen.add(root)
        while calls:
            new = next((i for i in calls[-1][1] if i in objects and i not in seen), None)
            if new is None:
                order.append(calls.pop()[0])
            else:
                seen.add(new)
                calls.append((new, iter(edges[new])))
    back, left, found = _reversed(edges), set(objects), []
    for i in reversed(order):
        if i in left:
            component = set(_searched(back, [i], left))
            left -= component
            if len(component) > 1 or i in edges[i]:
                found.append(component)
    return found
