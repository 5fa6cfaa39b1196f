"""Out of memory: a folder says what held it, and the error goes on as it was. Snapshots of the CUDA allocator."""

import contextlib
import gc
import inspect
import json
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import AmpkitWarning, CaptureError, debug
from ampkit.debug._memory import oom as _oom
from ampkit.debug._memory.profile import CATEGORIES, Holder, Mark, MemoryProfile

MIB = 1 << 20
TRAIN = "/home/user/train.py"


def make_profile() -> MemoryProfile:
    series = {category: (0, 0) for category in CATEGORIES}
    series["activation"] = (MIB, 3 * MIB)
    holder = Holder(2 * MIB, "activation", "layer1.0", "train.py:7: `y = m(x)`", (2, 64), "float32")
    return MemoryProfile("float32", "cuda:0", (0.0, 1.0), series, (Mark(0, "step 0"),), (holder,), False)


def frame(file: str, line: int, name: str = "f") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def block(size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
    return {"size": size, "requested_size": size, "address": 0, "state": state, "frames": list(frames)}


def make_snapshot() -> dict[str, Any]:
    """Return what torch.cuda.memory._snapshot() does, by its documentation."""
    inside = frame(torch.__file__, 9), frame(_oom.__file__, 9)
    blocks = [
        block(3 * MIB, *inside, frame(TRAIN, 7, "train_step"), frame(TRAIN, 1, "main")),
        block(2 * MIB, *inside, frame(TRAIN, 7, "train_step")),
        block(7 * MIB, frame(TRAIN, 9), state="inactive"),
        block(1 * MIB),
        block(MIB // 2, *inside),
    ]
    return {"segments": [{"device": 0, "address": 0, "total_size": 20 * MIB, "blocks": blocks}], "device_traces": [[]]}


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device as far as the guard asks for one: an allocator with a history and a snapshot."""
    asked: list[int] = []

    @contextlib.contextmanager
    def history(entries: int) -> Any:
        asked.append(entries)
        try:
            yield
        finally:
            asked.append(0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_oom, "allocator_history", history)
    monkeypatch.setattr(_oom, "allocator_snapshot", make_snapshot)
    monkeypatch.setattr(_oom, "_cuda_summary", lambda: "summary of cuda:0")
    return asked


def run_out(text: str = "CUDA out of memory. Tried to allocate 2.00 GiB.") -> None:
    raise torch.OutOfMemoryError(text)


def note_of(error: BaseException) -> str:
    (note,) = error.__notes__ if hasattr(error, "add_note") else error.args[0].splitlines()[1:]
    return str(note)


def guarded(folder: Path, error: BaseException | None = None, **kwargs: Any) -> BaseException:
    """Raise an error in the guard, and return what comes out."""
    error = error or torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(type(error)) as caught, debug.on_oom(folder, **kwargs):
        raise error
    assert caught.value is error
    return error


def test_report(cuda, tmp_path):
    """M2: snapshot, both plots, category table, largest holders with their lines, and the error's own line."""
    with pytest.raises(torch.OutOfMemoryError) as caught, debug.on_oom(tmp_path, profile=make_profile(), history=77):
        run_out()
    folder = tmp_path / "oom-rank0"
    assert note_of(caught.value) == f"ampkit.debug.on_oom wrote {folder}/summary.txt and more"
    names = {"memory.html", "profile.json", "segments.html", "snapshot.pickle", "summary.txt", "trace.html"}
    assert {path.name for path in folder.iterdir()} == names
    assert pickle.loads((folder / "snapshot.pickle").read_bytes()) == make_snapshot()
    assert MemoryProfile.from_dict(json.loads((folder / "profile.json").read_text())) == make_profile()
    summary = (folder / "summary.txt").read_text()
    lines = [line.split() for line in summary.splitlines()]
    for expected in (
        "error: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "missing: nothing",
        "activation 3.0 100.0%",
        "2.0 activation layer1.0 float32 [2, 64]",
        "train.py:7: `y = m(x)`",
        f"5.0 MiB in 2 block(s) on cuda:0 {TRAIN}:7 in train_step",
        "1.0 MiB in 1 block(s) on cuda:0 from before the history began",
        "0.5 MiB in 1 block(s) on cuda:0 by torch alone",
        "6.5 MiB in all",
        "summary of cuda:0",
    ):
        assert expected.split() in lines, expected
    assert "test_oom.py" in next(line for line in summary.splitlines() if line.startswith("line: "))
    assert f"{TRAIN}:9" not in summary  # an inactive block holds nothing
    assert cuda == [77, 0]


def test_pages_show_trace_and_segments(cuda, tmp_path):
    """M1: torch's own two pages, with the snapshot inside."""
    with debug.snapshot(tmp_path) as path:
        assert not list(path.iterdir())
    trace, segments = (path / "trace.html").read_text(), (path / "segments.html").read_text()
    assert "Active Memory Timeline" in trace
    assert "Allocator State History" in segments
    assert path == tmp_path / "memory-rank0"
    assert pickle.loads((path / "snapshot.pickle").read_bytes()) == make_snapshot()
    assert f"{TRAIN}:7 in train_step" in (path / "blocks.txt").read_text()
    assert cuda == [20_000, 0]


def test_long_tables_are_cut():
    blocks = [block(MIB * (i + 1), frame(TRAIN, i)) for i in range(50)]
    rows = _oom._block_table({"segments": [{"device": 1, "blocks": blocks}]}).splitlines()
    assert len(rows) == 32
    assert rows[0].endswith(f"50.0 MiB in      1 block(s) on cuda:1  {TRAIN}:49 in f")
    assert rows[30:] == ["... 20 more lines", "  1275.0 MiB in all"]


def test_nothing_is_written_for_other_errors(cuda, tmp_path):
    for error in (ValueError("CUDA out of memory"), RuntimeError("shape mismatch")):
        assert not getattr(guarded(tmp_path / "new", error), "__notes__", [])
    with debug.on_oom(tmp_path / "new"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_other_ways_to_say_it(cuda, tmp_path, error):
    guarded(tmp_path, error)
    assert (tmp_path / "oom-rank0" / "summary.txt").exists()


def test_cause_counts(cuda, tmp_path):
    """A capture that failed for want of memory raises an error of ampkit's from torch's."""
    error = CaptureError("capturing failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    guarded(tmp_path, error)
    assert "CaptureError" in (tmp_path / "oom-rank0" / "summary.txt").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is there without CUDA")
def test_real_error_on_the_cpu(tmp_path):
    """M2: without CUDA there are the categories, from a recorder within the guard, and a word on what there is not."""
    model = nn.Linear(8, 8)
    recorded = debug.memory(model)

    @debug.on_oom(tmp_path, profile=recorded)
    def step() -> None:
        with recorded:
            hidden = model(torch.ones(2, 8))
            hidden + torch.empty(1 << 55, dtype=torch.uint8)

    with pytest.warns(AmpkitWarning, match="there is no CUDA device"), pytest.raises(RuntimeError, match="DefaultCPU"):
        step()
    summary = (tmp_path / "oom-rank0" / "summary.txt").read_text()
    assert "hidden + torch.empty(1 << 55" in next(line for line in summary.splitlines() if line.startswith("line: "))
    assert "\nparameter " in summary
    assert "the allocator's snapshot and summary (there is no CUDA device)" in summary
    assert (tmp_path / "oom-rank0" / "memory.html").exists()


def test_recorder_that_is_not_done(cuda, tmp_path):
    """A recorder around the guard has no profile yet: the rest is written."""
    with debug.memory(nn.Linear(8, 8)) as recorded, pytest.warns(AmpkitWarning, match="before the context is left"):
        guarded(tmp_path, profile=recorded)
    assert (tmp_path / "oom-rank0" / "trace.html").exists()


def test_no_profile(cuda, tmp_path):
    with pytest.warns(AmpkitWarning, match="pass profile="):
        guarded(tmp_path)


@pytest.mark.parametrize("action", ["always", "error"])
def test_failure_to_write_hides_nothing(cuda, tmp_path, monkeypatch, action):
    """The original error comes out, with what could not be written; also where warnings are errors."""

    def fail() -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(_oom, "allocator_snapshot", fail)
    with warnings.catch_warnings(record=action == "always") as seen:
        warnings.simplefilter(action)
        error = guarded(tmp_path, profile=make_profile())
    expected = "Could not write the allocator's snapshot (OSError: No space left on device)"
    assert note_of(error).endswith(expected)
    assert (tmp_path / "oom-rank0" / "memory.html").exists()
    assert "missing: the allocator's snapshot" in (tmp_path / "oom-rank0" / "summary.txt").read_text()
    if seen is not None:
        (warning,) = seen
        assert str(warning.message).endswith(expected)
        assert warning.filename == __file__


def test_folder_that_cannot_be_made(cuda, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(AmpkitWarning, match="Could not write the folder"):
        error = guarded(tmp_path / "file", profile=make_profile())
    assert note_of(error).startswith("ampkit.debug.on_oom. Could not write the folder (NotADirectoryError")


def test_nothing_is_overwritten(cuda, tmp_path, monkeypatch):
    """Another rank and another time have folders of their own."""
    for rank in ("0", "1", "1"):
        monkeypatch.setenv("RANK", rank)
        guarded(tmp_path, profile=make_profile())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["oom-rank0", "oom-rank1", "oom-rank1-2"]
    assert "rank 1, process" in (tmp_path / "oom-rank1-2" / "summary.txt").read_text()


def test_ranks_that_write_at_once(tmp_path):
    """Also where two processes think that they are the same rank, no folder is used twice."""
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: _oom._new_folder(tmp_path / "new", "oom"), range(80)))
    assert len(set(folders)) == len(list((tmp_path / "new").iterdir())) == 80


def test_decorator(cuda, tmp_path):
    train = debug.on_oom(tmp_path, profile=make_profile())(run_out)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            train()
    assert len(list(tmp_path.iterdir())) == 2


def test_note_before_python_3_11(cuda, tmp_path):
    class Old(torch.OutOfMemoryError):
        add_note = None  # type: ignore[assignment]

    error = guarded(tmp_path, Old("CUDA out of memory", 5), profile=make_profile())
    folder = tmp_path / "oom-rank0"
    assert error.args == (f"CUDA out of memory\nampkit.debug.on_oom wrote {folder}/summary.txt and more", 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is there without CUDA")
def test_snapshot_without_cuda_says_so(tmp_path):
    """M1: a CPU has no caching allocator to look into."""
    with pytest.warns(AmpkitWarning, match="no CUDA device, so nothing is written"), debug.snapshot(tmp_path / "new"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("backend", "asked"), [("native", [20_000, 0]), ("cudaMallocAsync", [])])
def test_only_the_native_allocator_is_asked_for_its_history(cuda, monkeypatch, tmp_path, backend, asked):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    guarded(tmp_path, profile=make_profile())
    assert cuda == asked


@pytest.fixture
def little_memory():
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 256 * MIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()  # what ran out of memory is in a cycle with its traceback
    torch.cuda.empty_cache()


@pytest.mark.cuda
def test_real_error(little_memory, tmp_path):
    """M2: a real error: blocks and categories name the line, and the guard takes no memory itself."""
    model = nn.Linear(256, 256, device="cuda")
    recorded = debug.memory(model)
    kept = []

    def step() -> None:
        with recorded:
            while True:
                kept.append(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))  # the culprit

    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with pytest.raises(torch.OutOfMemoryError) as caught, debug.on_oom(tmp_path, profile=recorded):
        step()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == len(kept)
    folder = tmp_path / "oom-rank0"
    assert str(folder) in note_of(caught.value)
    summary = (folder / "summary.txt").read_text()
    assert "missing: nothing" in summary
    assert f"in {len(kept):>6} block(s) on cuda:0  {__file__}" in summary
    assert "# the culprit" in next(line for line in summary.splitlines() if line.startswith("line: "))
    taken = pickle.loads((folder / "snapshot.pickle").read_bytes())
    assert [event["action"] for event in taken["device_traces"][0]].count("oom") >= 1
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.cuda
def test_real_snapshot(tmp_path):
    """M1: stacks of what is alive, and every allocation within."""
    with debug.snapshot(tmp_path) as path:
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    rows = (path / "blocks.txt").read_text().splitlines()
    line = inspect.getsourcelines(test_real_snapshot)[1] + 4  # of `kept`; the other one is not alive
    assert [row.partition(" on ")[2] for row in rows if __file__ in row] == [
        f"cuda:0  {__file__}:{line} in test_real_snapshot"
    ]
    trace = pickle.loads((path / "snapshot.pickle").read_bytes())["device_traces"][kept.device.index]
    assert {3 * MIB, 5 * MIB} <= {event["size"] for event in trace if event["action"] == "alloc"}
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.cuda
def test_history_of_someone_else_goes_on(tmp_path):
    is_on = torch._C._cuda_isHistoryEnabled
    torch.cuda.memory._record_memory_history(max_entries=100)
    with debug.snapshot(tmp_path):
        pass
    assert is_on()
    torch.cuda.memory._record_memory_history(enabled=None)
    assert not is_on()
