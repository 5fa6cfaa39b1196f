"""What a call asks the device, recorded so that a replay asks the same: ahead of it, or between two pieces of a graph.

A question is one if the host learns no more than true or false (`if t:`, `.item()` of a boolean). A graph cannot wait
for that. There are two ways out:

*Ahead.* `if labels.max() >= classes:`, `if mask.all():` and `if pad in ids:` read what the batch has in it. Each call
can compute the same from its batch before its graph is chosen, and each combination of answers has a graph of its own,
as those of random draws on the host have. So it is if the tensor is computed from the input and from constants alone,
by operations that can be repeated. Constants are numbers of Python's,
and what is made anew with values (`torch.ones`). About constants alone, the answer is always the same. Memory whose
address is given out (`data_ptr`) is neither from then on: a kernel of Triton's writes there, and no mode sees it.

*At a cut.* `if not torch.isfinite(logits).all():` is about anything else. There the graph ends, and another one begins.
A replay launches the first, reads the answer, and launches the second if that was captured with the same answer. Else
what the first has written is put back, and the call is eager. The code behind a question is never run on a guess: it
might index out of range where it was to raise, which no process survives.

In the capture the answers are given by their order: ahead, those of the key; at a cut, that of the rehearsal.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._errors import CaptureError
from ..._torch.autograd.autograd import in_backward
from ..._torch.tensors.modes import without_modes
from ..._torch.tensors.operators import LIFT_FRESH, OperationCall
from ..._torch.tensors.tensors import storage_address
from ..._undo import Undo
from ..._user_line import real_frame, running_line, wraps_operations
from ..host.constants import MOST_ENTRIES
from ..host.replaced import replace_here
from ..host.uploads import content_of
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


class AskedPath(NamedTuple):
    """What a call has asked."""

    path: DrawPath  # the questions that are asked ahead, with what computes them and the answers
    questions: tuple[Question | None, ...]  # for each tensor of the device that the host has read; None if no question
    answers: tuple[bool, ...]  # at the cuts
    early_at: frozenset[int] = frozenset()  # addresses of memory that the call has written by its last cut

    def is_like(self, other: "AskedPath") -> bool:
        """Return whether another call has asked the same, with the same answers."""
        return self._replace(early_at=other.early_at) == other


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
        is_drawn: Callable[[Tensor], bool],
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
        self._written_at: set[int] = set()
        self._early_at: frozenset[int] = frozenset()
        tensors = [(number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        shared = Counter(storage_address(leaf) for _, leaf in tensors)
        for number, leaf in tensors:
            # Of arguments that share memory it cannot be told which one is asked about.
            if _is_plain(leaf) and (address := storage_address(leaf)) and shared[address] == 1:
                self._made[address] = {_geometry(leaf): Leaf(number)}

    def __call__(self, call: OperationCall) -> None:
        """Take note of an operation."""
        op, results = call.op, call.made
        self._written_at.update(call.written_at)
        for address in (*call.made_at, *call.written_at):
            # Where it is not written to, nor a part of an argument, it is memory that was free, and is used again.
            if address in self._made and (call.written or address not in call.given_at):
                del self._made[address]
        if call.written or not results or not all(map(_is_plain, results)):
            return
        if op is LIFT_FRESH and results[0].is_cpu and results[0].numel() <= MOST_ENTRIES:
            # Of Python's numbers. On another device it is one of the constants.
            held = Held(content_of(results[0]), results[0].clone())
            self._made[call.made_at[0]] = {_geometry(results[0]): held}
            return
        if not call.kind.repeatable or call.kind.name.startswith(("empty", "new_empty")):
            return
        if not all(call.made_at) or any(tensor.device.type != self._device.type for tensor in results):
            return
        sources = [*map(self._source, call.given, call.given_at)]
        if None in sources:
            return
        number = len(self._operations)
        self._operations.append((op, self._noted(call.args), self._noted(call.kwargs), len(results), sources))
        for i, (tensor, address) in enumerate(zip(results, call.made_at, strict=True)):
            self._made.setdefault(address, {})[_geometry(tensor)] = _Made(number, i)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context of the call."""
        with Undo() as undo:
            replace_here(undo, Tensor, "__bool__", self._asked)
            replace_here(undo, Tensor, "item", self._item)
            for name in ("data_ptr", "__dlpack__"):
                replace_here(undo, Tensor, name, self._give_out)
            yield

    def asked(self) -> AskedPath | None:
        """Return what was asked, None if nothing was."""
        if not (self._reads or self._answers):
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
            always = not any(isinstance(each, Leaf) for each in self._origins(source))
            read = NumberRead(_with_slots(source, slots), bool, always=always)
            segments.append(Segment(tuple(operations), read, answer))
        path = DrawPath((*segments, Segment((), None)))
        return AskedPath(path, tuple(self._questions), tuple(self._answers), self._early_at)

    def _asked(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.__bool__`."""
        if tensor.device.type != self._device.type:
            return original(tensor)
        source = self._source(tensor, storage_address(tensor))
        if source is not None and len(self._needed(source)) > _MOST_OPERATIONS:
            source = None
        cuts = source is None
        if cuts and not (self._cuts and _is_plain(tensor) and not (in_backward() or self._is_drawn(tensor))):
            self._questions.append(None)
            return original(tensor)
        with Undo() as undo, without_modes():  # a question is no finding
            if tensor.is_cuda:
                undo.note(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
                torch.cuda.set_sync_debug_mode("default")
            value = bool(original(tensor))
        self._questions.append(Question(tensor.shape, tensor.dtype, cuts))
        if source is None:
            self._answers.append(value)
            self._early_at = frozenset(self._written_at - {0})
        else:
            self._reads.append((source, value))
        return value

    def _item(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.item`. Of a number the host may learn more than true or false."""
        if tensor.dtype is torch.bool:
            return self._asked(original, tensor)
        if tensor.device.type == self._device.type:
            self._questions.append(None)
        return original(tensor)

    def _give_out(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take the place of a method that tells where the memory of a tensor is."""
        self._made.pop(storage_address(tensor), None)
        return original(tensor, *args, **kwargs)

    def _source(self, tensor: Tensor, address: int) -> _Source | None:
        if not _is_plain(tensor):
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

    def _origins(self, source: _Source) -> list[_Source | None]:
        """Return what this is made of in the end, and what lies between."""
        return [source, *(each for number in self._needed(source) for each in self._operations[number][-1])]

    def _needed(self, source: _Source) -> list[int]:
        """Return the operations that compute this, in their order."""
        left: list[_Source | None] = [source]
        found = set[int]()
        while left:
            each = left.pop()
            if isinstance(each, _Made) and each.operation not in found:
                found.add(each.operation)
                left += self._operations[each.operation][-1]
        return sorted(found)


@contextmanager
def answering_questions(
    asked: AskedPath | None, device: torch.device, at_cut: Callable[[Tensor], bool], *, captures: bool
) -> Iterator[None]:
    """Context of a rehearsal or a capture, in which what a call asks gets the recorded answers, in their order.

    Where the graph is cut, `at_cut` gives the answer. It is an error if a call that `captures` does not ask all of it.
    """
    if asked is None:
        yield
        return
    questions = iter(asked.questions)
    outcomes = iter(asked.path.outcomes)
    reads: list[Tensor] = []  # a torch function mode, as the rehearsal's, calls the same function again

    def answer(original: Callable[..., Any], tensor: Tensor) -> Any:
        if tensor.device.type == device.type and not reads and (question := next(questions, None)) is not None:
            if question[:2] != (tensor.shape, tensor.dtype):
                if captures:
                    raise CaptureError(_OTHERS.format(running_line(real_frame())))
            elif not question.cuts:
                return next(outcomes)
            else:
                original = at_cut
        reads.append(tensor)
        try:
            return original(tensor)
        finally:
            reads.pop()

    with Undo() as undo:
        for name in ("__bool__", "item"):
            replace_here(undo, Tensor, name, answer)
        yield
    if captures and next(questions, None) is not None:
        raise CaptureError(_OTHERS.format("the step"))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def _geometry(tensor: Tensor) -> _Geometry:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def _with_slots(value: Any, slots: dict[int, int]) -> Any:
    if isinstance(value, _Made):
        return Slot(slots[value.operation] + value.number)
    if isinstance(value, dict):
        return {name: _with_slots(each, slots) for name, each in value.items()}
    return tuple(_with_slots(each, slots) for each in value) if type(value) is tuple else value


_MOST_OPERATIONS = 64  # of a question
_OTHERS = (
    "{0} asks the device something else than in the calls before, after the same answers. What it asks must depend on "
    "the batch and on what was asked before"
)
