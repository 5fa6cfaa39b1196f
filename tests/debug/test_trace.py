"""trace: every event of torch's GPU trace is counted, with its line; listeners come and go and may fail.

On any machine, torch's registries of callbacks are fired by hand, as its C++ does. What C++ really tells is for a GPU.
"""

import functools
import gc
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import marked_line
from torch import Tensor
from torch.cuda import _gpu_trace

import ampkit
from ampkit._torch.device import gpu_trace
from ampkit.debug import TraceEvent, _trace, trace

REGISTRIES: dict[str, Any] = {
    "event_creation": _gpu_trace.EventCreationCallbacks,
    "event_deletion": _gpu_trace.EventDeletionCallbacks,
    "event_record": _gpu_trace.EventRecordCallbacks,
    "event_wait": _gpu_trace.EventWaitCallbacks,
    "memory_allocation": _gpu_trace.MemoryAllocationCallbacks,
    "memory_deallocation": _gpu_trace.MemoryDeallocationCallbacks,
    "stream_creation": _gpu_trace.StreamCreationCallbacks,
    "device_synchronization": _gpu_trace.DeviceSynchronizationCallbacks,
    "stream_synchronization": _gpu_trace.StreamSynchronizationCallbacks,
    "event_synchronization": _gpu_trace.EventSynchronizationCallbacks,
}
HANDLES: dict[str, tuple[int, ...]] = {  # what C++ passes (csrc/PyInterpreter.cpp)
    **dict.fromkeys(REGISTRIES, (7,)),
    "event_record": (7, 8),
    "event_wait": (7, 8),
    "device_synchronization": (),
}


def fire(kind: str) -> None:
    REGISTRIES[kind].fire_callbacks(*HANDLES[kind])  # HERE fire


marked = functools.partial(marked_line, __file__)


@pytest.fixture(autouse=True)
def clean_registries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave torch's lists as they were, and nobody listening; where there is no device, pretend that there is one."""
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    gc.collect()  # tensors of other tests would be freed, and heard, in this one
    before = {kind: list(registry.callback_list) for kind, registry in REGISTRIES.items()}
    yield
    for kind, registry in REGISTRIES.items():
        registry.callback_list[:] = before[kind]
    assert not any(_trace._listening.values())


def test_the_kinds_are_torchs() -> None:
    """The table of kinds has torch's registries, all of them."""
    registers = {name for name in vars(_gpu_trace) if name.startswith("register_callback_for_")}
    assert {f"register_callback_for_{kind}" for kind in _trace.KINDS} == registers
    assert gpu_trace.gpu_trace_registries() == REGISTRIES


@pytest.mark.parametrize("kind", REGISTRIES)
def test_x1_each_kind(kind: str) -> None:
    """X1: an event of each kind is counted, with its line and what torch passes, under its name."""
    with trace(max_events=9) as recorded:
        fire(kind)
        fire(kind)
    assert recorded.counts == {**dict.fromkeys(REGISTRIES, 0), kind: 2}
    assert recorded.lines == {**{other: {} for other in REGISTRIES}, kind: {marked("fire"): 2}}
    assert (len(recorded.events), recorded.dropped) == (2, 0)
    event, other = recorded.events
    assert (event.kind, event.line, event.thread) == (kind, marked("fire"), threading.get_ident())
    assert event.seconds <= other.seconds
    passed = [handle for handle in (event.event or event.address, event.stream) if handle is not None]
    assert passed == list(HANDLES[kind])
    assert (event.address is not None) == kind.startswith("memory_")
    assert (event.event is not None) == kind.startswith("event_")


def test_x1_listeners() -> None:
    """X1: several listen at once, each to the kinds that it asked for; those of other code are left alone."""
    first: list[TraceEvent] = []
    second: list[str] = []
    others: list[int] = []
    _gpu_trace.register_callback_for_event_creation(others.append)
    with trace(first.append), trace(lambda event: second.append(event.kind), kinds=["event_wait"]) as narrow:
        for kind in ("event_creation", "event_wait"):
            fire(kind)
    fire("event_creation")
    assert [(event.kind, event.event, event.stream) for event in first] == [
        ("event_creation", 7, None),
        ("event_wait", 7, 8),
    ]
    assert second == ["event_wait"]
    assert narrow.counts == {"event_wait": 1}
    assert others == [7, 7]


def test_x1_unregistering() -> None:
    """X1: who stops hears no more, and may start again; torch's lists grow by one, once."""
    recorded = trace()
    fire("event_wait")
    recorded.start()
    fire("event_wait")
    recorded.stop()
    recorded.stop()
    fire("event_wait")
    assert recorded.counts["event_wait"] == 1
    entries = {kind: len(registry.callback_list) for kind, registry in REGISTRIES.items()}
    with recorded, trace(), pytest.raises(ValueError, match="listens already"):
        recorded.start()
    with recorded:
        fire("event_wait")
    assert recorded.counts["event_wait"] == 2
    assert entries == {kind: len(registry.callback_list) for kind, registry in REGISTRIES.items()}


@pytest.mark.skipif(not hasattr(torch._C, "_activate_gpu_trace"), reason="this torch has no GPU trace")
def test_x1_the_trace_ends() -> None:
    """X1: torch's GPU trace is on while a trace listens, and off behind the last one; others may turn it on again."""
    on = gpu_trace._switch
    assert on is not None  # torch's variable is found in its library
    assert not on.value
    with trace():
        with trace():
            assert on.value
        assert on.value
    assert not on.value
    with trace():
        assert on.value
    torch._C._activate_gpu_trace()  # as torch's CUDA sanitizer does
    assert on.value
    with trace():
        assert on.value
    assert on.value
    on.value = False


@pytest.mark.skipif(not hasattr(torch._C, "_activate_gpu_trace"), reason="this torch has no GPU trace")
def test_x1_the_trace_of_others_stays() -> None:
    """X1: who registers callbacks while a trace listens goes on to hear, whether or not that code activated."""
    on = gpu_trace._switch
    assert on is not None
    with trace():
        torch._C._activate_gpu_trace()
        _gpu_trace.register_callback_for_event_wait(lambda event, stream: None)
    assert on.value
    REGISTRIES["event_wait"].callback_list.pop()
    with trace():
        pass
    assert not on.value


@pytest.mark.parametrize("library", ["nothing.so", "libm.so.6"])
def test_x1_a_torch_without_the_switch(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: where torch's switch is not found, the trace works and stays on, as torch leaves it."""
    assert gpu_trace._switch_of(Path(library)) is None
    before = gpu_trace._switch
    assert before is not None
    monkeypatch.setattr(gpu_trace, "_switch", None)
    with trace() as recorded:
        fire("event_wait")
    assert recorded.counts["event_wait"] == 1
    assert before.value
    before.value = False


def test_x1_unregistering_while_an_event_is_told() -> None:
    """X1: a listener may stop itself and the next one in the middle of an event, and no one else misses that event."""
    others: list[int] = []
    heard: list[str] = []

    def stop_both(event: TraceEvent) -> None:
        heard.append("first")
        first.stop()
        second.stop()

    first, second = trace(stop_both), trace(lambda event: heard.append("second"))
    third = trace(lambda event: heard.append("third"))
    for each in (first, second, third):
        each.start()
    _gpu_trace.register_callback_for_event_wait(lambda event, stream: others.append(event))
    fire("event_wait")
    fire("event_wait")
    third.stop()
    assert heard == ["first", "third", "third"]
    assert others == [7, 7]
    assert [each.counts["event_wait"] for each in (first, second, third)] == [1, 0, 2]


def test_a_listener_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Its error comes where the block ends, it is not called again, all else is heard, and torch logs nothing."""
    calls: list[str] = []

    def fails(event: TraceEvent) -> None:
        calls.append(event.kind)
        raise LookupError("a mistake of the user")

    with caplog.at_level(logging.DEBUG), trace(calls.append) as other:
        recorded = trace(fails)
        recorded.start()
        fire("event_wait")
        fire("event_record")
        with pytest.raises(LookupError, match=r"^a mistake of the user$") as raised:
            recorded.stop()
        assert [entry.name for entry in raised.traceback][-1] == "fails"
    assert caplog.records == []
    assert recorded.counts["event_record"] == other.counts["event_record"] == 1
    assert calls.count("event_wait") == 1
    assert "event_record" not in calls
    recorded.stop()  # raised once


def test_a_listener_that_raises_in_a_block_that_raises() -> None:
    """The block's error goes first; the listener's is a warning. Ctrl-C is not lost."""

    def interrupted(event: TraceEvent) -> None:
        raise KeyboardInterrupt

    def block() -> None:
        with trace(interrupted):
            fire("event_wait")
            raise LookupError

    warned = pytest.warns(ampkit.AmpkitWarning, match=r"the listener raised KeyboardInterrupt\(\)")
    with warned, pytest.raises(LookupError):
        block()
    with pytest.raises(KeyboardInterrupt), trace(interrupted):
        fire("event_wait")


def test_what_a_listener_does_is_not_told_to_it() -> None:
    """A listener that uses the GPU is not called for that, but it counts."""
    calls: list[str] = []

    def listener(event: TraceEvent) -> None:
        calls.append(event.kind)
        fire("memory_allocation")

    with trace(listener) as recorded:
        fire("event_wait")
        fire("event_wait")
    assert calls == ["event_wait"] * 2
    assert recorded.counts["memory_allocation"] == 2


def test_a_bound_on_events() -> None:
    """The last ones are kept, and it is said how many were not. By default none is."""
    with trace(max_events=2) as recorded, trace() as counted:
        for kind in ("event_creation", "event_record", "event_deletion"):
            fire(kind)
    assert [event.kind for event in recorded.events] == ["event_record", "event_deletion"]
    assert (recorded.dropped, counted.events, counted.dropped) == (1, [], 3)


def test_threads_and_garbage_collection() -> None:
    """Events of several threads, and of what is freed while one is counted, are all counted; nothing locks up."""

    class Freed:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            fire("memory_deallocation")

    def work() -> None:
        for _ in range(200):
            Freed()
            fire("memory_allocation")

    before = gc.get_threshold()
    gc.set_threshold(3)
    try:
        with trace(max_events=5) as recorded:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            gc.collect()
    finally:
        gc.set_threshold(*before)
    assert recorded.counts["memory_allocation"] == 800
    assert recorded.counts["memory_deallocation"] == 800
    assert sum(recorded.lines["memory_allocation"].values()) == 800


class Firing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        REGISTRIES["event_wait"].fire_callbacks(1, 2)  # HERE backward
        return grad


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost line of the user's; a node of autograd's where no line runs, or nothing; none if not asked for."""
    x = torch.ones(3, requires_grad=True)
    scope: dict[str, Any] = {}
    own = str(Path(ampkit.__file__).with_name("_of_a_test.py"))
    exec(compile("def within(fire, *handles):\n    fire(*handles)", own, "exec"), scope)
    with trace() as recorded, trace(lines=False) as plain:
        Firing.apply(x).sum().backward()
        scope["within"](REGISTRIES["event_wait"].fire_callbacks, 1, 2)  # HERE caller
        thread = threading.Thread(target=scope["within"], args=(REGISTRIES["event_wait"].fire_callbacks, 1, 2))
        thread.start()
        thread.join()
        node = (x * 2).grad_fn
        monkeypatch.setattr(_trace, "current_node", lambda: node)
        thread = threading.Thread(target=scope["within"], args=(REGISTRIES["event_wait"].fire_callbacks, 1, 2))
        thread.start()
        thread.join()
    lines = {marked("backward"), marked("caller"), "", "backward of MulBackward0"}
    assert recorded.lines["event_wait"] == dict.fromkeys(lines, 1)
    assert (plain.counts["event_wait"], plain.lines["event_wait"]) == (4, {})


def test_table_and_json() -> None:
    """Kinds and lines with the most events come first; further lines are one row; JSON gives back what is in it."""
    with trace(max_events=1) as recorded:
        for i in range(7):
            exec(compile("\n" * i + "fire('event_wait')", "/home/me/train.py", "exec"), {"fire": fire_unseen})
        fire("event_record")
    head, first, *rows = str(recorded).splitlines()
    assert head == "8 events of the GPU trace:"
    assert first.split() == ["7", "event_wait"]
    assert [row.split()[:2] for row in rows[:5]] == [["1", f"/home/me/train.py:{i}:"] for i in range(1, 6)]
    assert rows[5].split() == ["2", "on", "2", "other", "lines"]
    assert rows[6].split() == ["1", "event_record"]
    assert rows[7].strip() == f"1  {marked('fire')}"
    told = json.loads(json.dumps(recorded.to_dict()))
    assert told["counts"] == recorded.counts
    assert told["lines"] == recorded.lines
    assert told["events"] == [event._asdict() for event in recorded.events]
    assert told["dropped"] == 7


def fire_unseen(kind: str) -> None:
    REGISTRIES[kind].fire_callbacks(*HANDLES[kind])


fire_unseen.__code__ = fire_unseen.__code__.replace(co_filename=torch.__file__)  # so that the caller is the one named


def test_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message says what may be written, that there is no device, or that torch was built without."""
    with pytest.raises(ValueError, match=r"kinds=\['allocation'\].*memory_allocation"):
        trace(kinds=["allocation"])
    with pytest.raises(ValueError, match="expected a sequence"):
        trace(kinds="event_wait")
    with pytest.raises(ValueError, match="max_events=-1"):
        trace(max_events=-1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(ampkit.AmpkitWarning, match="no CUDA device") as caught, trace():
        pass
    assert caught[0].filename == __file__
    monkeypatch.delattr(_gpu_trace, "EventWaitCallbacks")
    with pytest.raises(ampkit.AmpkitError, match=r"has no GPU trace callbacks.*find_syncs"):
        trace().start()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ampkit.AmpkitError, match="was built without CUDA"), trace():
        pass


# ---------------------------------------------------------------------------------------------------------- on a device

_ALL_KINDS = """
import json, torch
import ampkit
with ampkit.debug.trace() as recorded:
    torch.cuda.Stream()  # makes the pool of streams, once per process
    x = torch.ones(1000, device="cuda")
    event = torch.cuda.Event()
    event.record()
    event.wait()
    event.synchronize()
    torch.cuda.synchronize()
    x.sum().item()
    del x, event
print(json.dumps(recorded.counts))
"""


@pytest.mark.cuda
def test_x1_every_kind_is_told_on_cuda() -> None:
    """X1: in a new process, in which no stream was made yet, each kind is seen."""
    code = _ALL_KINDS.replace("import ampkit\n", "import ampkit.debug\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    assert set(counts) == set(REGISTRIES)
    assert all(counts.values()), counts


@pytest.mark.cuda
def test_x1_exceptions_survive_on_cuda() -> None:
    """X1: behind the last trace, an exception that frees GPU memory on its way arrives (pytorch#181865)."""

    def losses() -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.ones(1000, device="cuda")
        raise KeyError("found me")

    with trace():
        torch.ones(1, device="cuda")
    with pytest.raises(KeyError, match="found me"):
        list(losses())


@pytest.mark.cuda
def test_x1_handles_and_lines_on_cuda() -> None:
    """X1: handles are those of torch's objects; two listeners hear the same; one that stopped hears nothing."""
    torch.cuda.synchronize()
    heard: list[TraceEvent] = []
    kinds = [kind for kind in REGISTRIES if kind != "stream_creation"]
    with trace(heard.append, kinds=kinds) as first, trace(kinds=kinds, max_events=1000) as second:
        stream = torch.cuda.current_stream()
        x = torch.ones(1000, device="cuda")  # HERE allocated
        address = x.data_ptr()
        event = torch.cuda.Event()
        event.record()
        event.wait()
        event.synchronize()  # HERE event_waited
        stream.synchronize()  # HERE stream_waited
        torch.cuda.synchronize()  # HERE device_waited
        handle = event.cuda_event
        del x, event
    torch.cuda.synchronize()
    seen = {(event.kind, event.event, event.stream, event.address) for event in heard}
    assert seen >= {
        ("event_creation", handle, None, None),
        ("event_record", handle, stream.cuda_stream, None),
        ("event_wait", handle, stream.cuda_stream, None),
        ("event_synchronization", handle, None, None),
        ("event_deletion", handle, None, None),
        ("stream_synchronization", None, stream.cuda_stream, None),
        ("device_synchronization", None, None, None),
        ("memory_allocation", None, None, address),
        ("memory_deallocation", None, None, address),
    }
    assert first.counts == second.counts
    assert [event[:2] for event in heard] == [event[:2] for event in second.events]
    assert marked("allocated") in first.lines["memory_allocation"]
    assert first.lines["event_synchronization"] == {marked("event_waited"): 1}
    assert marked("stream_waited") in first.lines["stream_synchronization"]
    assert first.lines["device_synchronization"] == {marked("device_waited"): 1}


@pytest.mark.cuda
def test_x1_backward_on_cuda() -> None:
    """X1: what autograd's own thread allocates is told with the name of the node."""
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    with trace(kinds=["memory_allocation"]) as recorded:
        (weight @ weight).sum().backward()
    assert any(line.startswith("backward of MmBackward") for line in recorded.lines["memory_allocation"])


@pytest.mark.cuda
def test_x1_what_waits_on_cuda() -> None:
    """X1: each wait of the table in the design document is told but the pageable copy that does not block."""
    x = torch.ones(3, 4, device="cuda")
    waits = {
        "item": lambda: x.sum().item(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 0],
        "cpu": lambda: x.cpu(),
        "if": lambda: bool(x.sum() > 0),
        "copy": lambda: torch.ones(5).to("cuda"),
        "tensor": lambda: torch.tensor([1.5], device="cuda"),
        "synchronize": torch.cuda.synchronize,
        "pageable": lambda: torch.ones(5).to("cuda", non_blocking=True),
    }
    told = set()
    for name, wait in waits.items():
        with trace(kinds=["stream_synchronization", "device_synchronization"]) as recorded:
            wait()
        if sum(recorded.counts.values()):
            told.add(name)
    assert told == set(waits) - {"pageable"}
