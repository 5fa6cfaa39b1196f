"""What is written when memory runs out: a folder that says what held it. The error goes on in any case."""

import contextlib
import itertools
import json
import os
import pickle
import platform
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..._arguments import check_at_least, check_instance, check_path
from ..._errors import AmpkitWarning
from ..._text import size_text
from ..._torch.device.allocator import allocator_history, allocator_pages, allocator_snapshot
from ..._user_line import NOT_THE_USERS, user_line, users_level
from .page import memory_page
from .profile import MemoryProfile, mib
from .recorder import Recorded

_HISTORY = 20_000  # events of the allocator, some KB each in the files: about ten steps of a ResNet-50
_ROWS = 30  # of each table in a summary: about what fits on a screen
# How the CPU's allocator, the CUDA driver and CUDA's libraries say it in errors that are not torch.OutOfMemoryError.
_OOM_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


@contextlib.contextmanager
def on_oom(
    folder: str | os.PathLike[str], *, profile: MemoryProfile | Recorded | None = None, history: int = _HISTORY
) -> Iterator[None]:
    """Write a folder that says what held the memory if the code inside runs out of it, and let the error go on.

    ::

        recorded = ampkit.debug.memory(model, optimizer)
        with ampkit.debug.on_oom("run/oom", profile=recorded), recorded:
            train_step(*batch)

    Each time, a new folder is made: `oom-rank0`, `oom-rank0-2` and so on. The error names it. It holds:

    - `summary.txt`, to be read first: the error and its line, the bytes in each category, the largest holders, what is
      alive in the CUDA allocator by the line that made it, and `torch.cuda.memory_summary()`.
    - `memory.html` and `profile.json`: the profile.
    - `snapshot.pickle`: the allocator's blocks and its last events, for pytorch.org/memory_viz.
    - `trace.html` and `segments.html`: the same for a browser, which needs a network to show them.

    It is also a decorator: `@ampkit.debug.on_oom("run/oom")`.

    Args:
        folder: where to make the new folder. It is made when it is needed.
        profile: a profile of an earlier step; or, to record the step that fails, a recorder that is entered inside, as
            above.
        history: how many events of the CUDA allocator are kept, with the Python line of each. Each costs some
            microseconds of the host. If a history is being recorded already, it is left as it is.

    Raises:
        Exception: what the code raises, the same object. If it ran out of memory, the error has a note that names the
            folder. If something could not be written, that note and an `AmpkitWarning` say so.

    Sync: none. Aliasing: none. Nothing is allocated on the device.
    """
    check_path("debug.on_oom", "folder", folder)
    if profile is not None:
        kinds = (MemoryProfile, Recorded)
        check_instance("debug.on_oom", "profile", profile, kinds, "what ampkit.debug.memory returned, or None")
    check_at_least("debug.on_oom", "history", history, 1, "the number of events that are kept")
    with _history(history):
        try:
            yield
        except Exception as error:
            if _is_oom(error):
                note = _write_report(Path(folder), error, profile)
                if (add_note := getattr(error, "add_note", None)) is not None:
                    add_note(note)
                else:  # Python 3.10 has none
                    message, *others = error.args or ("",)
                    error.args = (f"{message}\n{note}", *others)
            raise


@contextlib.contextmanager
def snapshot(folder: str | os.PathLike[str], *, history: int = _HISTORY) -> Iterator[Path]:
    """Record what the CUDA allocator does while the code inside runs, and write it to a folder at the end.

    ::

        with ampkit.debug.snapshot("run/memory") as path:
            train_step(*batch)

    Each time, a new folder is made: `memory-rank0`, `memory-rank0-2` and so on. It holds:

    - `blocks.txt`: a table of what is alive at the end, by the line that made it.
    - `snapshot.pickle`: for pytorch.org/memory_viz.
    - `trace.html` and `segments.html`: torch's own pages, of every allocation over time and of the blocks in their
      segments. They need a network when they are opened.

    Without a CUDA device there is no such allocator. Then an `AmpkitWarning` says so, and nothing is written.

    Args:
        folder: where to make the new folder.
        history: how many events are kept; of more, the last ones.

    Returns:
        A context manager that yields the new folder. The folder stays empty until the end, and if the code raises.

    Sync: none. Aliasing: none. Nothing is allocated on the device.
    """
    check_path("debug.snapshot", "folder", folder)
    check_at_least("debug.snapshot", "history", history, 1, "the number of events that are kept")
    if not torch.cuda.is_available():
        text = "debug.snapshot: no CUDA device, so nothing is written. ampkit.debug.memory works on a CPU too."
        warnings.warn(text, AmpkitWarning, stacklevel=users_level())
        yield Path(folder)
        return
    path = _new_folder(Path(folder), "memory")
    with _history(history):
        yield path
        taken = allocator_snapshot()
    for name, data in {"snapshot.pickle": pickle.dumps(taken), **allocator_pages(taken)}.items():
        (path / name).write_bytes(data)
    (path / "blocks.txt").write_text(_block_table(taken), encoding="utf-8")


def _history(entries: int) -> contextlib.AbstractContextManager[None]:
    # The allocator of cudaMallocAsync keeps no history: it raises if it is asked to.
    has_history = torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "native"
    return allocator_history(entries) if has_history else contextlib.nullcontext()


def _is_oom(error: BaseException | None) -> bool:
    """Return whether an error, or an error that it was raised from, says that memory ran out."""
    while error is not None:
        says_so = isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM_MESSAGES)
        if says_so or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False


def _write_report(folder: Path, error: BaseException, profile: MemoryProfile | Recorded | None) -> str:
    """Write what can be written, and return a note that says where it is and what is missing. Raises no `Exception`."""
    note = "ampkit.debug.on_oom"
    missing: list[str] = []
    with _part("the folder", missing):
        path = _new_folder(folder, "oom")
        note = f"ampkit.debug.on_oom wrote {path}/summary.txt and more"
        _write_parts(path, missing, error, profile)
    if missing:
        note += f". Could not write {'; '.join(missing)}"
        with contextlib.suppress(AmpkitWarning):  # where warnings are errors, it would hide the user's error
            warnings.warn(note, AmpkitWarning, stacklevel=users_level())
    return note


@contextlib.contextmanager
def _part(name: str, missing: list[str]) -> Iterator[None]:
    """Context that notes an exception as the reason why this part is missing. The other parts are still written."""
    try:
        yield
    except Exception as failure:
        missing.append(f"{name} ({type(failure).__name__}: {failure})")


def _write_parts(
    path: Path, missing: list[str], error: BaseException, profile: MemoryProfile | Recorded | None
) -> None:
    sections: dict[str, str] = {}
    if torch.cuda.is_available():
        with _part("the allocator's snapshot", missing):
            taken = allocator_snapshot()  # first, before anything below changes it
            sections["Alive in the CUDA allocator, by the line that made it"] = _block_table(taken)
            for name, data in {"snapshot.pickle": pickle.dumps(taken), **allocator_pages(taken)}.items():
                (path / name).write_bytes(data)
        with _part("the summary of CUDA's memory", missing):
            sections["CUDA's memory"] = _cuda_summary()
    else:
        missing.append("the allocator's snapshot and summary (there is no CUDA device)")
    if profile is None:
        missing.append("bytes by category (pass profile=, see ampkit.debug.memory)")
    else:
        with _part("bytes by category", missing):
            known = profile.profile if isinstance(profile, Recorded) else profile
            sections = {"Bytes by category": known.table(_ROWS), **sections}
            (path / "profile.json").write_text(json.dumps(known.to_dict()), encoding="utf-8")
            memory_page(known, path=path / "memory.html")
    with _part("summary.txt", missing):
        head = {
            "error": "".join(traceback.format_exception_only(type(error), error)).strip(),
            "line": user_line(error) or "none of the user's",
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "process": f"rank {_rank()}, process {os.getpid()} on {platform.node()}",
            "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
            "command": " ".join(sys.argv),
            "missing": "; ".join(missing) or "nothing",
        }
        parts = ["\n".join(f"{name}: {text}" for name, text in head.items())]
        parts += [f"{title}\n{'-' * len(title)}\n{text}" for title, text in sections.items()]
        (path / "summary.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _cuda_summary() -> str:
    """Return torch's summary of each device on which this process has reserved memory."""
    parts = []
    for index in (each for each in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(each)):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        parts.append(f"cuda:{index}, {name}: {size_text(free)} of {size_text(total)} free, with all processes\n")
        parts.append(torch.cuda.memory_summary(index))
    return "".join(parts) or "none is reserved"


def _new_folder(folder: Path, name: str) -> Path:
    """Make a folder that nothing else has written to: no other rank, no earlier call and no other job."""
    for number in itertools.count(1):
        path = folder / (f"{name}-rank{_rank()}" + (f"-{number}" if number > 1 else ""))
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            if not path.is_dir():
                raise
    return path


def _rank() -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return os.environ.get("RANK", "0")  # as torchrun sets it


def _block_table(taken: Mapping[str, Any]) -> str:
    """Return a table of the blocks that are alive: the sum for each line that asked for some, largest first."""
    alive: dict[tuple[int, str], list[int]] = defaultdict(list)  # sizes, by device and line
    for segment in taken["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = block.get("frames", ())
                users = (frame for frame in frames if not frame["filename"].startswith((*NOT_THE_USERS, "<", "??")))
                lines = (f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in users)
                line = next(lines, "by torch alone" if frames else "from before the history began")
                alive[segment.get("device", 0), line].append(block["size"])
    rows = [
        f"{mib(sum(sizes)):>8} MiB in {len(sizes):>6} block(s) on cuda:{device}  {line}"
        for (device, line), sizes in sorted(alive.items(), key=lambda item: -sum(item[1]))
    ]
    if len(rows) > _ROWS:
        rows[_ROWS:] = [f"... {len(rows) - _ROWS} more lines"]
    return "\n".join([*rows, f"{mib(sum(map(sum, alive.values()))):>8} MiB in all"])
