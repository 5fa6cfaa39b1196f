"""What a call asks the device, recorded so that a replay asks the same: ahead of it, or between two pieces of a graph.

A question is one if the host learns no more than true or false (`if t:`, `.item()` of a boolean). A graph cannot wait
for that. There are two ways out:

*Ahead.* `if labels.max() >= classes:`, `if mask.all():` and `if pad in ids:` read what the batch has in it. Each call
can compute the same from its batch before its graph is chosen, and each combination of answers has a graph of its own,
as those of random draws on the host have. So it is if the tensor is computed from the input and from constants alone,
by operations that can be repeated, and no cut is in front of it. Whole numbers that are kept from call to call, as in a
buffer, count as input, too, if the call has not written to them. Constants are numbers of Python's, and what is made
anew with values (`torch.ones`). About constants alone, the answer is always the same. Memory whose address is given out
(`data_ptr`) is neither from then on: a kernel of Triton's writes there, and no mode sees it.

*At a cut.* `if not torch.isfinite(logits).all():` is about anything else. There the graph ends, and another one begins.
A replay launches the first, reads the answer, and launches the second if that was captured with the same answer. Else
what the first has written is put back, and the call is eager. The code behind a question is never run on a guess: it
might index out of range where it was to raise, which no process survives.

In the capture the answers are given by their order: ahead, those of the key; at a cut, that of the rehearsal.

*Whole numbers.* `sizes.tolist()`, `torch.zeros(lengths.max())` and `x[mask]` have the host read whole numbers: those of
a tensor, as a size, or how many entries a mask selects. They are asked ahead as questions are, and are a part of the
key, or are always the same. They are asked at no cut: there, almost each call would have another answer. In the
rehearsal and the capture the operations that read them are given them (`host_counts`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._errors import CaptureError
from ..._text import comparable
from ..._torch.autograd.autograd import in_backward
from ..._torch.device.execution_trace import unrecorded
from ..._torch.tensors.host_counts import Count, counts_of, is_whole
from ..._torch.tensors.modes import enter, without_modes, without_torch_function
from ..._torch.tensors.operators import LIFT_FRESH, OperationCall, kind_of, unmarked_writes
from ..._torch.tensors.tensors import storage_address, storage_of
from ..._undo import Undo
from ..._user_line import UserLineFinder, compiler_runs, is_ampkits, real_frame, running_line, wraps_operations
from ..host.constants import MOST_ENTRIES
from ..host.given_numbers import AHEAD, GivenNumbers, nested, numbers_in, outermost, tell_lists, unwatched
from ..host.replaced import replace_here
from ..host.uploads import content_of
from .compared import ask_for_truths, is_plain
from .draw_paths import DrawOperation, DrawPath, Held, Leaf, NumberRead, Segment, Slot
from .uncapturable import remedy

wraps_operations(__file__)

_Geometry = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class _Made(NamedTuple):
    """Stands for a result of a recorded operation."""

    operation: int
    number: int


_Source = Leaf | Held | _Made


class Question(NamedTuple):
    """A tensor of the device, of which the host learns whether it is true, or a few whole numbers."""

    shape: torch.Size
    dtype: torch.dtype
    cuts: bool  # whether the graph is cut there. Otherwise it is asked ahead
    known: bool | tuple[int, ...] | None  # the answer, where that is always the same


class Wait(NamedTuple):
    """A question for whose answer each call waits."""

    line: str  # the user's line that asks, "" if it is not known
    remedy: str  # what to write instead of what a library does there, "" if it is in none that is known
    cuts: bool  # see `Question`


class AskedPath(NamedTuple):
    """What a call has asked."""

    path: DrawPath  # the questions that are asked ahead, with what computes them and the answers
    questions: tuple[Question | None, ...]  # for each tensor of the device that the host has read; None if no question
    answers: tuple[bool, ...]  # at the cuts
    # For each operation that reads whole numbers, these: each is the number that it always is, or `AHEAD` if it is
    # asked ahead. None for an operation that cannot be given them.
    numbers: tuple[tuple[Any, ...] | None, ...]
    early_at: frozenset[int]  # addresses of memory that operations have written by the last cut
    written_at: frozenset[int]  # and in all of the call
    early: Mapping[int, torch.UntypedStorage]  # by address: what was written by the last cut, and was there before
    waits: tuple[Wait, ...]

    def is_like(self, other: "AskedPath") -> bool:
        """Return whether another call has asked the same, with the same answers."""
        return self[:_ASKED] == other[:_ASKED]


class QuestionRecorder:
    """Records what a call asks about its input. It is called with each operation.

    Args:
        device: where the step computes.
        leaves: the arguments of the call.
        state: the tensors that calls keep, by path. Of those with whole numbers, each call may ask what is in them when
            it begins, as of an argument.
        is_constant: whether a tensor is the same in each call.
        is_drawn: whether there are numbers in it that the host has drawn; where graphs are emulated, in any tensor.
        cuts: whether graphs may be cut.
    """

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[Any],
        state: Mapping[str, Tensor],
        is_constant: Callable[[Tensor], bool],
        is_drawn: Callable[[Tensor], object],
        *,
        cuts: bool,
    ) -> None:
        self._device, self._is_constant, self._is_drawn, self._cuts = device, is_constant, is_drawn, cuts
        # With the number of its results, and what its arguments are made of.
        self._operations: list[tuple[Any, Any, Any, int, list[_Source | None]]] = []
        # By address and geometry: what a tensor is made of.
        self._made: dict[int, dict[_Geometry, _Source]] = {}
        self._reads: list[tuple[_Source, Callable[..., Any], Hashable]] = []  # with what is learned, and the answer
        self._questions: list[Question | None] = []
        self._answers: list[bool] = []
        self._waits: list[Wait] = []
        self._user_line: UserLineFinder | None = None  # known within the call
        self._numbers: list[tuple[Any, ...] | None] = []
        self._stacks = False  # whether tensors in a list were stacked
        self._is_given_counts = False  # whether the operation that runs can be given all numbers that it reads
        self._written_at: set[int] = set()
        self._early_at: frozenset[int] = frozenset()
        self._there: dict[int, torch.UntypedStorage] = {}  # what was written, and was there before
        self._early: dict[int, torch.UntypedStorage] = {}
        tensors: list[tuple[int | str, Tensor]] = [
            (number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
        ]
        self._made_at = {storage_address(leaf) for _, leaf in tensors}  # and what the arguments lie in
        kept = {id(tensor): (path, tensor) for path, tensor in state.items() if is_whole(tensor)}.values()
        self._kept_at = {path: storage_address(tensor) for path, tensor in kept}
        tensors += kept
        shared = Counter(storage_address(tensor) for _, tensor in tensors)
        for number, leaf in tensors:
            # Of arguments that share memory it cannot be told which one is asked about.
            if is_plain(leaf) and (address := storage_address(leaf)) and shared[address] == 1:
                self._made[address] = {_geometry(leaf): Leaf(number)}

    def __call__(self, call: OperationCall) -> None:
        """Take note of an operation."""
        op, results = call.op, call.made
        if call.written or call.kind.unmarked:
            unmarked = [(tensor, storage_address(tensor)) for tensor in unmarked_writes(call)]
            for tensor, address in (*zip(call.written, call.written_at, strict=True), *unmarked):
                self._written_at.add(address)
                if address not in self._made_at and (storage := storage_of(tensor)) is not None:
                    self._there.setdefault(address, storage)
            for _, address in unmarked:
                self._made.pop(address, None)
        self._made_at.update([address for address in call.made_at if address not in call.given_at])
        for address in (*call.made_at, *call.written_at):
            # Where it is not written to, nor a part of an argument, it is memory that was free, and is used again.
            if address in self._made and (call.written or address not in call.given_at):
                del self._made[address]
        if call.written or not results or not all(map(is_plain, results)):
            return
        if op is LIFT_FRESH and results[0].is_cpu and results[0].numel() <= MOST_ENTRIES:
            # Of Python's numbers. On another device it is one of the constants.
            self._made[call.made_at[0]] = _held(results[0])
            return
        if not (call.kind.repeatable or self._is_given_counts) or call.kind.name.startswith(("empty", "new_empty")):
            return
        sources = [*map(self._source, call.given, call.given_at)]
        if None in sources or not all(call.made_at):
            return
        if any(tensor.device.type != self._device.type for tensor in results):
            self._note_on_host(call, sources)
            return
        number = len(self._operations)
        self._operations.append((op, self._noted(call.args), self._noted(call.kwargs), len(results), sources))
        for i, (tensor, address) in enumerate(zip(results, call.made_at, strict=True)):
            self._made.setdefault(address, {})[_geometry(tensor)] = _Made(number, i)

    def _note_on_host(self, call: OperationCall, sources: list[_Source | None]) -> None:
        """Take note of numbers that were computed on the host, beside the device of the step, of constants alone."""
        if any(source is not None and self._of_input(source) for source in sources):
            return
        for tensor, address in zip(call.made, call.made_at, strict=True):
            if tensor.is_cpu and tensor.numel() <= MOST_ENTRIES:
                self._made.setdefault(address, {}).update(_held(tensor))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context of the call."""
        self._user_line = UserLineFinder(sys._getframe(), skip_torch=False)
        with Undo() as undo:
            for name, ask in (("__bool__", self._asked), ("item", self._item), ("tolist", self._listed)):
                replace_here(undo, Tensor, name, outermost(ask))
            ask_for_truths(undo, self._device)
            tell_lists(undo, self._device, self._numbers_of, self._stack)
            for owner, name in ((Tensor, "data_ptr"), (Tensor, "__dlpack__"), (torch.UntypedStorage, "data_ptr")):
                replace_here(undo, owner, name, self._give_out)
            yield

    def asked(self) -> AskedPath | None:
        """Return what was asked, None if nothing was."""
        if not self._stacks and all(each is None for each in (*self._questions, *self._numbers)):
            return None
        slots: dict[int, int] = {}
        segments, count = [], 0
        for source, learn, answer in self._reads:
            operations = []
            for number in self._needed(source):
                if number not in slots:
                    op, args, kwargs, results, _ = self._operations[number]
                    named = tuple(_with_slots(kwargs, slots).items())
                    operations.append(DrawOperation(op, _with_slots(args, slots), named))
                    slots[number] = count
                    count += results
            segments.append(Segment(tuple(operations), NumberRead(_with_slots(source, slots), learn), answer))
        path = DrawPath((*segments, Segment((), None)))
        told = tuple(self._questions), tuple(self._answers), tuple(self._numbers)
        return AskedPath(path, *told, self._early_at, frozenset(self._written_at), self._early, tuple(self._waits))

    def changed(self) -> set[str]:
        """Return the paths of what the call has asked about, and has written to then."""
        made = [source for read in self._reads for source in (read[0], *self._origins(read[0]))]
        paths = {source.number for source in made if isinstance(source, Leaf) and isinstance(source.number, str)}
        return {path for path in paths if self._kept_at[path] in self._written_at}

    def knows_numbers(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a capture can be given the numbers that an operation reads. To be called ahead of each one."""
        counts = counts_of(op, args, kwargs)
        counts = None if counts and compiler_runs() else counts
        self._is_given_counts = counts is not None
        if not counts or counts[0].tensor.device.type != self._device.type:
            return False
        found = [self._counted(count) for count in counts]
        sources = [source for source in found if source is not None]
        self._is_given_counts = len(sources) == len(counts)
        if not self._is_given_counts:
            self._numbers.append(None)
            return False
        with unwatched(self._device):
            numbers = [comparable(count.read()) for count in counts]
        known = [self._answered(source, type(number), number) for source, number in zip(sources, numbers, strict=True)]
        self._numbers.append(tuple(AHEAD if number is None else number for number in known))
        return True

    def _counted(self, count: Count) -> _Source | None:
        """Return what a number is made of, None if it cannot be asked ahead."""
        source = self._askable(count.tensor)
        if source is None or count.by is None:
            # Of other numbers than whole ones, almost each call has others.
            return None if source is None or (self._of_input(source) and not is_whole(count.tensor)) else source
        self._operations.append((count.by, (source,), {}, 1, [source]))
        return _Made(len(self._operations) - 1, 0)

    def _askable(self, tensor: Tensor) -> _Source | None:
        """Return what a tensor is made of that can be asked about ahead, or is always the same; None if it is not."""
        source = self._source(tensor, storage_address(tensor))
        if source is None or len(self._needed(source)) > _MOST_OPERATIONS:
            return None
        # Behind a cut, what is asked depends on the answer there, and the code that computes it may not run on a guess.
        return None if self._answers and self._of_input(source) else source

    def _answered(self, source: _Source, learn: Callable[..., Any], answer: Any) -> Any:
        """Take note of an answer. Return it if it is always the same, None if it is asked ahead."""
        if not self._of_input(source):
            return answer
        self._reads.append((source, learn, answer))
        self._note_wait(cuts=False)
        return None

    def _note_wait(self, *, cuts: bool) -> None:
        place = None if self._user_line is None else self._user_line()
        self._waits.append(Wait("", "", cuts) if place is None else Wait(place.line, remedy(place), cuts))

    def _asked(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.__bool__`."""
        if tensor.device.type != self._device.type:
            return original(tensor)
        source = self._askable(tensor)
        cuts = source is None
        if cuts and not (self._cuts and is_plain(tensor) and not self._is_left_out(tensor)):
            self._questions.append(None)
            return original(tensor)
        with unwatched(self._device):
            value = bool(original(tensor))
        known = None if source is None else self._answered(source, bool, value)
        self._questions.append(Question(tensor.shape, tensor.dtype, cuts, known))
        if cuts:
            self._note_wait(cuts=True)
            self._answers.append(value)
            self._early_at, self._early = frozenset(self._written_at - {0}), dict(self._there)
        return value

    def _numbers_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Return the numbers of a tensor of the device if a capture can be given them, else None."""
        is_short = is_whole(tensor) and tensor.numel() <= MOST_ENTRIES
        source = self._askable(tensor) if is_short else None
        if source is None:
            self._questions.append(None)
            return None
        with unwatched(self._device):
            numbers = numbers_in(tensor)
        self._questions.append(Question(tensor.shape, tensor.dtype, False, self._answered(source, tuple, numbers)))
        return numbers

    def _stack(self) -> None:
        self._stacks = True

    def _listed(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.tolist`."""
        numbers = self._numbers_of(tensor) if tensor.device.type == self._device.type else None
        return original(tensor) if numbers is None else nested(numbers, tensor.shape)

    def _is_left_out(self, tensor: Tensor) -> bool:
        """Return whether no graph is cut here: in a backward, for a draw, and for an optimizer of torch's on a CPU."""
        if in_backward() or self._is_drawn(tensor):
            return True
        return self._device.type == "cpu" and real_frame().f_code.co_filename.startswith(_OPTIMIZERS)

    def _item(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.item`. Other numbers are read by the operation in it."""
        if tensor.dtype is torch.bool:
            return self._asked(original, tensor)
        if tensor.device.type == self._device.type:
            self._questions.append(None)
        return original(tensor)

    def _give_out(self, original: Callable[..., Any], given: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the place of a method that tells where the memory of a tensor is, or a storage."""
        told = original(given, *args, **kwargs)
        # ampkit's own code writes nowhere by an address. It calls through `replaced`, as all others do, and may lie
        # between a line and its operation: `content_of` reads a constant while the user's operation is noted.
        if not is_ampkits(sys._getframe(2)):
            self._made.pop(storage_address(given) if isinstance(given, Tensor) else told, None)
        return told

    def _source(self, tensor: Tensor, address: int) -> _Source | None:
        if not is_plain(tensor):
            return None
        if self._is_constant(tensor):
            return Held(address, tensor)
        return self._made.get(address, {}).get(_geometry(tensor))

    def _noted(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._noted(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return tuple(map(self._noted, value))
        return self._source(value, storage_address(value)) if isinstance(value, Tensor) else comparable(value)

    def _of_input(self, source: _Source) -> bool:
        """Return whether the values of this are made of those of input or state, and not of their layout alone."""
        return any(isinstance(each, Leaf) for each in (source, *self._origins(source)))

    def _origins(self, source: _Source) -> list[_Source | None]:
        """Return what the values of this are made of."""
        made = [self._operations[number] for number in self._needed(source, of_values=True)]
        return [each for op, *_, sources in made for each in _of_values(op, sources)]

    def _needed(self, source: _Source, *, of_values: bool = False) -> list[int]:
        """Return the operations that compute this, or its values alone, in their order."""
        left: list[_Source | None] = [source]
        found = set[int]()
        while left:
            each = left.pop()
            if isinstance(each, _Made) and each.operation not in found:
                found.add(each.operation)
                op, *_, sources = self._operations[each.operation]
                left += _of_values(op, sources) if of_values else sources
        return sorted(found)


@contextmanager
def answering_questions(
    asked: AskedPath | None,
    device: torch.device,
    at_cut: Callable[[Tensor], bool],
    differs: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Context of a rehearsal or a capture, in which what a call asks gets the recorded answers, in their order.

    In a capture it is an error if the call does not ask all of it.

    Args:
        asked: what such calls ask, None for nothing.
        device: where they compute.
        at_cut: gives the answer where the graph is cut.
        differs: called if a number or an answer that is always the same is another one in a rehearsal. None in a
            capture.
    """
    captures = differs is None
    if asked is None:
        yield
        return
    questions = iter(asked.questions)
    outcomes, numbers = iter(asked.path.outcomes), iter(asked.numbers)

    def answer(learn: Callable[[Tensor], Any], original: Callable[..., Any], tensor: Tensor) -> Any:
        question = next(questions, None) if tensor.device.type == device.type else None
        if question is None:
            return original(tensor)
        if question[:2] != (tensor.shape, tensor.dtype):
            if captures:
                raise CaptureError(_OTHERS.format(running_line(real_frame())))
            return original(tensor)
        if question.cuts:
            return at_cut(tensor)
        expected = next(outcomes, None) if question.known is None else question.known
        if differs is None:
            return expected
        # In the modes of the rehearsal it would be an operation more than in the capture, and a question more.
        with without_torch_function(), without_modes(), unrecorded():
            found = learn(tensor)
        if found != expected:
            differs()
        return found

    def listed(original: Callable[..., Any], tensor: Tensor) -> Any:
        numbers = answer(numbers_in, lambda _: None, tensor)
        return original(tensor) if numbers is None else nested(numbers, tensor.shape)

    with Undo() as undo:
        for name in ("__bool__", "item"):
            replace_here(undo, Tensor, name, outermost(lambda original, tensor: answer(_is_true, original, tensor)))
        replace_here(undo, Tensor, "tolist", outermost(listed))
        ask_for_truths(undo, device)
        tell_lists(undo, device, lambda tensor: answer(numbers_in, lambda _: None, tensor))
        if any(given is not None for given in asked.numbers):
            enter(undo, GivenNumbers(device, numbers, outcomes, differs))
        yield
    left = [*questions, *(numbers if any(given is not None for given in asked.numbers) else ())]
    if captures and any(each is not None for each in left):
        raise CaptureError(_OTHERS.format("the step"))


def _of_values(op: Any, sources: list[_Source | None]) -> list[_Source | None]:
    """Return those that the values of an operation's result come from. Of `ones_like` that is none."""
    name = kind_of(op).name if hasattr(op, "overloadpacket") else ""  # or a function that counts
    return [] if name.startswith("new_") or name.endswith("_like") else sources


def _geometry(tensor: Tensor) -> _Geometry:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def _held(tensor: Tensor) -> dict[_Geometry, _Source]:
    """Return what a constant on the host is made of: of a copy of its numbers."""
    return {_geometry(tensor): Held(content_of(tensor), tensor.clone())}


def _with_slots(value: Any, slots: dict[int, int]) -> Any:
    if isinstance(value, _Made):
        return Slot(slots[value.operation] + value.number)
    if isinstance(value, dict):
        return {name: _with_slots(each, slots) for name, each in value.items()}
    return tuple(_with_slots(each, slots) for each in value) if type(value) is tuple else value


_is_true = Tensor.__bool__  # which is replaced
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_ASKED = AskedPath._fields.index("early_at")  # how many of its fields say what was asked
_MOST_OPERATIONS = 64  # of a question
_OTHERS = (
    "{0} asks the device something else than in the calls before, after the same answers. What it asks must depend on "
    "the batch and on what was asked before"
)
