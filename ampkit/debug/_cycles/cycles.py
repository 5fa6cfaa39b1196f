"""Which reference cycles keep tensors alive until Python's garbage collector runs, told in the user's own names."""

import gc
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..._arguments import check_callable
from ..._text import size_text
from ..._torch.autograd import graph_nodes, saved_by
from ..._torch.modes import without_torch_function
from .references import NAMELESS, chain, lines_of, storage_of

_CANDIDATES = 16  # tensors of a cycle that are described, largest first, until one proves to have been freed


@dataclass(frozen=True)
class Cycle:
    """Objects that refer to each other in a circle, and the tensors that they keep.

    Attributes:
        loop: the circle: `Trainer.callbacks -> list[0] -> function Trainer.fit.<locals>.log closure cell 'self' ->
            Trainer`.
        holds: how it gets to its largest tensor: `Trainer.history -> list[3] -> Tensor (64, 3) float32 cpu, 768 B`.
        lines: of the functions and frames involved, as `file:line: source`; of classes where there are none of those.
        advice: what to write instead.
        tensors: how many of different memory it keeps, those in gradients and autograd graphs too.
        bytes: how much memory they take.
        count: how many cycles read the same. `tensors` and `bytes` are of all of them.
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


class Cycles:
    """Context that finds the tensors which only reference cycles keep alive. Made by `ampkit.debug.cycles()`.

    Attributes:
        found: the cycles, those that keep most bytes first. Filled when the context ends.
        bytes: memory that all of them keep, each tensor counted once.
        tensors: how many of different memory.
    """

    def __init__(self) -> None:
        self.found: tuple[Cycle, ...] = ()
        self.bytes = 0
        self.tensors = 0
        self._before = (False, 0)
        self._garbage = 0

    def __enter__(self) -> "Cycles":
        gc.collect()
        self._before = gc.isenabled(), gc.get_debug()
        self._garbage = len(gc.garbage)
        gc.disable()
        # Also what the user's own gc.collect() finds is to be seen: it goes to gc.garbage then, and is freed later.
        gc.set_debug(self._before[1] | gc.DEBUG_SAVEALL)
        return self

    def __exit__(self, *error: object) -> None:
        enabled, flags = self._before
        try:
            gc.collect()
            with without_torch_function():
                drafts = _drafts(gc.garbage[self._garbage :])
        finally:
            del gc.garbage[self._garbage :]
            gc.set_debug(flags & ~gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(flags)
            if enabled:
                gc.enable()
        self._report(drafts)

    def _report(self, drafts: Sequence["_Draft"]) -> None:
        """Keep what was freed. A tensor that lives on has another owner, and is not the cycle's fault."""
        freed = {ref: size for draft in drafts for ref, size in draft.storages.items() if ref.expired()}
        self.bytes, self.tensors = sum(freed.values()), len(freed)
        cycles: dict[tuple[str, str, tuple[str, ...]], Cycle] = {}
        for draft in drafts:
            sizes = [size for ref, size in draft.storages.items() if ref in freed]
            if not sizes:
                continue
            holds = next((text for kept, text in draft.holds if not kept.isdisjoint(freed)), draft.holds[0][1])
            new = Cycle(draft.loop, holds, draft.lines, draft.advice, len(sizes), sum(sizes))
            key = new.loop, new.holds, new.lines
            old = cycles.get(key)
            cycles[key] = (
                new
                if old is None
                else replace(old, tensors=old.tensors + new.tensors, bytes=old.bytes + new.bytes, count=old.count + 1)
            )
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

    Such memory is neither used nor free: it comes and goes with the collector, and looks like a leak.

    ::

        with ampkit.debug.cycles() as found:
            for batch in itertools.islice(loader, 3):
                train_step(batch)
        print(found)

    Or, for one call: `print(ampkit.debug.cycles(train_step, batch))`.

    The collector is held back within, so give it a few steps, not an epoch. What was garbage before is collected first.
    Afterwards the garbage is freed and the collector is as it was.

    Args:
        function: called within, with the other arguments. What it returns is dropped.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        A context manager, which with `function` is done already: `.found`, `.bytes`, `.tensors`, and a report as text.
        Cycles that hold nothing but memory with another owner (the weights of a model in use) are left out. Not seen is
        a cycle through C++: a hook on a tensor that closes over the tensor, which no collector can free; nor one
        through a suspended generator, which the collector cuts before it can be looked at.

    Sync: none. Aliasing: none.
    """
    found = Cycles()
    if function is not None:
        check_callable("cycles", "function", function, "a function to call, or None for a context manager")
        with found:
            function(*args, **kwargs)
    return found


# --------------------------------------------------------------------------------------------------- what garbage holds


_Edges = list[list[int]]  # for each object, by number, those that it refers to


class _Draft(NamedTuple):
    """A cycle before it is known which of its tensors have no other owner. Refers to none of its objects."""

    loop: str
    holds: list[tuple[set[StorageWeakRef], str]]
    lines: tuple[str, ...]
    advice: str
    storages: dict[StorageWeakRef, int]


_Memory = dict[StorageWeakRef, int]  # bytes by storage


def _drafts(garbage: Sequence[object]) -> list[_Draft]:
    """Describe every cycle among some objects that leads to a tensor."""
    at = {id(thing): i for i, thing in enumerate(garbage)}
    edges = [[at[key] for key in map(id, gc.get_referents(thing)) if key in at] for thing in garbage]
    tensors = {i: memory for i, thing in enumerate(garbage) if (memory := _memory(thing))}
    holders = _reachable(_reversed(edges), tensors)
    return [_draft(garbage, edges, loop, tensors) for loop in _loops(edges, holders)]


_ADVICE = {
    types.TracebackType: "Keep str(error), not the error, or end with `del error`: its traceback holds every frame.",
    types.FunctionType: "Pass the function what it needs as an argument, or let it close over weakref.ref(object).",
}
_CUT = "Let one of them hold weakref.ref(other), or cut the circle when it is done with (`self.x = None`)."


def _memory(thing: object) -> _Memory:
    """Return the memory that a tensor keeps: its own, that of its gradient, and what its autograd graph saved.

    To the collector all but the first is C++. A loss of four bytes in a cycle can hold the activations of a whole step.
    """
    if not issubclass(type(thing), Tensor):
        return {}
    assert isinstance(thing, Tensor)
    graph = graph_nodes([thing])
    tensors = [thing, *(saved for node in graph for saved in saved_by(node))]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return dict(filter(None, map(storage_of, tensors)))


def _draft(garbage: Sequence[object], edges: _Edges, loop: set[int], tensors: dict[int, _Memory]) -> _Draft:
    """Describe one cycle.

    Args:
        garbage: the objects.
        edges: which of them each refers to.
        loop: those that can reach each other.
        tensors: those that have memory.
    """
    kept = sorted(_reachable(edges, loop) & tensors.keys(), key=lambda i: -sum(tensors[i].values()))
    circle = _circle(garbage, edges, loop, kept[0])
    starts = [i for i in circle if type(garbage[i]) not in NAMELESS] or circle
    paths = {i: [garbage[j] for j in _path(edges, starts, i)] for i in kept[:_CANDIDATES]}
    things = [garbage[i] for i in circle]
    return _Draft(
        chain([*things, things[0]]),
        [(set(tensors[i]), chain(path)) for i, path in paths.items()],
        tuple(lines_of([*things, *paths[kept[0]]])),
        next((text for kind, text in _ADVICE.items() if kind in map(type, things)), _CUT),
        {ref: size for i in kept for ref, size in tensors[i].items()},
    )


def _circle(garbage: Sequence[object], edges: _Edges, loop: set[int], tensor: int) -> list[int]:
    """Return the shortest circle through that object of a loop which is nearest to a tensor."""
    nearest = _path(edges, loop, tensor)[0]
    onward = [i for i in edges[nearest] if i in loop]
    circle = [nearest, *_path(edges, onward, nearest, loop)[:-1]]
    first = next((n for n, i in enumerate(circle) if type(garbage[i]) not in NAMELESS), 0)
    return circle[first:] + circle[:first]


# ------------------------------------------------------------------------------------------------------ walks of graphs


def _reversed(edges: _Edges) -> _Edges:
    back: _Edges = [[] for _ in edges]
    for i, following in enumerate(edges):
        for j in following:
            back[j].append(i)
    return back


def _reachable(edges: _Edges, starts: Iterable[int], within: Collection[int] | None = None) -> set[int]:
    """Return the nodes that can be reached, with those to start from."""
    seen, left = set(starts), list(starts)
    while left:
        new = {i for i in edges[left.pop()] if i not in seen and (within is None or i in within)}
        seen |= new
        left += new
    return seen


def _path(edges: _Edges, starts: Iterable[int], goal: int, within: Collection[int] | None = None) -> list[int]:
    """Return a shortest path from one of some nodes to another, both ends included."""
    came: dict[int, int | None] = dict.fromkeys(starts)
    left = deque(came)
    while left[0] != goal:  # callers know that there is a path
        i = left.popleft()
        new = [j for j in edges[i] if j not in came and (within is None or j in within)]
        came.update(dict.fromkeys(new, i))
        left.extend(dict.fromkeys(new))
    path, at = [], came[goal]
    while at is not None:
        path.append(at)
        at = came[at]
    return [*path[::-1], goal]


def _loops(edges: _Edges, nodes: set[int]) -> list[set[int]]:
    """Return the sets of nodes that can reach each other, a node alone only if it refers to itself.

    Kosaraju's algorithm, without recursion: garbage can be a chain of a million objects.
    """
    back, left, found = _reversed(edges), set(nodes), []
    for node in reversed(_finished(edges, nodes)):
        if node in left:
            part = _reachable(back, [node], left)
            left -= part
            if len(part) > 1 or node in edges[node]:
                found.append(part)
    return found


def _finished(edges: _Edges, nodes: set[int]) -> list[int]:
    """Return the nodes in the order in which a depth-first search is done with them."""
    seen: set[int] = set()
    order = []
    for root in nodes:
        calls = [] if root in seen else [(root, iter(edges[root]))]
        seen.add(root)
        while calls:
            new = next((i for i in calls[-1][1] if i in nodes and i not in seen), None)
            if new is None:
                order.append(calls.pop()[0])
            else:
                seen.add(new)
                calls.append((new, iter(edges[new])))
    return order
