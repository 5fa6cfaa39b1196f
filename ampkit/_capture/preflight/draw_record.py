"""What a call draws on the host, recorded under the preflight, and whether the host only compares it."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..._text import comparable
from ..._torch.tensors.modes import without_torch_function
from ..._torch.tensors.operators import HOST_COPIES, LIFT_FRESH, LIST_READS, READ, OperationCall
from ..._torch.tensors.tensors import storage_address
from ..._torch.tensors.tree import tensors_in
from ..._undo import Undo
from ..._user_line import SourceLocation, real_frame, wraps_operations
from ..host.constants import MOST_ENTRIES
from ..host.given_numbers import numbers_in
from ..host.replaced import replace_here
from .compared import Compare, ComparedNumber, is_compared_at_once
from .draw_paths import DrawOperation, DrawPath, Like, NumberRead, Segment, Slot, repeats
from .uncapturable import HOST_DRAW, Problem

wraps_operations(__file__)

FindPlace = Callable[[], SourceLocation | None]
_Geometry = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class _HeldBack(NamedTuple):
    """A problem that is none if the host only compares what these draws have drawn."""

    draws: frozenset[int]
    problem: Problem
    place: SourceLocation


class DrawRecorder:
    """Records the draws of one call from torch's default CPU generator, and what the host learns of their numbers.

    A replay does nothing on the host. So the numbers may not reach the device, nor what the step returns or keeps. The
    host may compute with them on the CPU and read the results, as long as what it learns is one of a few values: true
    or false, or a whole number. Then each combination of those has a graph of its own.

    On a CPU, where graphs are emulated, the device draws from the same generator. There, draws whose numbers are never
    read are the device's. They are recorded too, because they come between the others.
    """

    def __init__(self, device: torch.device) -> None:
        # Known at the end: what the call did on the host, None if it draws nothing there, or if no graph may depend on
        # it; and problems that were held back, with their places, and are ones after all.
        self.path: DrawPath | None = None
        self.refused: list[tuple[Problem, SourceLocation]] = []
        self._emulated = device.type == "cpu"
        self._thread = threading.get_ident()
        self._segments: list[Segment] = []
        self._operations: list[DrawOperation] = []  # since the last read
        self._count = 0  # of results of operations
        self._draws = 0
        self._slots: dict[_Geometry, int] = {}
        self._sources: dict[int, frozenset[int]] = {}  # which draws are in this memory, by its address
        self._alive: list[Tensor] = []  # so that no address is used again
        self._constants: dict[int, tuple[weakref.ref[Tensor], DrawOperation]] = {}  # tensors without a draw, by address
        self._held_back: list[_HeldBack] = []
        self._used: set[int] = set()  # draws whose numbers are used otherwise than in a comparison
        self._untold: list[frozenset[int]] = []  # of numbers that were read to be compared, of which nothing told yet
        self._learned: set[int] = set()  # draws of which the host has learned something
        self._reads: Callable[..., Any] | None = None  # what the host makes of a number that it reads

    def begin(self, undo: Undo) -> None:
        """Begin to record, until that is undone."""
        self._thread = threading.get_ident()
        self._start = torch.default_generator.get_state()
        for owner, name, place in (*((owner, name, 0) for owner, name in HOST_COPIES), *LIST_READS):
            replace_here(undo, owner, name, functools.partial(self._use, place))
        # Of `if tensor:` the host learns no more than whether a number is 0.
        replace_here(undo, Tensor, "__bool__", functools.partial(self._read, bool))
        replace_here(undo, Tensor, "item", self._item)

    # ---------------------------------------------------------------------------------------------------- operations

    def judged(self, call: OperationCall, problems: list[Problem], find_place: FindPlace) -> list[Problem]:
        """Take note of an operation. Return its problems without those that are none if the host only compares."""
        if threading.get_ident() != self._thread:
            return problems
        op, given = call.op, call.given
        drawn = frozenset[int]().union(*map(self.draws_in, given)) if self._sources else frozenset[int]()
        by_default = call.kind.draws and call.kwargs.get("generator") is None  # the generator of its device
        if by_default and {tensor.device.type for tensor in call.made} == {"cpu"}:
            known = all(map(self._is_known, given))
            if not known:  # on a CPU it is a draw of the device
                self._used |= drawn
                self._changed(call)
                if not self._emulated:
                    return problems
            source = frozenset((self._draws,))
            self._draws += 1
            self._note(call, drawn | source if known else frozenset())
            return self._hold_back(source, problems, find_place)
        if op is READ and drawn:
            tensor = given[0]
            of, geometry = self._reads, _geometry(tensor)
            if not (tensor.is_floating_point() or tensor.is_complex()):  # the whole number is learned
                of = bool if tensor.dtype is torch.bool else int
            if of is None or geometry not in self._slots:
                self._used |= drawn
                return problems
            if of is not ComparedNumber:  # which tells of a comparison that follows
                self._learn(NumberRead(Slot(self._slots[geometry]), of), call.result, drawn)
            return self._hold_back(drawn, problems, find_place)
        if drawn:
            # A result that stays on the host: made of draws and numbers alone, by what can be repeated.
            result, made = call.result, call.made
            plain = isinstance(result, Tensor) or (isinstance(result, (list, tuple)) and len(result) == len(made))
            plain = plain and all(tensor.device.type == "cpu" for tensor in made)
            if plain and call.kind.repeatable and all(map(self._is_known, given)):
                self._note(call, drawn)
            else:
                self._used |= drawn
        else:
            self._note_constant(call)
        return problems

    def _note(self, call: OperationCall, draws: frozenset[int]) -> None:
        """Record an operation. If there are draws, they are in its results from now on."""
        operation = self._repeated(call)  # before it is appended: its arguments may come first
        self._operations.append(operation)
        for number, tensor in enumerate(call.made, self._count):
            if draws and (geometry := _geometry(tensor)) is not None:
                self._slots[geometry] = number
                self._sources[geometry[0]] = self._sources.get(geometry[0], frozenset()) | draws
                self._alive.append(tensor)
        self._count += len(call.made)

    def _repeated(self, call: OperationCall) -> DrawOperation:
        """Return what does the same as an operation, behind what was recorded before."""
        given = tuple(map(self._argument, call.args))
        return DrawOperation(call.op, given, tuple((name, self._argument(each)) for name, each in call.kwargs.items()))

    def _argument(self, value: Any) -> Any:
        """Return an argument as `DrawOperation` has it."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._argument, value))
        if not isinstance(value, Tensor):
            return comparable(value)
        geometry = _geometry(value)
        if geometry in self._slots:
            return Slot(self._slots[geometry])
        if value.is_nested:  # has no shape
            return Like((), (), value.dtype)
        if (made := self._constant(value)) is None:
            return Like(tuple(value.shape), tuple(value.stride()), value.dtype)
        self._operations.append(made)
        self._count += 1
        return Slot(self._count - 1)

    def _learn(self, read: NumberRead, value: Any, draws: frozenset[int]) -> None:
        self._segments.append(Segment(tuple(self._operations), read, read.outcome(value)))
        self._operations = []
        self._learned |= draws

    def _hold_back(self, draws: frozenset[int], problems: list[Problem], find_place: FindPlace) -> list[Problem]:
        if problems and (place := find_place()) is not None:
            self._held_back += (_HeldBack(draws, problem, place) for problem in problems)
        return []

    def _note_constant(self, call: OperationCall) -> None:
        """Remember what makes a tensor on the CPU of numbers alone."""
        is_lifted = call.op is LIFT_FRESH
        makes = (is_lifted or (not call.given and call.kind.repeatable)) and len(call.made) == 1
        if makes and _geometry(made := call.made[0]) is not None:
            if not is_lifted:
                self._constants[call.made_at[0]] = weakref.ref(made), self._repeated(call)
            elif made.numel() <= MOST_ENTRIES:
                with without_torch_function():
                    values = numbers_in(made.detach())
                again = DrawOperation(_made, (values, made.dtype, tuple(made.shape)), ())
                self._constants[call.made_at[0]] = weakref.ref(made), again
        elif call.written or not hasattr(call.op, "overloadpacket"):
            self._changed(call)

    def _changed(self, call: OperationCall) -> None:
        """Forget what has made tensors that an operation may have changed."""
        for address in call.given_at if self._constants else ():
            self._constants.pop(address, None)

    def _constant(self, tensor: Tensor) -> DrawOperation | None:
        """Return what makes this tensor of numbers alone; None if that is not known."""
        reference, made = self._constants.get(storage_address(tensor), (None, None))
        return made if reference is not None and reference() is tensor else None

    # ------------------------------------------------------------------------------------------------------- tensors

    def draws_in(self, tensor: Tensor) -> frozenset[int]:
        """Return which draws are in a tensor; where graphs are emulated, also those of the device."""
        if not self._sources or tensor.device.type != "cpu":
            return frozenset()
        return self._sources.get(storage_address(tensor), frozenset())

    def _is_known(self, tensor: Tensor) -> bool:
        """Return whether a tensor is made of draws and numbers alone."""
        return _geometry(tensor) in self._slots or self._constant(tensor) is not None

    def _use(self, place: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take note of draws in the argument at this place. They are read where no mode sees it."""
        if self._sources:
            given = args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))
            for tensor in tensors_in(given):
                self._used |= self.draws_in(tensor)
        return original(*args, **kwargs)

    def _read(self, of: Callable[..., Any], original: Callable[..., Any], tensor: Tensor) -> Any:
        """Read a number of which the host makes this."""
        self._reads = of
        try:
            return original(tensor)
        finally:
            self._reads = None

    def _item(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        """Take the place of `Tensor.item`, of which it learns only the outcome of a comparison that follows at once."""
        draws = self.draws_in(tensor) if isinstance(tensor, Tensor) else frozenset[int]()
        geometry = _geometry(tensor) if draws else None
        number = None if geometry is None else self._slots.get(geometry)
        if number is None or not tensor.is_floating_point() or not is_compared_at_once(real_frame()):
            return original(tensor)
        value = self._read(ComparedNumber, original, tensor)
        self._untold.append(draws)

        def answer(compare: Compare, other: Any) -> bool:
            if draws in self._untold:
                self._untold.remove(draws)
            if type(other) not in (bool, int, float):
                self._used |= draws
            else:
                self._learn(NumberRead(Slot(number), compare, comparable(other)), value, draws)
            return compare(value, other)

        drawn = ComparedNumber(value)
        drawn.answer = answer
        return drawn

    # ----------------------------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """Take note that the call is over, in which nothing of it is alive but what it returns and what it keeps."""
        path = DrawPath((*self._segments, Segment(tuple(self._operations), None)))
        for draws in self._untold:  # code has them that asks no number: of C, or another class's comparison
            self._used |= draws
            self._learned |= draws
        if not (self._learned if self._emulated else self._draws):
            return
        # What the step returns or keeps.
        wanted = [tensor for tensor in self._alive if not self._emulated or self.draws_in(tensor) & self._learned]
        memory = [(StorageWeakRef(tensor.untyped_storage()), self.draws_in(tensor)) for tensor in wanted]
        wanted.clear()
        self._alive.clear()
        if not all(reference.expired() for reference, _ in memory):
            gc.collect()
        self._used |= set[int]().union(*(draws for reference, draws in memory if not reference.expired()))
        refused = self._used & self._learned if self._emulated else self._used
        found = [(held.problem, held.place) for held in self._held_back if held.draws & refused]
        if refused and not found:
            found = [(HOST_DRAW, SourceLocation())]
        self.refused = [(problem._replace(advice=f"{problem.advice} {_COMPARE}"), place) for problem, place in found]
        if not refused:
            if repeats(path, self._start, torch.default_generator.get_state()):
                self.path = path
            else:
                place = self._held_back[0].place if self._held_back else SourceLocation()
                self.refused = [(_UNREPEATABLE, place)]


_UNREPEATABLE = Problem(
    "draws random numbers on the host in a way that cannot be repeated ahead of the step: something that is not seen "
    "draws too (compiled code, another thread), or the generator is put back, as checkpointing does",
    "Draw before the step and pass the numbers in, or draw with torch on the device.",
    graph_only=True,
)
_COMPARE = "What is drawn on the host may only be compared there, as in `if torch.rand(()) < 0.1`."


def _geometry(tensor: Tensor) -> _Geometry | None:
    """Return where the numbers of a CPU tensor lie; None if it has none of its own."""
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
    address = storage_address(tensor) if plain else 0
    if not address:
        return None
    return address, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _made(values: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(list(values), dtype=dtype, device="cpu").reshape(shape)
