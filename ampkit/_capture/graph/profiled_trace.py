"""How an exported profiler trace is read from a file."""

import gzip
import json
import os
from pathlib import Path
from typing import Any


def read_trace(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the trace in a file that `export_chrome_trace` wrote, with its `traceEvents` as a list.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no trace in it.
    """
    file = Path(path)
    data = file.read_bytes()
    if file.suffix == ".gz":
        data = gzip.decompress(data)
    trace = json.loads(data.decode(errors="replace"), strict=False)  # torch writes names of kernels as they are
    return checked_trace(trace, str(path))


def checked_trace(trace: Any, name: str) -> dict[str, Any]:
    """Return a trace. Raise a `ValueError` if it is none."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{name}: expected a trace as torch.profiler's export_chrome_trace writes it.")
    return trace
