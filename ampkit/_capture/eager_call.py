"""An eager call on the capture stream, which leaves copies of its outputs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._torch.modes import modes
from .._undo import Undo
from .cache import copied


def called_on(
    stream: torch.cuda.Stream | None, device: torch.device, fn: Callable[[], Any], context: AbstractContextManager[Any]
) -> Any:
    """Return copies of what `fn` returns, called on this stream and in this context; None is the caller's stream.

    Work of the caller's stream comes before that of `fn`, and later work of the caller's stream behind it. Sync: none.
    """
    with Undo() as undo:
        undo.note(modes())
        if stream is None:
            with context:
                outputs = copied(fn())
        else:
            stream.wait_stream(torch.cuda.current_stream(device))
            try:
                with torch.cuda.stream(stream), context:
                    outputs = copied(fn())
            finally:
                torch.cuda.current_stream(device).wait_stream(stream)
        undo.forget()
    return outputs
