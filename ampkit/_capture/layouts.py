"""How far each layout without a graph is on its way to one, or why it never gets one."""

import enum
from collections import OrderedDict
from collections.abc import Iterator

from .overlaps import Writes
from .rehearsal import Rehearsal
from .timing import Timing
from .variation import Key

WARM_UP = "warm-up"  # what eager calls before a capture are counted under


class Stage(enum.Enum):
    """How far a layout is. One that has a graph is in the cache."""

    COLD = enum.auto()  # its next call is a part of its warm-up
    WARM = enum.auto()  # its next call is captured, unless something is known that cannot be
    REFUSED = enum.auto()  # all its calls are eager, for the reason that `Layout.refusal` gives


class Layout:
    """What is known of a key that has no graph.

    Args:
        reason: what the calls of its warm-up are counted under.
        warmup: how many eager calls it takes.
        lenient: see `Rehearsal`.

    Attributes:
        calls: eager calls so far.
        evictions: how often its graph made room for another one.
        looked: whether it has been called under the preflight.
        problem: what the preflight found; "" if nothing.
        rehearsal: the comparison of its capture with an eager call.
        differed: whether a capture differed from that call.
        refusal: why it is never captured; "" if it may be.
        writes: what its calls change.
        timing: how long its calls take.
    """

    def __init__(self, reason: str, warmup: int, lenient: bool) -> None:
        self.reason = reason
        self._warmup = warmup
        self._lenient = lenient
        self.calls = 0
        self.evictions = 0
        self.looked = False
        self.problem = ""
        self.rehearsal = Rehearsal(lenient)
        self.differed = False
        self.refusal = ""
        self.writes = Writes()
        self.timing = Timing()

    @property
    def stage(self) -> Stage:
        """How far it is."""
        if self.refusal:
            return Stage.REFUSED
        return Stage.WARM if self.to_come <= 0 and (self.problem or self.rehearsal.done) else Stage.COLD

    @property
    def to_come(self) -> int:
        """How many eager calls it takes from now on: below 1 if it waits only for a rehearsal."""
        # Shapes that take turns in too few graphs would be captured over and over: each time after twice the wait.
        return (self._warmup << self.evictions) - self.calls

    def evict(self) -> None:
        """Begin again: its graph has made room for another one."""
        self.calls, self.evictions = 0, self.evictions + 1
        self.looked, self.rehearsal = False, Rehearsal(self._lenient)
        self.reason = f"{WARM_UP} again: its graph made room for another"


class Layouts:
    """The layouts that have no graph, the one that came first first.

    Args:
        warmup: eager calls that a layout takes before its capture.
        lenient: see `Rehearsal`.

    Attributes:
        lenient: as given.
        reason: what the warm-up of an input is counted under that was warm before, under other settings.
    """

    def __init__(self, warmup: int, lenient: bool) -> None:
        self._warmup = warmup
        self.lenient = lenient
        self.reason = WARM_UP
        self._by_key: OrderedDict[Key, Layout] = OrderedDict()
        self._seen: set[int] = set()  # inputs that came, by hash: the inputs may hold what is the user's

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def of(self, key: Key) -> Layout:
        """Return the layout of this key: a new one if it has none yet. Then the first of too many goes."""
        layout = self._by_key.get(key)
        if layout is None:
            if len(self._by_key) == MAX_LAYOUTS:
                self._by_key.popitem(last=False)
            seen = hash((key.spec, key.phase))
            layout = Layout(self.reason if seen in self._seen else WARM_UP, self._warmup, self.lenient)
            self._by_key[key] = layout
            if len(self._seen) < _MAX_SEEN:
                self._seen.add(seen)
        return layout

    def clear(self) -> None:
        """Forget them all."""
        self._by_key.clear()


MAX_LAYOUTS = 256  # a batch that holds a step number makes one per call
_MAX_SEEN = 4096
