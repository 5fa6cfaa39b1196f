"""What code is told that asks whether it is being captured, or compiled: the same eagerly and in a capture.

The questions are `torch.cuda.is_current_stream_capturing()` and `torch.compiler.is_compiling()`, in all spellings.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_stack
from types import FrameType
from typing import ParamSpec, TypeVar

import torch

from ..._torch.autograd.autograd import current_graph_task
from ..._torch.compile import compiling_truth, passes_question_on, replace_compiling_questions
from ..._torch.device.streams import capturing_builtin, replace_capturing_builtin
from ..._undo import Undo

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Libraries take another branch in a capture: transformers/masking_utils.py builds another mask, and another attention
# kernel runs. So the graph would not do what the eager step does. Torch needs the true answer (health check of the
# optimizers, symmetric memory), and so does ampkit.
_TOLD_THE_TRUTH = ("torch", "ampkit")
# Where the branch for a capture leaves the same bits outside of one, and only that one can be captured: SyncBatchNorm
# takes the statistics of all ranks without a boolean mask, which would leave out ranks with an empty batch.
_BRANCHES_OF_TORCH = ("torch.nn.modules._functions",)


class _Captures(threading.local):
    """What is known per thread."""

    recorded = 0  # how many calls it is in whose operations are those of a graph, or are compared with them
    answer: bool | None = None  # what user code is told; None if that is the truth
    asked = False  # whether user code has asked
    noting = False  # whether it is to be noted, too, where user code asks
    asked_in_checkpoint = False  # whether it has asked in a function that a backward pass may call again


captures = _Captures()
_answers: dict[object, tuple[int, bool]] = {}  # handles of streams, and what is told on them, the newest last
_asked_of_compiler: set[object] = set()  # those of `_answers` in which questions to torch.compiler are answered here
_lock = threading.Lock()
_is_capturing = capturing_builtin()


@contextmanager
def recording() -> Iterator[None]:
    """Context of a capture, or of the eager call that one is compared with."""
    with Undo() as undo:
        undo.note(setattr, captures, "recorded", captures.recorded)
        captures.recorded += 1
        yield


@contextmanager
def hidden_capture(stream: torch.cuda.Stream) -> Iterator[None]:
    """Context of a capture on this stream, in which `torch.cuda.is_current_stream_capturing()` is False for user code.

    Other threads get the true answer for their own streams. The answer depends on the stream as well as on the thread,
    because checkpointing calls user code again on autograd's threads.
    """
    with answering(False, stream.cuda_stream), recording():
        yield


@contextmanager
def answering(answer: bool, stream: int | None = None, *, notes: bool = False) -> Iterator[None]:
    """Context in which user code of this thread, and of autograd's threads on its stream, is told `answer`.

    Args:
        answer: whether its stream is being captured.
        stream: the handle of the stream; None for the current one.
        notes: whether questions are noted. Otherwise False is what torch.compiler answers by itself.
    """
    if stream is None:
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0
    with Undo() as undo:
        token = object()
        undo.note(_end, token)
        undo.note(setattr, captures, "answer", captures.answer)
        with _lock:
            _answers[token] = stream, answer
            if answer or notes:
                _asked_of_compiler.add(token)
            _replace()
        captures.answer = answer
        yield


def seeing_capture(fn: Callable[_P, _R], sees_capture: bool) -> Callable[_P, _R]:
    """Return `fn` for a call in which user code is told that it is being captured, if `sees_capture` is true."""
    return answering(True)(fn) if sees_capture else fn


@dataclass(eq=False)
class Answer:
    """What the code of one layout, or of one callable, is told when it asks whether its stream is being captured.

    The answer changes once at most: if what the code does when it is told False cannot be captured, it is told True.

    Attributes:
        sees_capture: the answer, in eager calls too.
        may_change: whether there may be another one.
        problem_when_hidden: while the answer True is tried: why the code that was told False cannot be captured. "" if
            nothing was tried yet.
    """

    sees_capture: bool
    may_change: bool = field(kw_only=True)
    problem_when_hidden: str = ""
    _news: str = ""

    def try_other(self, problem: str) -> bool:
        """Change the answer if user code has asked in the call just made, which cannot be captured for this problem.

        Return whether it was changed.
        """
        if self.problem_when_hidden or not (self.may_change and captures.asked):
            return False
        self.problem_when_hidden, self.sees_capture = problem, True
        return True

    def keep(self, problem: str = "") -> str:
        """Keep the answer that was tried, unless there is a problem with it, too. From now on it does not change.

        Return why the code cannot be captured with the answer that is kept, "" if it can.
        """
        first, self.problem_when_hidden, self.may_change = self.problem_when_hidden, "", False
        if problem:
            self.sees_capture = False
            return first
        self._news = first
        return ""

    def take_news(self, since: str) -> str:
        """Return what to say of a new answer, which is given from `since` on, once; "" if there is none."""
        problem, self._news = self._news.rstrip("."), ""
        return problem and (
            "code that asks torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling() took a branch "
            f"that a graph cannot contain: {problem}. From {since} on the answer is True, in eager calls too. The "
            "last bits may differ from those of the other branch. Pass capturing=True to answer True in all calls, or "
            "capturing=False for False."
        )


@contextmanager
def noting_questions(answer: bool) -> Iterator[None]:
    """Context of a call whose code is told `answer`. Behind it `captures` says whether user code has asked."""
    captures.asked = captures.asked_in_checkpoint = False
    with answering(answer, notes=True), Undo() as undo:
        undo.note(setattr, captures, "noting", captures.noting)
        captures.noting = True
        yield


def _end(token: object) -> None:
    with _lock:
        _answers.pop(token, None)
        _asked_of_compiler.discard(token)
        _replace()


def _replace() -> None:
    """Have torch's functions call those below, or no more."""
    replace_capturing_builtin(_answer if _answers else _is_capturing)
    replace_compiling_questions(_answer_compiling if _asked_of_compiler else None)


def _answer() -> bool:
    """Take the place of what `torch.cuda.is_current_stream_capturing` calls, however its callers got hold of that."""
    return _told(sys._getframe(2), _is_capturing)


def _answer_compiling(question: str) -> bool:
    """Take the place of what `torch.compiler.is_compiling` and its kin do."""
    frame: FrameType = sys._getframe(2)
    while passes_question_on(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return _told(frame, compiling_truth[question])


def _told(frame: FrameType, truth: Callable[[], bool]) -> bool:
    """Return what the code of a frame is told that asks."""
    caller = frame.f_globals.get("__name__", "")
    of_torch = caller.partition(".")[0] in _TOLD_THE_TRUTH
    if of_torch and caller not in _BRANCHES_OF_TORCH:
        return truth()
    answer = captures.answer
    if answer is None and torch.cuda.is_initialized():
        here = torch.cuda.current_stream().cuda_stream
        # The default stream, 0, is that of any thread. Only one of autograd's may be meant.
        if here or current_graph_task() != -1:
            told = [answer for stream, answer in _answers.copy().values() if stream == here]
            answer = told[-1] if told else None
    if of_torch:
        return answer is not None or truth()
    captures.asked = True
    if captures.noting and not captures.asked_in_checkpoint:
        around = (each.f_globals.get("__name__") for each, _ in walk_stack(frame))
        captures.asked_in_checkpoint = "torch.utils.checkpoint" in around
    return truth() if answer is None else answer
