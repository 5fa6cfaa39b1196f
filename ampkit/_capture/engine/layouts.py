"""The layouts without a graph: how far each one's warm-up is, or why it is never captured."""

from collections import OrderedDict
from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..compare.rehearsal import Rehearsal
from ..graph.cache import GraphOutputs
from ..graph.capture_query import Answer
from ..graph.kernel_names import NOT_NOTED, KernelNames, NotedKernels
from ..graph.timing import Timing
from ..keys.key import Key
from ..preflight.touched import Use
from ..state.overlaps import Writes
from .options import WARM_UP


@dataclass
class Cold:
    """The next call is a part of the warm-up. Only `Layout` writes the attributes."""

    calls_left: int  # how many eager calls the warm-up still takes: below 1 if it only lacks a rehearsal
    calls: int = 0  # how many it had so far
    checked: bool = False  # whether one of them was made under the preflight


@dataclass(frozen=True)
class Warm:
    """The next call is captured, unless the warm-up has found a problem."""

    after: Cold  # the warm-up, which goes on with another rehearsal if the layout needs another graph


@dataclass(frozen=True)
class Refused:
    """All calls are eager."""

    why: str  # what they are counted under


class Layout:
    """What is known of a key that has no graph. Others read the attributes, and call methods to change them.

    Args:
        reason: what the calls of its warm-up are counted under.
        warmup: how many eager calls come before its capture.
        lenient: see `Rehearsal`.
        answer: what its code is told that asks whether it is being captured.
        names: notes the modules of its kernels; None if nobody wants them.

    Attributes:
        stage: how far it is.
        reason: as given.
        answer: as given. With the other answer its code may take another branch.
        evictions: how often its graph was dropped to make room for another one.
        problem: why it cannot be captured, as far as its eager calls have shown; "" if it can be.
        unreadable: why it cannot be told what it reads; "" if it can.
        written: what the rehearsal has changed on the host, as a call under the preflight before it.
        written_before: what the last call that was watched has changed.
        rehearsal: compares its capture with an eager call.
        kernels: what was noted of those of that call.
        writes: the tensors of the state that its calls change.
        uploads_in_operations: whether operations of its calls get constants of the host, see `Uploads.operands`.
        timing: how long its calls take.
        loose: how the last call under the preflight has used tensors that nobody owns.
    """

    def __init__(
        self, reason: str, warmup: int, lenient: bool, answer: Answer, names: KernelNames | None = None
    ) -> None:
        self._warmup, self._lenient, self._names = warmup, lenient, names
        self.stage: Cold | Warm | Refused = Cold(warmup)
        self.reason: str = reason
        self.answer = answer
        self.evictions: int = 0
        self.problem: str = ""
        self.unreadable: str = ""
        self.written: list[str] = []
        self.written_before: Set[str] = frozenset()
        self.rehearsal: Rehearsal = Rehearsal(lenient)
        self.kernels: NotedKernels = NOT_NOTED
        self.writes: Writes = Writes()
        self.uploads_in_operations: bool = False
        self.timing: Timing = Timing()
        self.loose: list[Use] = []
        self._has_differed = self._looks_again = False
        self._outlived = 0  # how many graphs were dropped that did not fit any more

    # ------------------------------------------------------------------------------------------------- the warm-up

    def count_under(self, reason: str) -> None:
        """Count the calls of the warm-up under this reason from now on."""
        self.reason = reason

    def count_call(self, cold: Cold) -> None:
        """Take note of a call of the warm-up."""
        cold.calls += 1
        cold.calls_left -= 1

    def ask_again(self, cold: Cold) -> None:
        """Take note of a call under the preflight that needs another one, before the rehearsal."""
        self.count_call(cold)
        cold.calls_left = max(cold.calls_left, 2)

    def note_preflight(self, cold: Cold, problem: str) -> None:
        """Take note of what the call under the preflight has shown, "" if it was nothing."""
        self.problem = problem
        cold.checked = True  # last, or an interrupt could hide the problem

    def note_look(self, uploads_in_operations: bool, loose: list[Use]) -> None:
        """Take note of what the call under the preflight has shown beside problems."""
        self.uploads_in_operations, self.loose = uploads_in_operations, loose

    def forget_writes(self) -> None:
        """Have the next call note anew which tensors of the state it changes: there are more of them."""
        self.writes = Writes()

    def look_again(self, cold: Cold, problem: str) -> None:
        """Have the next call be made under the preflight again, and the one behind it as a rehearsal; once.

        `problem` is why the layout cannot be captured, if that did not help. If it is "", it may be done any number of
        times.
        """
        if problem and self._looks_again:
            self.problem = problem
        else:
            self._looks_again = bool(problem)
            cold.checked, cold.calls_left = False, 2

    def note_reads(self, why_unreadable: str, written: Set[str]) -> None:
        """Take note of why it cannot be told what a call has read, "" if it can; and of what it has changed."""
        self.written_before = written
        self.unreadable = self.unreadable or why_unreadable

    def note_writes(self, written: list[str]) -> None:
        """Take note of what the rehearsal has changed on the host, as a call before it."""
        self.written = written

    def end_call(self, cold: Cold, problem: str) -> None:
        """End a call of the warm-up, and the warm-up if that was its last call.

        `problem` is why the layout cannot be captured, as far as that is known; "" if it can be.
        """
        self.problem = problem
        if cold.calls_left <= 0 and (problem or self.rehearsal.done):
            self.stage = Warm(cold)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context of the eager call before the capture."""
        names = nullcontext([self.kernels]) if self._names is None else self._names.noted(self.rehearsal.numbers)
        with self.rehearsal.rehearsing(), names as noted:
            yield
        self.kernels = noted[0]

    # ------------------------------------------------------------------------------------------------- the capture

    def difference(self) -> str | None:
        """Return where the capture differs from the rehearsal, see `Rehearsal`. Another capture needs another one."""
        difference = self.rehearsal.difference()
        if isinstance(self.stage, Warm) and not self.rehearsal.done:
            self.stage = self.stage.after
        return difference

    def is_forgiven(self) -> bool:
        """Return whether the capture differs for the first time."""
        first, self._has_differed = not self._has_differed, True
        return first

    def evict(self) -> None:
        """Begin the warm-up again, because the graph was dropped to make room for another one."""
        self.evictions += 1
        self._begin_again("its graph made room for another")

    def outlive(self) -> None:
        """Begin the warm-up again, because the graph was dropped: what it was captured with has not come back."""
        self._outlived += 1
        self._begin_again("something else lies in an attribute, a dict or a list for good")

    def _begin_again(self, why: str) -> None:
        # If more shapes take turns than graphs are kept, each capture drops a graph. So the wait doubles each time.
        self.stage = Cold(self._warmup << (self.evictions + self._outlived))
        self.rehearsal, self.kernels = Rehearsal(self._lenient), NOT_NOTED
        self.count_under(f"{WARM_UP} again: {why}")

    # -------------------------------------------------------------------------------------------------- the refusal

    def refuse(self, why: str) -> None:
        """Make all calls eager from now on, for this reason."""
        self.stage = Refused(why)

    @property
    def refusal(self) -> str:
        """Why it is never captured; "" if it may be."""
        return self.stage.why if isinstance(self.stage, Refused) else ""


class Layouts:
    """The layouts that have no graph, the oldest first.

    What other ranks decide makes another graph, but not another layout, for this rank does the same in all such calls.

    Args:
        warmup: how many eager calls come before the capture of a layout.
        lenient: see `Rehearsal`.
        sees_capture: what the code of all layouts is told at first, see `Answer`.
        may_show_capture: whether it may be told something else, see `Answer`.
        names: see `Layout`.
        first_reason: what a first warm-up is counted under.

    Attributes:
        lenient: as given.
        names: as given.
        reason: what a warm-up is counted under if the same input had one before, under other settings.
    """

    def __init__(
        self,
        warmup: int,
        *,
        lenient: bool,
        sees_capture: bool,
        may_show_capture: bool,
        names: KernelNames | None,
        first_reason: str,
    ) -> None:
        self._warmup = warmup
        self._sees_capture, self._may_show_capture = sees_capture, may_show_capture
        self.names = names
        self.lenient = lenient
        self.reason = self._first_reason = first_reason
        self._by_key: OrderedDict[Key, Layout] = OrderedDict()
        self._see_capture: set[int] = set()  # hashes of the inputs of `show_capture`
        self._seen: set[int] = set()  # hashes of inputs; the inputs themselves would keep objects of the user's alive

    def make_outputs(self, tree: Any) -> GraphOutputs:
        """Return what each replay gives the caller, with no kernel of its own if kernels are to have names."""
        return GraphOutputs(tree, gathers=self.names is None)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    def __contains__(self, key: Key) -> bool:
        return key._replace(ranks_outcome=0) in self._by_key

    def layout_of(self, key: Key) -> Layout:
        """Return the layout of this key, a new one if there is none. The oldest is dropped if there are too many."""
        key = key._replace(ranks_outcome=0) if key.ranks_outcome else key
        layout = self._by_key.get(key)
        if layout is None:
            if len(self._by_key) == MAX_LAYOUTS:
                self._by_key.popitem(last=False)
            seen = hash((key.spec, key.phase))
            answer = Answer(self._sees_capture or seen in self._see_capture, may_change=self._may_show_capture)
            reason = self.reason if seen in self._seen else self._first_reason
            layout = Layout(reason, self._warmup, self.lenient, answer, self.names)
            self._by_key[key] = layout
            if len(self._seen) < _MAX_SEEN:
                self._seen.add(seen)
        return layout

    def move(self, key: Key, to: Key) -> None:
        """Have the layout of a key be that of another key from now on."""
        layout = self._by_key.pop(key._replace(ranks_outcome=0), None)
        if layout is not None:
            self._by_key[to._replace(ranks_outcome=0)] = layout

    def show_capture(self, key: Key) -> None:
        """Have the code of this input be told that it is being captured, also if its layout has to begin again."""
        self._see_capture.add(hash((key.spec, key.phase)))

    def clear(self) -> None:
        """Forget all layouts."""
        self._by_key.clear()


MAX_LAYOUTS = 256  # batches that contain the number of the step make one per call
_MAX_SEEN = 4096


IN_PARTS = "in parts"  # what such calls are counted under


class Splitter:
    """Does calls in parts that cannot be captured as a whole. This one takes no layout."""

    @property
    def has_parts(self) -> bool:
        """Whether some layout is done in parts, or may be."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the graphs of the parts take."""
        return 0

    def takes(self, key: Key, layout: Layout) -> bool:
        """Return whether the calls of a layout are done in parts from now on, because of its `problem`."""
        return False

    def call(self, engine: Any, layout: Layout, phase: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call of a layout that is done in parts, with the engine's `run` and `give_up`."""
        raise AssertionError  # it takes none

    def fields(self) -> dict[str, Any]:
        """Return the fields of the report that say what is captured, and why the rest is not."""
        return {}

    def close(self) -> None:
        """Release what is captured."""


NEVER = Splitter()
