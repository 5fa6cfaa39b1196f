"""Whose code runs: torch.compile's own, or code that it has written."""

import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch

from .guard import private

_FOLDERS = tuple(f"{Path(torch.__file__).parent / folder}{os.sep}" for folder in ("_inductor", "_dynamo"))
WRITTEN = "torch._inductor.runtime.compile_tasks."  # how the names of modules begin that Inductor has written
_compile_id: Callable[[], object] = private(private(torch, "_guards"), "CompileContext").current_compile_id


def is_compiling() -> bool:
    """Return whether torch.compile is at work in this thread."""
    return _compile_id() is not None


def is_compilers_code(code: CodeType) -> bool:
    """Return whether code is that of torch.compile itself, and not code that was compiled."""
    return code.co_filename.startswith(_FOLDERS)


def is_compiled_code(frame: FrameType) -> bool:
    """Return whether a function is one that torch.compile has written: Inductor's, or a graph that it has traced."""
    is_written = str(frame.f_globals.get("__name__")).startswith(WRITTEN)
    return is_written or frame.f_code.co_filename.startswith("<eval_with_key>")


def calls_from_compiled_code(frame: FrameType | None) -> bool:
    """Return whether code that Inductor has written called what runs in this frame, through torch's own code alone."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(WRITTEN):
            return True
        if not name.startswith(("torch.", "ampkit.")):  # ampkit's modes see what compiled code calls
            return False
        frame = frame.f_back
    return False
