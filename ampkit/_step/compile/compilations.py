"""What is said of compilations: how long they took, which parts are not compiled and why, where graphs end."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..._errors import AmpkitWarning, CaptureError
from ..._text import ProgressBar
from ..._torch.compile import GraphBreak
from ..._user_line import WarnOnce, innermost_users_line
from .compiled_writes import GOES_ON, why_failed


@dataclass(eq=False)
class Compilations:
    """Times the compilations of a step, and warns of what they do not do, of each thing once.

    Args:
        where: what messages begin with.
        raises: whether a compilation that fails is an error (`on_failure="raise"`).
        intended: texts of graph breaks that nobody is told of.
    """

    where: str
    raises: bool
    _intended: Sequence[str] = ()
    seconds: float = 0.0
    _failed: str = ""  # what could not be compiled, with `raises`: what the next call raises

    def __post_init__(self) -> None:
        self._warn = WarnOnce(self.where, AmpkitWarning)

    def refuse_failed(self) -> None:
        """Raise a `CaptureError` if an earlier call has found something that must be compiled and cannot be."""
        if self._failed:
            raise CaptureError(self._failed)

    @contextmanager
    def compiling(self, part: str) -> Iterator[None]:
        """Context for a compilation, which it times. On a terminal it says what is compiled, and how long that took."""
        start, bar = time.perf_counter(), ProgressBar(1)
        try:
            bar.show(f"{self.where}: compiling {part}")
            yield
        finally:
            bar.clear()
            seconds = time.perf_counter() - start
            self.seconds += seconds
        if sys.stderr.isatty():
            done = part.removeprefix("the ")
            print(f"{self.where}: {done} compiled in {seconds:.1f} s", file=sys.stderr, flush=True)

    def say_problem(self, problem: str) -> None:
        """Say that a part is not compiled, of which the call that runs has done some already."""
        text = f"not compiled: {problem}."
        if self.raises:  # in the next call
            self._failed = self._failed or f"{self.where}: {text}"
        else:
            self.say_left_out(problem)

    def say_failed(self, part: str, error: Exception) -> str:
        """Say that a part is not compiled, and return why."""
        problem = why_failed(error)
        self.say_problem(f"{part}, since {problem}")
        return problem

    def say_left_out(self, problem: str) -> None:
        """Warn that a part is not compiled."""
        self._warn(f"not compiled: {problem}. {GOES_ON}")

    def named_breaks(self, breaks: Sequence[GraphBreak]) -> list[str]:
        """Return the graph breaks in words, but for those that are intended, and warn of them."""
        named = []
        for found in breaks:
            if any(text in found.text for text in self._intended):
                continue
            line = innermost_users_line(found.places)
            named.append(f"{line} - {found.reason}" if line else found.reason)
            self._warn(
                f"a graph break: {named[-1]}. What comes before and behind this line is compiled in two parts, and the "
                "line itself is not."
            )
        return named
