"""What a call asks the device, recorded so that a replay asks the same: ahead of it, or between two pieces of a graph.

A question is one if the host learns no more than true or false (`if t:`, `.item()` of a boolean). A graph cannot wait
for that. There are two ways out:

*Ahead.* `if labels.max() >= classes:`, `if mask.all():` and `if pad in ids:` read what the batch has in it. Each call
can compute the same from its batch before its graph is chosen, and each combination of answers has a graph of its own,
as those of random draws on the host have. So it is if the tensor is computed from the input and from constants alone,
by operations that can be repeated, and no cut is in front of it. Constants are numbers of Python's, and what is made
anew with values (`torch.ones`). About constants alone, the answer is always the same. Memory whose address is given out
(`data_ptr`) is neither from then on: a kernel of Triton's writes there, and no mode sees it.

*At a cut.* `if not torch.isfinite(logits).all():` is about anything else. There the graph ends, and another one begins.
A replay launches the first, reads the answer, and launches the second if that was captured with the same answer. Else
what the first has written is put back, and the call is eager. The code behind a question is never run on a guess: it
might index out of range where it was to raise, which no process survives.

In the capture the answers are given by their order: ahead, those of the key; at a cut, that of the rehearsal.

A number that the host reads (`.item()`, `torch.arange(n)[-1]` as a size) is no question. But if it is computed from
constants alone, it is always the same, and the capture gets that one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._errors import CaptureError
from ..._torch.autograd.autograd import in_backward
from ..._torch.tensors.fast_paths import autocast_of_parts
from ..._torch.tensors.modes import WatchingMode, enter, without_modes, without_torch_function
from ..._torch.tensors.operators import LIFT_FRESH, READ, OperationCall, kind_of, unmarked_writes
from ..._torch.tensors.tensors import storage_address, storage_of
from ..._undo import Undo
from ..._user_line import real_frame, running_line, wraps_operations
from ..host.constants import MOST_ENTRIES
from ..host.replaced import replace_here
from ..host.uploads import content_of
from .compared import ask_for_truths, is_plain
from .draw_paths import DrawOperation, DrawPath, Held, Leaf, NumberRead, Segment, Slot

wraps_operations(__file__)

_Geometry = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class _Made(NamedTuple):
    """Stands for a result of a recorded operation."""

    operation: int
    number: int


_Source = Leaf | Held | _Made


class Question(NamedTuple):
    """A tensor of the device, of which the host learns whether it is true."""

    shape: torch.Size
    dtype: torch.dtype
    cuts: bool  # whether the graph is cut there. Otherwise it is asked ahead
    known: bool | None  # the answer, where that is always the same


class AskedPath(NamedTuple):
    """What a call has asked."""

    path: DrawPath  # the questions that are asked ahead, with what computes them and the answers
    questions: tuple[Question | None, ...]  # for each tensor of the device that the host has read; None if no question
    answers: tuple[bool, ...]  # at the cuts
    numbers: tuple[Any, ...]  # for each read by an operation, the number if it is always the same, else None
    early_at: frozenset[int]  # addresses of memory that operations have written by the last cut
    written_at: frozenset[int]  # and in all of the call
    early: Mapping[int, torch.UntypedStorage]  # by address: what was written by the last cut, and was there before

    def is_like(self, other: "AskedPath") -> bool:
        """Return whether another call has asked the same, with the same answers."""
        return self[:_ASKED] == other[:_ASKED]


class QuestionRecorder:
    """Records what a call asks about its input. It is called with each operation.

    Args:
        device: where the step computes.
        leaves: the arguments of the call.
        is_constant: whether a tensor is the same in each call.
        is_drawn: whether there are numbers in it that the host has drawn; where graphs are emulated, in any tensor.
        cuts: whether graphs may be cut.
    """

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[Any],
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
        self._reads: list[tuple[_Source, bool]] = []
        self._questions: list[Question | None] = []
        self._answers: list[bool] = []
        self._numbers: list[Any] = []
        self._written_at: set[int] = set()
        self._early_at: frozenset[int] = frozenset()
        self._there: dict[int, torch.UntypedStorage] = {}  # what was written, and was there before
        self._early: dict[int, torch.UntypedStorage] = {}
        tensors = [(number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        shared = Counter(storage_address(leaf) for _, leaf in tensors)
        self._made_at = set(shared)  # and what the arguments lie in
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
            held = Held(content_of(results[0]), results[0].clone())
            self._made[call.made_at[0]] = {_geometry(results[0]): held}
            return
        if not call.kind.repeatable or call.kind.name.startswith(("empty", "new_empty")):
            return
        sources = [*map(self._source, call.given, call.given_at)]
        if None in sources or not all(call.made_at):
            return
        if any(tensor.device.type != self._device.type for tensor in results):
            return
        number = len(self._operations)
        self._operations.append((op, self._noted(call.args), self._noted(call.kwargs), len(results), sources))
        for i, (tensor, address) in enumerate(zip(results, call.made_at, strict=True)):
            self._made.setdefault(address, {})[_geometry(tensor)] = _Made(number, i)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context of the call."""
        with Undo() as undo:
            for name, ask in (("__bool__", _outermost(self._asked)), ("item", _outermost(self._item))):
                replace_here(undo, Tensor, name, ask)
            ask_for_truths(undo, self._device)
            for owner, name in ((Tensor, "data_ptr"), (Tensor, "__dlpack__"), (torch.UntypedStorage, "data_ptr")):
                replace_here(undo, owner, name, self._give_out)
            yield

    def asked(self) -> AskedPath | None:
        """Return what was asked, None if nothing was."""
        if not any(each is not None for each in (*self._questions, *self._numbers)):
            return None
        slots: dict[int, int] = {}
        segments, count = [], 0
        for source, answer in self._reads:
            operations = []
            for number in self._needed(source):
                if number not in slots:
                    op, args, kwargs, results, _ = self._operations[number]
                    named = tuple(_with_slots(kwargs, slots).items())
                    operations.append(DrawOperation(op, _with_slots(args, slots), named))
                    slots[number] = count
                    count += results
            segments.append(Segment(tuple(operations), NumberRead(_with_slots(source, slots), bool), answer))
        path = DrawPath((*segments, Segment((), None)))
        told = tuple(self._questions), tuple(self._answers), tuple(self._numbers)
        return AskedPath(path, *told, self._early_at, frozenset(self._written_at), self._early)

    def knows_number(self, call: OperationCall) -> bool:
        """Return whether an operation reads a number that is always the same. To be called with each operation."""
        if call.op is not READ or call.given[0].device.type != self._device.type:
            return False
        source = self._source(call.given[0], call.given_at[0]) if self._cuts else None
        known = source is not None and len(self._needed(source)) <= _MOST_OPERATIONS and not self._of_input(source)
        self._numbers.append(call.result if known else None)
        return known

    def _asked(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.__bool__`."""
        if tensor.device.type != self._device.type:
            return original(tensor)
        source = self._source(tensor, storage_address(tensor))
        is_constant = source is not None and not self._of_input(source)
        # Behind a cut, what is asked depends on the answer there, and the code that computes it may not run on a guess.
        behind = bool(self._answers) and not is_constant
        if source is not None and (behind or len(self._needed(source)) > _MOST_OPERATIONS):
            source, is_constant = None, False
        cuts = source is None
        if cuts and not (self._cuts and is_plain(tensor) and not self._is_left_out(tensor)):
            self._questions.append(None)
            return original(tensor)
        with Undo() as undo, without_modes():  # a question is no finding
            if tensor.is_cuda:
                undo.note(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
                torch.cuda.set_sync_debug_mode("default")
            value = bool(original(tensor))
        self._questions.append(Question(tensor.shape, tensor.dtype, cuts, value if is_constant else None))
        if source is None:
            self._answers.append(value)
            self._early_at, self._early = frozenset(self._written_at - {0}), dict(self._there)
        elif not is_constant:
            self._reads.append((source, value))
        return value

    def _is_left_out(self, tensor: Tensor) -> bool:
        """Return whether no graph is cut here: in a backward, for a draw, and for an optimizer of torch's on a CPU."""
        if in_backward() or self._is_drawn(tensor):
            return True
        return self._device.type == "cpu" and real_frame().f_code.co_filename.startswith(_OPTIMIZERS)

    def _item(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.item`. Of a number the host may learn more than true or false."""
        if tensor.dtype is torch.bool:
            return self._asked(original, tensor)
        if tensor.device.type == self._device.type:
            self._questions.append(None)
        return original(tensor)

    def _give_out(self, original: Callable[..., Any], given: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the place of a method that tells where the memory of a tensor is, or a storage."""
        told = original(given, *args, **kwargs)
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
        return self._source(value, storage_address(value)) if isinstance(value, Tensor) else value

    def _of_input(self, source: _Source) -> bool:
        """Return whether the values of this are made of those of the input, and not of its layout alone."""
        made = [self._operations[number] for number in self._needed(source, of_values=True)]
        origins = [source, *(each for op, *_, sources in made for each in _of_values(op, sources))]
        return any(isinstance(each, Leaf) for each in origins)

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


class _KnownNumbers(WatchingMode):
    """Gives the host the numbers that are always the same, in their order. With `differs`, they are compared instead.

    Args:
        device: of the tensors that have them.
        numbers: see `AskedPath`.
        differs: called if a number is another one.
    """

    def __init__(self, device: torch.device, numbers: Iterator[Any], differs: Callable[[], None] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._device, self._numbers, self._differs = device, numbers, differs

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = next(self._numbers, None) if op is READ and args[0].device.type == self._device.type else None
        if number is not None and self._differs is None:
            return number
        with autocast_of_parts(op):
            result = op(*args, **(kwargs or {}))
        if number is not None and self._differs is not None and result != number:
            self._differs()
        return result


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
    outcomes = iter(asked.path.outcomes)

    @_outermost
    def answer(original: Callable[..., Any], tensor: Tensor) -> Any:
        if tensor.device.type == device.type and (question := next(questions, None)) is not None:
            if question[:2] != (tensor.shape, tensor.dtype):
                if captures:
                    raise CaptureError(_OTHERS.format(running_line(real_frame())))
            elif question.cuts:
                original = at_cut
            elif captures:
                return next(outcomes) if question.known is None else question.known
            else:
                # In the modes of the rehearsal it would be an operation more than in the capture, and a question more.
                with without_torch_function(), without_modes():
                    found = bool(original(tensor))
                if found is not (next(outcomes) if question.known is None else question.known) and differs is not None:
                    differs()
                return found
        return original(tensor)

    with Undo() as undo:
        for name in ("__bool__", "item"):
            replace_here(undo, Tensor, name, answer)
        ask_for_truths(undo, device)
        if any(number is not None for number in asked.numbers):
            enter(undo, _KnownNumbers(device, iter(asked.numbers), differs))
        yield
    if captures and next(questions, None) is not None:
        raise CaptureError(_OTHERS.format("the step"))


def _outermost(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes a method's place, except in calls within a call: torch function modes call it again."""
    running: list[Tensor] = []

    def asked(original: Callable[..., Any], tensor: Tensor) -> Any:
        if running:
            return original(tensor)
        running.append(tensor)
        try:
            return ask(original, tensor)
        finally:
            running.clear()

    return asked


def _of_values(op: Any, sources: list[_Source | None]) -> list[_Source | None]:
    """Return those that the values of an operation's result come from. Of `ones_like` that is none."""
    name = kind_of(op).name
    return [] if name.startswith("new_") or name.endswith("_like") else sources


def _geometry(tensor: Tensor) -> _Geometry:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def _with_slots(value: Any, slots: dict[int, int]) -> Any:
    if isinstance(value, _Made):
        return Slot(slots[value.operation] + value.number)
    if isinstance(value, dict):
        return {name: _with_slots(each, slots) for name, each in value.items()}
    return tuple(_with_slots(each, slots) for each in value) if type(value) is tuple else value


_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_ASKED = AskedPath._fields.index("early_at")  # how many of its fields say what was asked
_MOST_OPERATIONS = 64  # of a question
_OTHERS = (
    "{0} asks the device something else than in the calls before, after the same answers. What it asks must depend on "
    "the batch and on what was asked before"
)
