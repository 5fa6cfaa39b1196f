"""Working weights written by compiled code."""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..._errors import AmpkitWarning, CaptureError
from ..._text import error_line
from ..._torch.compile import Compiler, cause_of
from ..._torch.tensors.tensors import foreach_copy_
from ..._user_line import users_level

GOES_ON = "Training goes on, and this part of the step is not compiled."


def why_failed(error: Exception) -> str:
    """Return in words that torch.compile has failed with this error: what it says, or else the line that raised it."""
    cause = cause_of(error)
    frames = traceback.extract_tb(cause.__traceback__)
    where = f" in {frames[-1].filename.split('site-packages/')[-1]}:{frames[-1].lineno}" if frames else ""
    return f"torch.compile failed: {error_line(cause) if str(cause).strip() else type(cause).__name__ + where}"


@dataclass(eq=False)
class CompiledWrites:
    """Writes working weights in one kernel with as many blocks as fit.

    torch's foreach kernel gives 65,536 elements to one block, which takes 8 microseconds for a layer of 256 x 256 (on
    an H200, with torch 2.11).
    """

    _compiler: Compiler
    _where: str  # how messages begin
    raises: bool = field(kw_only=True)  # whether a compilation that fails is an error
    problem: str = ""  # why torch's kernel is used; "" if it is not

    def writer(self) -> Callable[[list[Any], list[Any]], None]:
        """Return a function that writes the weights of a second list to the copies in the first one."""
        compiled = self._compiler.compiled(_copy_each, whole=True)

        def write(copies: list[Any], weights: list[Any]) -> None:
            if not self.problem:
                try:
                    compiled(copies, weights)
                except Exception as error:  # nothing is lost: all copies are written again
                    problem = why_failed(error)
                    text = f"{self._where}: not compiled: working weights, since {problem}."
                    if self.raises:
                        raise CaptureError(text) from error
                    self.problem = problem  # from now on, so that there is one warning
                    warnings.warn(f"{text} {GOES_ON}", AmpkitWarning, stacklevel=users_level())
            if self.problem:
                foreach_copy_(copies, weights)

        return write


def _copy_each(copies: list[Tensor], weights: list[Tensor]) -> None:
    for copy, weight in zip(copies, weights, strict=True):
        copy.copy_(weight)
