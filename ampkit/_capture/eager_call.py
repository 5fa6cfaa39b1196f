"""An eager call on the capture stream, which leaves outputs of the caller's own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._torch.modes import modes
from .._undo import Undo


def called_on(
    stream: torch.cuda.Stream | None,
    device: torch.device,
    fn: Callable[[], Any],
    context: AbstractContextManager[Any],
    own: Callable[[Any], Any],
) -> Any:
    """Return `own(outputs)` of what `fn` returns, called on this stream and in this context; None is the caller's one.

    Work of the caller's stream comes before that of `fn`, and later work of the caller's stream behind it. Sync: none.
    """
    with Undo() as undo:
        undo.note(modes())
        if stream is None:
            with context:
                outputs = own(fn())
        else:
            stream.wait_stream(torch.cuda.current_stream(device))
            try:
                with torch.cuda.stream(stream), context:
                    outputs = own(fn())
            finally:
                torch.cuda.current_stream(device).wait_stream(stream)
        undo.forget()
    return outputs
