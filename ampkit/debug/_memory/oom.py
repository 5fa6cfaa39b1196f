"""What is kept of the moment when memory ran out: a folder that says who held it. Never in the way of the error."""

import contextlib
import json
import os
import pickle
import platform
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._arguments import check_at_least, check_instance, check_path
from ..._errors import AmpkitWarning
from ..._text import size_text
from ..._torch.allocator import allocator_history, allocator_pages, allocator_snapshot
from ..._user_line import NOT_THE_USERS, user_line, users_level
from .plot import memory_page
from .profile import MemoryProfile, mib
from .recorder import Recorded

_HISTORY = 20_000  # events of the allocator, some KB each in the files: about ten steps of a ResNet-50
_ROWS = 30  # of a table
# What errors say that are not torch.OutOfMemoryError: the CPU's allocator, the driver, and libraries that ask it.
_SAY_SO = (
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
    """Guard code: where it runs out of memory, write down who holds it, then let the error go on.

    ::

        recorded = ampkit.debug.memory(model, optimizer)
        with ampkit.debug.on_oom("run/oom", profile=recorded), recorded:
            train_step(*batch)

    Each time makes a folder of its own, `oom-rank0`, `oom-rank0-2` and so on, which the error names. In it:
    `summary.txt`, to be read first: the error and its line, the bytes by category and the largest holders, what is
    alive in the CUDA allocator by the line that made it, and `torch.cuda.memory_summary()`. `memory.html` and
    `profile.json`: the profile. `snapshot.pickle`: the allocator's blocks and its last events, for
    pytorch.org/memory_viz; `trace.html` and `segments.html` show the same in a browser, and need a network for that.

    Also a decorator: `@ampkit.debug.on_oom("run/oom")`.

    Args:
        folder: where to write. It is made when it is needed.
        profile: of an earlier step; or a recorder that is entered within, as above, which has then seen this one.
        history: how many events of the CUDA allocator are kept, with the Python line of each. They cost some
            microseconds of the host each. If someone else records them already, nothing is changed.

    Raises:
        Exception: whatever the code raises, the same object. Where it ran out of memory, with a note that says where
            the folder is. What could not be written is in that note and in an `AmpkitWarning`, and changes nothing
            else.

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
                _leave_note(error, _write_bundle(Path(folder), error, profile))
            raise


@contextlib.contextmanager
def snapshot(folder: str | os.PathLike[str], *, history: int = _HISTORY) -> Iterator[Path]:
    """Record what the CUDA allocator does within, and write it down at the end.

    ::

        with ampkit.debug.snapshot("run/memory") as path:
            train_step(*batch)

    Each time makes a folder of its own, `memory-rank0`, `memory-rank0-2` and so on. In it: `snapshot.pickle`, for
    pytorch.org/memory_viz; `trace.html` (every allocation over time) and `segments.html` (how blocks lie in segments),
    torch's own pages, which need a network when they are opened; `blocks.txt`: what is alive at the end by the line
    that made it, which needs nothing.

    Args:
        folder: where to write.
        history: how many events are kept, the last ones.

    Returns:
        A context manager that yields the folder of this time. Nothing is in it before the end, nor if the code raises.

    Sync: none. Aliasing: none. Nothing is allocated on the device.

    Without a CUDA device there is no such allocator: an `AmpkitWarning` says so, and nothing is written.
    """
    check_path("debug.snapshot", "folder", folder)
    check_at_least("debug.snapshot", "history", history, 1, "the number of events that are kept")
    if not torch.cuda.is_available():
        text = "debug.snapshot: no CUDA device, so nothing is written. ampkit.debug.memory records a CPU's memory too."
        warnings.warn(text, AmpkitWarning, stacklevel=users_level())
        yield Path(folder)
        return
    path = _fresh_folder(Path(folder), "memory")
    with _history(history):
        yield path
        taken = allocator_snapshot()
    for name, data in _allocator_files(taken).items():
        (path / name).write_bytes(data)
    (path / "blocks.txt").write_text(_blocks(taken), encoding="utf-8")


def _history(entries: int) -> contextlib.AbstractContextManager[None]:
    # The allocator of cudaMallocAsync keeps no history, and says so by raising.
    has_history = torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "native"
    return allocator_history(entries) if has_history else contextlib.nullcontext()


def _is_oom(error: BaseException | None) -> bool:
    """Return whether an error, or what it was raised from, says that there was no memory."""
    while error is not None:
        said = isinstance(error, RuntimeError) and any(text in str(error) for text in _SAY_SO)
        if said or isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False


def _leave_note(error: BaseException, note: str) -> None:
    add_note = getattr(error, "add_note", None)  # Python 3.11
    if add_note is not None:
        add_note(note)
    else:
        message, *others = error.args or ("",)
        error.args = (f"{message}\n{note}", *others)


# ---------------------------------------------------------------------------------------------------------- the bundle


def _write_bundle(folder: Path, error: BaseException, profile: MemoryProfile | Recorded | None) -> str:
    """Write what there is, and return a note that says where it is and what is missing. Raises no `Exception`."""
    bundle = _Bundle()
    with bundle.part("the folder"):
        bundle.path = _fresh_folder(folder, "oom")
    if bundle.path is not None:
        _fill(bundle, error, profile)
    where = f"ampkit.debug.on_oom wrote {bundle.path}/summary.txt and more" if bundle.path else "ampkit.debug.on_oom"
    note = ". Could not write ".join([where, "; ".join(bundle.missing)]) if bundle.missing else where
    if bundle.missing:
        with contextlib.suppress(AmpkitWarning):  # where warnings are errors, it would take the place of the error
            warnings.warn(note, AmpkitWarning, stacklevel=users_level())
    return note


class _Bundle:
    """A folder that is filled part by part, whatever becomes of the others."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.missing: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context in which an exception means that this part is missing."""
        try:
            yield
        except Exception as failure:
            self.missing.append(f"{name} ({type(failure).__name__}: {failure})")

    def write(self, name: str, data: bytes | str) -> None:
        assert self.path is not None
        (self.path / name).write_bytes(data.encode() if isinstance(data, str) else data)


def _fill(bundle: _Bundle, error: BaseException, profile: MemoryProfile | Recorded | None) -> None:
    sections: dict[str, str] = {}
    if torch.cuda.is_available():
        with bundle.part("the allocator's snapshot"):
            taken = allocator_snapshot()  # first, before anything else changes
            sections["Alive in the CUDA allocator, by the line that made it"] = _blocks(taken)
            for name, data in _allocator_files(taken).items():
                bundle.write(name, data)
        with bundle.part("the summary of CUDA's memory"):
            sections["CUDA's memory"] = _cuda_summary()
    else:
        bundle.missing.append("the allocator's snapshot and summary (there is no CUDA device)")
    if profile is None:
        bundle.missing.append("bytes by category (pass profile=, see ampkit.debug.memory)")
    else:
        with bundle.part("bytes by category"):
            known = profile.profile if isinstance(profile, Recorded) else profile
            sections = {"Bytes by category": known.table(_ROWS), **sections}
            bundle.write("profile.json", json.dumps(known.to_dict()))
            assert bundle.path is not None
            memory_page(known, path=bundle.path / "memory.html")
    with bundle.part("summary.txt"):
        bundle.write("summary.txt", _summary(error, sections, bundle.missing))


def _summary(error: BaseException, sections: Mapping[str, str], missing: Sequence[str]) -> str:
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
    return "\n\n".join(parts) + "\n"


def _cuda_summary() -> str:
    """Return torch's summary of every device that this process has memory on."""
    used = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
    parts = []
    for index in used:
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        parts.append(f"cuda:{index}, {name}: {size_text(free)} of {size_text(total)} free, with all processes\n")
        parts.append(torch.cuda.memory_summary(index))
    return "".join(parts) or "none is reserved"


def _fresh_folder(folder: Path, name: str) -> Path:
    """Make a folder that nothing else writes to: not another rank, nor an earlier time, nor another job."""
    number = 1
    while True:
        path = folder / (f"{name}-rank{_rank()}" + (f"-{number}" if number > 1 else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise
            number += 1
        else:
            return path


def _rank() -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return os.environ.get("RANK", "0")  # as torchrun sets it


# ------------------------------------------------------------------------------------------------------- the allocator


def _allocator_files(taken: dict[str, Any]) -> dict[str, bytes]:
    pages = {f"{name}.html": page.encode() for name, page in allocator_pages(taken).items()}
    return {"snapshot.pickle": pickle.dumps(taken), **pages}


def _blocks(taken: Mapping[str, Any]) -> str:
    """Return a table of the blocks that are alive, summed by the line that asked for them, largest first."""
    sizes: Counter[tuple[int, str]] = Counter()
    counts: Counter[tuple[int, str]] = Counter()
    for segment in taken["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                key = segment.get("device", 0), _line(block.get("frames", ()))
                sizes[key] += block["size"]
                counts[key] += 1
    rows = [
        f"{mib(size):>8} MiB in {counts[key]:>6} block(s) on cuda:{key[0]}  {key[1]}"
        for key, size in sizes.most_common(_ROWS)
    ]
    if len(sizes) > len(rows):
        rows.append(f"... {len(sizes) - len(rows)} more lines")
    return "\n".join([*rows, f"{mib(sum(sizes.values())):>8} MiB in all"])


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of a block's stack that is neither torch's nor ampkit's."""
    for frame in frames:
        if not frame["filename"].startswith((*NOT_THE_USERS, "<", "??")):
            return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return "by torch alone" if frames else "from before the history began"
