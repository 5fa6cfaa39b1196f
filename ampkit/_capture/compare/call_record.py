"""A record of the operations of one call, and where two records first differ."""

import functools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from ..._torch.device.execution_trace import UNRECORDED, enter_mark, execution_trace, exit_mark
from ..._torch.tensors.modes import UnseenFunctionMode, enter, unseen_function_mode
from ..._torch.tensors.tree import tree_flatten
from ..._undo import Undo
from ..._user_line import line_text, running_place


class _PythonCall(NamedTuple):
    """A call of one of torch's functions from Python."""

    function: Any
    numbers: tuple[str, ...]  # the arguments that are not tensors, in words
    parameters: tuple[int, ...]  # the parameters among the arguments, by identity
    place: tuple[str, int] | None  # the user's line


class Operation(NamedTuple):
    """One operation below autograd."""

    text: str  # name, and arguments with dtypes and shapes
    details: tuple[Any, ...]  # strides, devices, and numbers that Python code passed, for they decide which kernel runs
    call: _PythonCall | None  # that it is a part of, in forward or backward; None if that is not known
    node: str  # the autograd node that it is a part of in backward; "" in forward


class Record(NamedTuple):
    """The operations of a call."""

    threads: tuple[tuple[Operation, ...], ...]  # those on the calling thread, and on each of autograd's threads


@dataclass(eq=False)
class RecordedCall:
    """What `recorded_call` yields."""

    lenient: bool = False  # see `recorded_call`
    text: str = ""  # torch's trace of the call, "" before its end, and if torch can write none (`execution_trace`)
    calls: list[_PythonCall] = field(default_factory=list)  # those from Python that have marks in it
    uses_gradients: bool = True  # whether it may have read or set `grad` of a tensor, or have run a backward
    gradients_of: set[int] = field(default_factory=set)  # ids of tensors whose `grad` Python code has read or set

    @property
    def is_recorded(self) -> bool:
        """Whether there is a record."""
        return f'"{_FIRST}"' in self.text

    @functools.cached_property
    def record(self) -> Record | None:
        """The operations of the call; None if there is no record. It takes as long as dozens of calls."""
        return _parsed(_read_entries(self.text), self.calls, self.lenient) if self.is_recorded else None


@contextmanager
def recorded_call(numbers: bool = True, lenient: bool = False) -> Iterator[RecordedCall]:
    """Context that records one call. It changes neither kernels nor memory, and can be used in a capture.

    Torch's execution trace has the operations. It is written below dispatch. A dispatch mode would not do: even under
    one that does nothing, torch takes other kernels (`dispatch_mode_enabled` in ATen). The trace does not have the
    numbers that Python code passes: there, `x * 0.5` is a product of two tensors. So a function mode, which neither
    autograd nor ATen sees, notes numbers and lines.

    Args:
        numbers: whether to use that mode. Compiled code would be compiled again for it.
        lenient: whether to leave out what torch does only on a CPU, where graphs are emulated: its optimizers compute
            with step counts on the host, and inside one operation it may do different things for different values.
    """
    calls = _Calls()
    found = RecordedCall(lenient, calls=calls.made)
    with execution_trace() as trace:
        if trace.begun:
            exit_mark(enter_mark(_FIRST))  # shows in the trace which thread this is
        with _calls_noted(calls) if numbers and trace.begun else nullcontext():
            yield found
    found.text = trace.text
    found.uses_gradients = (
        not (numbers and found.is_recorded) or bool(calls.gradients_of) or _RAN_BACKWARD in found.text
    )
    found.gradients_of = calls.gradients_of


@contextmanager
def _calls_noted(calls: "_Calls") -> Iterator[None]:
    with Undo() as undo:
        undo.note(calls.stop)
        calls.notes = True
        with unseen_function_mode(calls):
            enter(undo, calls)
            yield


class _Calls(UnseenFunctionMode):
    """Notes the calls of torch's functions and marks in the trace what each of them runs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_PythonCall] = []
        self.gradients_of: set[int] = set()
        # Torch takes a mode off while it handles a call. After an interrupt it may put the mode on again at any time.
        self.notes = False
        self._marks: list[Any] = []  # that are entered; if one ended in another trace, torch would crash

    def stop(self) -> None:
        """Note nothing from now on, and exit the marks that an interrupt has left entered."""
        self.notes = False
        while self._marks:
            exit_mark(self._marks.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _USE_GRADIENTS:
            self.gradients_of.add(id(args[0]))
        # Attributes, such as x.shape, run no operation. A record_function begins in one call and ends in another.
        if not self.notes or getattr(func, "__name__", "") == "__get__" or str(func).startswith("profiler."):
            return func(*args, **kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        # Of anything but numbers and constants the type: equal texts of it could be of other objects.
        numbers = tuple(_text(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        parameters = tuple(id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter))
        call = _PythonCall(func, numbers, parameters, running_place(sys._getframe(1)))
        self._marks.append(enter_mark(f"{_MARK}{len(self.made)}"))
        try:
            self.made.append(call)
            return func(*args, **kwargs)
        finally:
            exit_mark(self._marks.pop())


def _text(leaf: Any) -> str:
    if isinstance(leaf, slice):  # whose `repr` would read the tensors in it
        return " : ".join(map(_text, (leaf.start, leaf.stop, leaf.step)))
    return repr(leaf) if isinstance(leaf, _CONSTANTS) else type(leaf).__name__


_GRAD: Any = Tensor.grad  # the descriptor; a function mode receives its methods as the function that is called
_USE_GRADIENTS: tuple[Any, ...] = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__, Tensor.__deepcopy__)
_FIRST = "ampkit: first"
_MARK = "ampkit: call "
_CONSTANTS = (Number, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...))


# ------------------------------------------------------------------------------------------------- from torch's trace

# torch's names for what opened an entry (ATen/record_function.h).
_FUNCTION, _BACKWARD, _USER = 0, 1, 7
_RAN_BACKWARD = f'"name": "scope", "type": "uint64", "value": {_BACKWARD}}}'
_STEP = "Optimizer.step#"
# What differs in every capture: attention then keeps its random state on the device. And products and solutions of
# batches make the addresses of their matrices by `arange`.
_MADE_WITHIN = ("aten::arange", "aten::empty", "aten::scalar_tensor", "aten::fill_", "aten::zeros", "aten::zero_")
_RANDOM_STATE = ("philox_seed", "philox_offset", "rng_state", "unused")
# Entries of torch's that say nothing about the step. Those of communication have another number in each call. Those of
# dispatch modes and of tensor subclasses have the arguments of the operation around them, without names: random state
# too (aten/src/ATen/core/PythonFallbackKernel.cpp).
_SKIPPED = (
    *("TorchDynamo ", "profiler::", "autograd::engine::", "record_param_comms", "[pytorch|profiler|"),
    *("PythonDispatchMode", "PythonSubclass"),
)
# Compiled code detaches the inputs that it saves for its backward if they are views (torch/_functorch/_aot_autograd/
# runtime_wrappers.py). The batch of an eager call may consist of views, the buffers of a graph never do.
# In a capture only, a copy to the device asks whether its source is pinned (aten/src/ATen/native/cuda/Copy.cu).
# A question of the host reads the device in the rehearsal; in a capture its answer is given.
_READS = "aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"
_WITHOUT_EFFECT = frozenset(("aten::detach", "detach", "aten::is_pinned", *_READS))
_AS_STRIDED = "aten::as_strided"  # and what begins with it
_NUMBERED = ("nccl:", "gloo:", "c10d::", "ProcessGroup")
# How torch 2.11 writes an entry (csrc/profiler/standalone/execution_trace_observer.cpp), and a tensor in that: its
# number, that of its memory, where it begins in that, how many numbers it has, their bytes, and its device.
_TEXT = r'"((?:[^"\\]|\\.)*)"'
_ENTRY = re.compile(
    rf'"id": (\d+), "name": {_TEXT}, "ctrl_deps": (\d+),\s*"inputs": (.*),\s*"outputs": .*\s*"attrs": '
    r'\[\{"name": "rf_id", "type": "uint64", "value": (\d+)\}.*?\{"name": "seq_id", "type": "int64", "value": (-?\d+)\}'
    r'.*?\{"name": "scope", "type": "uint64", "value": (\d+)\}.*?\{"name": "tid", "type": "uint64", "value": (\d+)\}'
    rf'.*?\{{"name": "op_schema", "type": "string", "value": {_TEXT}\}}'
)
_HAS_INPUTS = '"inputs": {"values": '
_TENSOR = re.compile(r'\[\d+,\d+,(\d+),\d+,\d+,("[^"]*")\]')


class _Entry(NamedTuple):
    name: str
    schema: str
    scope: int
    thread: int
    begun: int  # its number by the time at which it began
    parent: int
    sequence: int  # of the autograd node that it made, or is the backward of
    inputs: str  # as JSON


def _read_entries(text: str) -> dict[int, _Entry]:
    """Return the entries of a trace by their ids."""
    found = {
        int(i): _Entry(name, schema, int(scope), int(thread), int(begun), int(parent), int(sequence), inputs)
        for i, name, parent, inputs, begun, sequence, scope, thread, schema in _ENTRY.findall(text)
    }
    return found if len(found) == text.count(_HAS_INPUTS) else _decoded_entries(text)


def _decoded_entries(text: str) -> dict[int, _Entry]:
    """Return the same, as slow as Python's JSON, of a trace that is written in another way, or by several threads.

    Such a trace is no valid JSON: commas are missing where several threads wrote at a time.
    """
    decoder, place = json.JSONDecoder(), max(0, text.find('"nodes": ['))  # behind the head of the file
    entries = {}
    while (start := text.find("{", place)) >= 0:
        try:
            written, place = decoder.raw_decode(text, start)
        except ValueError:
            place = start + 1  # only a part of an entry was written
            continue
        if "ctrl_deps" in written:
            has = {attribute["name"]: attribute["value"] for attribute in written["attrs"]}
            entries[written["id"]] = _Entry(
                written["name"],
                str(has.get("op_schema", "")),
                int(has["scope"]),
                int(has["tid"]),
                int(has["rf_id"]),
                int(written["ctrl_deps"]),
                int(has["seq_id"]),
                json.dumps(written["inputs"]),
            )
    return entries


def _parsed(entries: dict[int, _Entry], calls: list[_PythonCall], lenient: bool) -> Record | None:
    """Return the record that a trace has; None if it does not show which thread called."""
    ordered = sorted(entries, key=lambda i: entries[i].begun)
    main = next((entries[i].thread for i in ordered if entries[i].name == _FIRST), None)
    if main is None:
        return None
    # What other threads do meanwhile, such as a loader's, is no part of the step.
    autograds = sorted({entry.thread for entry in entries.values() if entry.scope == _BACKWARD} - {main})
    owners = _Owners(entries, ordered, main)
    cut = {i for i, entry in entries.items() if entry.name == UNRECORDED}  # and all that runs within it
    for i in ordered if cut else ():
        cut |= {i} if entries[i].parent in cut else set()
    noted: set[int] = set()
    threads: dict[int, list[Operation]] = {thread: [] for thread in (main, *autograds)}
    for i in ordered:
        entry = entries[i]
        skipped = entry.name in _WITHOUT_EFFECT or entry.name.startswith(_SKIPPED) or i in cut
        if entry.thread in threads and entry.scope != _USER and not skipped:
            within = _is_within_function(entry, entries)
            if within and (lenient or entry.name.startswith(_MADE_WITHIN)):
                continue
            if lenient and owners.is_optimizers(i):
                continue
            call, autograd_node = owners.call_and_node(i)
            owner = calls[call] if call >= 0 else None
            # Once per call: its first operation has the numbers that went into the call.
            from_python: tuple[Any, ...] = ()
            if owner is not None and not autograd_node and call not in noted:
                noted.add(call)
                from_python = owner.numbers, owner.parameters
            operation = Operation(entry.name, (), owner, autograd_node)
            if entry.scope != _BACKWARD and not entry.name.startswith(_NUMBERED):
                # The numbers of tensors and of their memory are others in each call.
                inputs = _TENSOR.sub(r"[\1,\2]", entry.inputs)
                text, strides, devices = _described_inputs(entry.schema, entry.name, inputs)
                operation = Operation(text, (strides, devices, from_python), owner, autograd_node)
            threads[entry.thread].append(operation)
    return Record(tuple(map(tuple, threads.values())))


def _is_within_function(entry: _Entry, entries: dict[int, _Entry]) -> bool:
    """Return whether an entry is a part of an operation, with marks in between or not."""
    while entry.parent in entries:  # an operation that raised has no entry
        parent = entries[entry.parent]
        if parent.scope != _USER or parent is entry:  # the outermost entry is its own parent
            return parent.scope == _FUNCTION
        entry = parent
    return False


class _Owners:
    """Finds the call from Python that an entry of the trace belongs to."""

    def __init__(self, entries: dict[int, _Entry], ordered: list[int], main: int) -> None:
        self._entries = entries
        self._known: dict[int, tuple[int, str]] = {}
        self._makers: dict[int, int] = {}  # the entries that made autograd nodes, by sequence number
        for i in ordered:
            entry = entries[i]
            if entry.scope == _FUNCTION and entry.sequence >= 0 and entry.thread == main:
                self._makers.setdefault(entry.sequence, i)

    def call_and_node(self, i: int) -> tuple[int, str]:
        """Return the number of the call, -1 if it is not known, and the node whose backward the entry is a part of."""
        path = []
        while i in self._entries and i not in self._known:
            entry = self._entries[i]
            if entry.scope == _BACKWARD:
                maker = self._makers.get(entry.sequence)
                self._known[i] = -1 if maker is None else self.call_and_node(maker)[0], entry.name
            elif entry.name.startswith(_MARK):
                self._known[i] = int(entry.name.removeprefix(_MARK)), ""
            else:
                path.append(i)
                i = -1 if entry.parent == i else entry.parent  # the outermost entry is its own parent
        found = self._known.get(i, (-1, ""))
        for each in path:
            self._known[each] = found
        return found

    def is_optimizers(self, i: int) -> bool:
        """Return whether the entry is a part of the step of one of torch's optimizers."""
        while i in self._entries:
            kind, _, step = self._entries[i].name.removeprefix(_STEP).partition(".")
            if self._entries[i].name.startswith(_STEP) and step == "step":
                return hasattr(torch.optim, kind)
            i = -1 if self._entries[i].parent == i else self._entries[i].parent
        return False


@functools.lru_cache(maxsize=4096)
def _described_inputs(schema: str, name: str, inputs: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the text of an operation, and strides and devices of its arguments."""
    of = json.loads(inputs)
    names = [text.split("=")[0].split(" ")[-1] for text in schema.partition("(")[2].split(", ") if text != "*"]
    kept = [i for i in range(len(of["types"])) if i >= len(names) or names[i] not in _RANDOM_STATE]
    values, shapes, types, strides = ([of[kind][i] for i in kept] for kind in ("values", "shapes", "types", "strides"))
    if name.startswith(_AS_STRIDED):
        # The batch of an eager call, or of one of several calls, may be a part of a larger tensor. Then `x[:, 1:]`,
        # which is an `as_strided` for torch, has an offset in that, and in the buffer of a graph another one. So the
        # offset is counted from where its tensor begins.
        begin = values[0][0]
        pairs = zip(values[1:], types[1:], strict=True)
        values[1:] = [value - begin if kind == "Int" else value for value, kind in pairs]
    arguments = [
        f"{kind[len('Tensor(') : -1].removeprefix('c10::')}{shape}"
        if kind.startswith("Tensor(")
        else f"{kind}{shape}"
        if "Tensor" in kind
        else str(value)
        for value, shape, kind in zip(values, shapes, types, strict=True)
    ]
    devices = tuple(str(value[-1]) for value, kind in zip(values, types, strict=True) if kind.startswith("Tensor("))
    return f"{schema.partition('(')[0] or name}({', '.join(arguments)})", json.dumps(strides), devices


# -------------------------------------------------------------------------------------------------------- comparison


def first_difference(eager: Record, captured: Record) -> str:
    """Return in words the first operation of a capture that the eager call did not do; "" if they are the same."""
    for operations, others in zip_longest(eager.threads, captured.threads, fillvalue=()):
        for old, new in zip_longest(operations, others):
            if old is None or new is None or (old.text, old.details) != (new.text, new.details):
                return _described(old, new)
    return ""


def _described(eager: Operation | None, captured: Operation | None) -> str:
    known = [each for each in (captured, eager) if each is not None]
    places = [each.call.place for each in known if each.call is not None and each.call.place]
    line, node = line_text(*places[0]) if places else "", known[0].node
    where = f"{line}{', in its backward' if node else ''} - " if line else f"in {node} - " if node else ""
    then, now = ("nothing more" if each is None else each.text for each in (eager, captured))
    if eager is not None and captured is not None and then == now:
        calls = [call for call in (eager.call, captured.call) if call is not None]
        if eager.details[-1:] == captured.details[-1:] or len(calls) < 2:
            then, now = (f"{each.text} (strides {each.details[0]}, on {each.details[1]})" for each in (eager, captured))
        else:
            named = [(resolve_name(call.function), call.function, ", ".join(call.numbers)) for call in calls]
            then, now = (
                f"{name or getattr(function, '__name__', repr(function))} with {numbers}"
                for name, function, numbers in named
            )
            if then == now:
                then, now = eager.text, f"{captured.text} with another parameter"
    return f"{where}the capture ran {now}, the eager call before it {then}"
