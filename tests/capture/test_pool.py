"""Which segments a pool takes, and what a capture leaves of the process's settings, which torch has without a GPU."""

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import Compiled
from torch import nn

from ampkit import debug
from ampkit._capture.graph import pool as _segments
from ampkit._capture.graph.graph import CudaGraph, Pool
from ampkit._capture.graph.pool import _Growth, _SharedChange
from ampkit._torch.device.allocator import allocator_settings, set_allocator_settings
from ampkit._undo import Undo


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The allocator of a GPU on Linux; its settings are put back."""
    before = allocator_settings()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr("sys.platform", "linux")
    yield
    set_allocator_settings("expandable_segments:False")
    set_allocator_settings(before[0])
    assert allocator_settings() == before


def all_settings() -> Any:
    return torch._C._cuda_memorySnapshot((0, 0, False))["allocator_settings"]


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "max_split_size_mb:512",
        "max_split_size_mb:512, ",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],garbage_collection_threshold:0.8",
    ],
)
def test_segments_grow_and_nothing_else_changes(settings: str) -> None:
    """G4: after a capture, or an error in it, the allocator has the settings from before."""
    set_allocator_settings(settings)
    before = all_settings()

    def capture() -> None:
        with _SharedChange(_Growth().begin)():
            assert {**all_settings(), "PYTORCH_CUDA_ALLOC_CONF": settings} == {**before, "expandable_segments": True}
            raise KeyError

    with pytest.raises(KeyError):
        capture()
    assert all_settings() == before


@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments:True", "backend:native"])
def test_what_the_user_has_set_stays(settings: str) -> None:
    """G4: to either value; a text with a backend is for the start of the process."""
    set_allocator_settings(settings)
    before = all_settings()
    with _SharedChange(_Growth().begin)():
        assert all_settings() == before
    assert all_settings() == before


def test_an_option_that_the_last_text_does_not_name_stays() -> None:
    """G4: torch keeps expandable_segments:True behind a text without it."""
    set_allocator_settings("expandable_segments:True")
    set_allocator_settings("max_split_size_mb:512")
    with _SharedChange(_Growth().begin)():
        pass
    assert allocator_settings() == ("max_split_size_mb:512", True)


@pytest.mark.parametrize("why", ["NCCL", "Windows", "cudaMallocAsync"])
def test_segments_do_not_grow_where_they_cannot(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """G4: segments do not grow if NCCL is in use, if torch would warn, or with another allocator."""
    if why == "NCCL":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    elif why == "Windows":
        monkeypatch.setattr("sys.platform", "win32")
    else:
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: why)
    with _SharedChange(_Growth().begin)():
        assert not allocator_settings()[1]


def test_a_text_that_takes_no_more_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: a capture goes on without growing segments, and raises nothing."""
    told: list[str] = []

    def refuse(text: str) -> None:
        told.append(text)
        if "," in text:
            raise ValueError("Unrecognized key")

    monkeypatch.setattr(_segments, "allocator_settings", lambda: ("a:1", False))
    monkeypatch.setattr(_segments, "set_allocator_settings", refuse)
    with _SharedChange(_Growth().begin)():
        assert told == ["a:1,expandable_segments:True", "a:1"]
    assert len(told) == 2


@pytest.mark.parametrize(
    ("message", "grows"),
    [("CUDA driver error: operation not supported", False), ("CUDA driver error: out of memory", True), ("", True)],
)
def test_a_machine_that_cannot_map_memory(monkeypatch: pytest.MonkeyPatch, message: str, grows: bool) -> None:
    """G2: on WSL2, the first allocation shows it, and no segment grows then or later."""
    tried = []

    def allocate(*args: Any, **kwargs: Any) -> None:
        tried.append(allocator_settings()[1])
        if message:
            raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: None)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())
    monkeypatch.setattr(torch, "empty", allocate)
    growth = _Growth()
    for _ in range(2):
        with _SharedChange(growth.begin)():
            assert allocator_settings()[1] == grows
        assert not allocator_settings()[1]
    assert tried == [True]


def test_captures_of_two_threads_overlap() -> None:
    """G12: a change of the process is undone by the last thread that wants it, whichever thread made it."""
    enabled = gc.isenabled()
    collection, first_is_in, second_is_in, first_is_out = (
        _segments.no_collection,
        *(threading.Event() for _ in range(3)),
    )
    seen: list[bool] = []

    def second() -> None:
        first_is_in.wait(10)
        with collection():
            second_is_in.set()
            first_is_out.wait(10)
            seen.append(gc.isenabled())

    thread = threading.Thread(target=second)
    thread.start()
    with collection():
        first_is_in.set()
        second_is_in.wait(10)
    first_is_out.set()
    thread.join(10)
    assert (seen, gc.isenabled()) == ([False], enabled)


def test_an_error_in_the_making_leaves_nothing_changed() -> None:
    """G12: if the change raises, the next thread that enters makes it."""
    made = []

    def make(undo: Undo) -> None:
        made.append(1)
        if len(made) == 1:
            raise KeyError
        _segments._stop_collection(undo)

    context = _SharedChange(make)
    with pytest.raises(KeyError), context():
        pass
    with context():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_g3_a_pool_knows_which_graphs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """G3: torch frees a pool with its last graph, even one that was dropped, so the next graph takes a new handle."""
    handles = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pool, graphs = Pool(), [CudaGraph(Any, Pool()) for _ in range(3)]
    assert [pool.enter(graph) for graph in graphs] == [0, 0, 0]
    pool.leave(graphs.pop())
    assert pool.enter(graphs[0]) == 0
    graphs.clear()
    assert pool.enter(CudaGraph(Any, Pool())) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_in_a_capture_while_memory_is_recorded() -> None:
    """P1: nothing compiles while memory is recorded, so a capture then has nothing to refuse; behind it, it has."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    compiled = Compiled(model)
    with debug.memory(model), _segments.no_recompile():
        compiled.module(x)
    assert compiled.compiles == 0
    with pytest.raises(RuntimeError, match="fail_on_recompile"), _segments.no_recompile():
        compiled.module(x)
