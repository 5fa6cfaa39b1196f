"""Functions of torch or Python that others take the place of while a call is watched, in the thread that makes it."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.compile import never_compile_by_itself
from ..._undo import Undo, replace
from ..._user_line import wraps_operations

wraps_operations(__file__)


def replace_here(undo: Undo, owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Have `new(original, *args, **kwargs)` take the place of a function in this thread, until that is undone.

    Other threads call the original function, and so does code while torch.compile traces it.
    """
    thread, original = threading.get_ident(), getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return new(original, *args, **kwargs)

    never_compile_by_itself(replaced)
    replace(undo, owner, name, replaced)
