"""What a call asks the device about its input alone, recorded so that it can be asked ahead of a replay.

`if labels.max() >= classes:`, `if mask.all():` and `if pad in ids:` read what the batch has in it. A graph cannot wait
for that. But each call can compute the same from its batch before its graph is chosen, and each combination of answers
has a graph of its own, as those of random draws on the host have.

A question is one if its tensor is computed from the input and from constants alone, by operations that can be repeated,
and if the host learns no more than true or false (`if t:`, `.item()` of a boolean). In the rehearsal and in the capture
the recorded answers are given, by their order, in place of the values.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._errors import CaptureError
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

_Look = tuple[torch.Size, torch.dtype]
_Geometry = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class _Made(NamedTuple):
    """Stands for a result of a recorded operation."""

    operation: int
    number: int


_Source = Leaf | Held | _Made


class AskedPath(NamedTuple):
    """What a call has asked: the questions, with what computes them and the answers."""

    path: DrawPath
    answered: tuple[_Look | None, ...]  # for each tensor of the device that the host has read; None if no question


class QuestionRecorder:
    """Records what a call asks about its input. It is called with each operation.

    Args:
        device: where the step computes.
        leaves: the arguments of the call.
        is_constant: whether a tensor is the same in each call.
    """

    def __init__(self, device: torch.device, leaves: Sequence[Any], is_constant: Callable[[Tensor], bool]) -> None:
        self._device, self._is_constant = device, is_constant
        # With the number of its results, and what its arguments are made of.
        self._operations: list[tuple[Any, Any, Any, int, list[_Source | None]]] = []
        # By address and geometry: what a tensor is made of.
        self._made: dict[int, dict[_Geometry, _Source]] = {}
        self._reads: list[tuple[_Source, bool]] = []
        self._answered: list[_Look | None] = []
        tensors = [(number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        shared = Counter(storage_address(leaf) for _, leaf in tensors)
        for number, leaf in tensors:
            # Of arguments that share memory it cannot be told which one is asked about.
            if _is_plain(leaf) and (address := storage_address(leaf)) and shared[address] == 1:
                self._made[address] = {_geometry(leaf): Leaf(number)}

    def __call__(self, call: OperationCall) -> None:
        """Take note of an operation."""
        op, results = call.op, call.made
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
        # What is made anew, of no values, may be written to by code that no mode sees (a kernel of Triton's).
        if not call.given or not call.kind.repeatable or _MADE_ANEW.search(call.kind.name):
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
            yield

    def asked(self) -> AskedPath | None:
        """Return what was asked, None if nothing was."""
        if not self._reads:
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
            read = NumberRead(_with_slots(source, slots), bool)
            segments.append(Segment(tuple(operations), read, answer))
        return AskedPath(DrawPath((*segments, Segment((), None))), tuple(self._answered))

    def _asked(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.__bool__`."""
        if tensor.device.type != self._device.type:
            return original(tensor)
        source = self._source(tensor, storage_address(tensor))
        if source is None or len(self._needed(source)) > _MOST_OPERATIONS:
            self._answered.append(None)
            return original(tensor)
        with Undo() as undo, without_modes():  # a question is no finding
            if tensor.is_cuda:
                undo.note(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
                torch.cuda.set_sync_debug_mode("default")
            value = bool(original(tensor))
        self._answered.append((tensor.shape, tensor.dtype))
        self._reads.append((source, value))
        return value

    def _item(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.item`. Of a number the host may learn more than true or false."""
        if tensor.dtype is torch.bool:
            return self._asked(original, tensor)
        if tensor.device.type == self._device.type:
            self._answered.append(None)
        return original(tensor)

    def _source(self, tensor: Tensor, address: int) -> _Source | None:
        if not _is_plain(tensor):
            return None
        if self._is_constant(tensor):
            return Held(tensor.data_ptr(), tensor)
        return self._made.get(address, {}).get(_geometry(tensor))

    def _noted(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._noted(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return tuple(map(self._noted, value))
        return self._source(value, storage_address(value)) if isinstance(value, Tensor) else value

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
def answering_questions(asked: AskedPath | None, device: torch.device, *, captures: bool) -> Iterator[None]:
    """Context of a rehearsal or a capture, in which what a call asks gets the recorded answers, in their order.

    It is an error if a call that `captures` does not ask all of it.
    """
    if asked is None:
        yield
        return
    answered = iter(asked.answered)
    outcomes = iter(asked.path.outcomes)
    reads: list[Tensor] = []  # a torch function mode, as the rehearsal's, calls the same function again

    def answer(original: Callable[..., Any], tensor: Tensor) -> Any:
        if tensor.device.type == device.type and not reads and (look := next(answered, None)) is not None:
            if look == (tensor.shape, tensor.dtype):
                return next(outcomes)
            if captures:
                raise CaptureError(_OTHERS.format(running_line(real_frame())))
        reads.append(tensor)
        try:
            return original(tensor)
        finally:
            reads.pop()

    with Undo() as undo:
        for name in ("__bool__", "item"):
            replace_here(undo, Tensor, name, answer)
        yield
    if captures and next(answered, None) is not None:
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
_MADE_ANEW = re.compile(r"^(new_|empty|full|ones|zeros|scalar_tensor|arange|linspace)|_like$")
_OTHERS = (
    "{0} asks the device something else about the input than in the calls before, after the same answers. What it asks "
    "must depend on the batch and on what was asked before"
)
