"""The layouts without a graph: how far each one's warm-up is, or why it is never captured."""

import enum
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ..compare.rehearsal import Rehearsal
from ..graph.cache import Outputs
from ..graph.graph import Graph
from ..graph.kernel_names import NOT_NOTED, KernelNames, NotedKernels
from ..graph.timing import Timing
from ..keys.key import Key
from ..state.overlaps import Writes
from .options import WARM_UP


class Stage(enum.Enum):
    """How far a layout without a graph is."""

    COLD = enum.auto()  # its next call is a part of its warm-up
    WARM = enum.auto()  # its next call is captured, unless the preflight has found a problem
    REFUSED = enum.auto()  # all its calls are eager; `Layout.refusal` says why


class Layout:
    """What is known of a key that has no graph.

    Args:
        reason: what the calls of its warm-up are counted under.
        warmup: how many eager calls come before its capture.
        lenient: see `Rehearsal`.
        told: see below.
        names: notes the modules of its kernels; None if nobody wants them.

    Attributes:
        reason: as given; it may be set before each call.
        calls: how many eager calls there were so far.
        evictions: how often its graph was dropped to make room for another one.
        checked: whether it has been called under the preflight.
        problem: what the preflight found; "" if it found nothing.
        unreadable: why it cannot be told what it reads; "" if it can.
        rehearsal: compares its capture with an eager call.
        kernels: what was noted of those of that call.
        differed: whether a capture differed from that call.
        refusal: why it is never captured; "" if it may be.
        told: whether its code is told that it is being captured, in eager calls too. Then it may take another branch.
        problem_untold: what the preflight found while the code was told the truth; "" if it found nothing.
        writes: the tensors of the state that its calls change.
        timing: how long its calls take.
        path: what its call under the preflight has drawn on the host, see `HostDraws`; None if it draws nothing there.
    """

    def __init__(self, reason: str, warmup: int, lenient: bool, told: bool, names: KernelNames | None = None) -> None:
        self.reason: str = reason
        self._warmup = warmup
        self._lenient = lenient
        self.calls: int = 0
        self.evictions: int = 0
        self.checked: bool = False
        self.problem = ""
        self.unreadable = ""
        self._names = names
        self.rehearsal: Rehearsal = Rehearsal(lenient)
        self.kernels: NotedKernels = NOT_NOTED
        self.differed = False
        self.refusal = ""
        self.told = told
        self.problem_untold = ""
        self.writes: Writes = Writes()
        self.timing: Timing = Timing()
        self.path: Any = None

    @property
    def stage(self) -> Stage:
        """How far it is."""
        if self.refusal:
            return Stage.REFUSED
        return Stage.WARM if self.calls_left <= 0 and (self.problem or self.rehearsal.done) else Stage.COLD

    @property
    def calls_left(self) -> int:
        """How many eager calls its warm-up still takes: below 1 if it only lacks a rehearsal."""
        # If more shapes take turns than graphs are kept, each capture drops a graph. So the wait doubles each time.
        return (self._warmup << self.evictions) - self.calls

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context of the eager call before the capture."""
        names = nullcontext([self.kernels]) if self._names is None else self._names.noted(self.rehearsal.numbers)
        with self.rehearsal.rehearsing(), names as noted:
            yield
        self.kernels = noted[0]

    def named(self, graph: Graph) -> Graph:
        """Return the graph of the capture, marked in traces if somebody wants names."""
        return graph if self._names is None else self._names.named(graph, [self.kernels])

    def refuse(self, reason: str) -> None:
        """Make all calls eager from now on, for this reason."""
        self.refusal = reason

    def evict(self) -> None:
        """Begin the warm-up again, because the graph was dropped to make room for another one."""
        self.calls, self.evictions = 0, self.evictions + 1
        self.checked, self.rehearsal, self.kernels = False, Rehearsal(self._lenient), NOT_NOTED
        self.reason = f"{WARM_UP} again: its graph made room for another"


class Layouts:
    """The layouts that have no graph, the oldest first.

    What other ranks draw makes another graph, but not another layout, for this rank does the same in all such calls.

    Args:
        warmup: how many eager calls come before the capture of a layout.
        lenient: see `Rehearsal`.
        told: whether the code of all layouts is told that it is being captured.
        names: see `Layout`.
        words: what a first warm-up is counted under.

    Attributes:
        lenient: as given.
        names: as given.
        reason: what a warm-up is counted under if the same input had one before, under other settings.
    """

    def __init__(
        self, warmup: int, lenient: bool, told: bool, names: KernelNames | None = None, words: str = WARM_UP
    ) -> None:
        self._told = told
        self.names = names
        self._warmup = warmup
        self.lenient = lenient
        self.reason = self._words = words
        self._by_key: OrderedDict[Key, Layout] = OrderedDict()
        self._told_later: set[int] = set()  # hashes of the inputs of `tell`
        self._seen: set[int] = set()  # hashes of inputs; the inputs themselves would keep objects of the user's alive

    def make_outputs(self, tree: Any) -> Outputs:
        """Return what each replay gives the caller, with no kernel of its own if kernels are to have names."""
        return Outputs(tree, gathers=self.names is None)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key._replace(joint=0) in self._by_key

    def of(self, key: Key) -> Layout:
        """Return the layout of this key, a new one if there is none. The oldest is dropped if there are too many."""
        key = key._replace(joint=0) if key.joint else key
        layout = self._by_key.get(key)
        if layout is None:
            if len(self._by_key) == MAX_LAYOUTS:
                self._by_key.popitem(last=False)
            seen = hash((key.spec, key.phase))
            told = self._told or seen in self._told_later
            reason = self.reason if seen in self._seen else self._words
            layout = Layout(reason, self._warmup, self.lenient, told, self.names)
            self._by_key[key] = layout
            if len(self._seen) < _MAX_SEEN:
                self._seen.add(seen)
        return layout

    def move(self, key: Key, to: Key) -> None:
        """Have the layout of a key be that of another key from now on."""
        layout = self._by_key.pop(key, None)
        if layout is not None:
            self._by_key[to] = layout

    def tell(self, key: Key) -> None:
        """Have the code of this input be told that it is being captured, also if its layout has to begin again."""
        self._told_later.add(hash((key.spec, key.phase)))

    def clear(self) -> None:
        """Forget all layouts."""
        self._by_key.clear()


MAX_LAYOUTS = 256  # batches that contain the number of the step make one per call
_MAX_SEEN = 4096
