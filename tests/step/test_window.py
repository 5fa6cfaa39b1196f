"""The window of micro-batches on its own: what each outcome of a call leaves of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ampkit
from ampkit._capture.engine.fallback import StepDoneError
from ampkit._optimizer.device_step import Prepared
from ampkit._step.training_step import PartOfStep, Phase, StepOutput
from ampkit._step.window import NoStepError, Place, Window

PREPARED = Prepared(torch.ones(()), torch.zeros(()))


class Observer:
    """Measures every other window, and counts what it is asked and told."""

    def __init__(self) -> None:
        self.begun = self.told = 0

    def begin(self) -> bool:
        self.begun += 1
        return self.begun % 2 == 0

    def stepped(self, skipped: Any) -> None:
        self.told += 1


class Calls:
    """Stands for the engine: notes each phase, and raises what it is given."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.error: BaseException | None = None

    def __call__(self, args: Any, kwargs: Any, phase: Phase) -> Any:
        self.phases.append(phase)
        out = StepOutput(torch.zeros(()), None, torch.ones(()), torch.zeros(()))
        done = PartOfStep(out, (*phase.accumulated, len(self.phases)), PREPARED)
        error, self.error = self.error, None
        if isinstance(error, StepDoneError):
            error.outputs = done
        if error is not None:
            raise error
        return done


def made(size: int = 3) -> tuple[Window, Calls, Observer, list[str]]:
    """Return a window, what it calls, its observer, and a list of what follows from its steps."""
    calls, observer, steps = Calls(), Observer(), list[str]()
    step: Any = SimpleNamespace(
        scaler=ampkit.GradScaler("cpu", enabled=False),
        guard=None,
        observer=observer,
        finish=lambda phase, prepared=None, **_: (torch.ones(()), (phase.accumulated, phase.observed, prepared)),
        after_every=1,
        place=SimpleNamespace(follows_behind=""),
    )

    def run(reason: str, fn: Any) -> Any:
        steps.append(reason)
        return fn()

    return Window(calls, run, step, size, after=lambda: steps.append("after")), calls, observer, steps


def test_a_window_of_three() -> None:
    """Each call gets what earlier ones have accumulated; the third steps, and a new window begins."""
    window, calls, observer, steps = made()
    for _ in range(6):
        window.run((), {})
    assert [phase.last for phase in calls.phases] == [False, False, True] * 2
    assert [phase.accumulated for phase in calls.phases] == [(), (1,), (1, 2), (), (4,), (4, 5)]
    assert [phase.observed for phase in calls.phases] == [False] * 3 + [True] * 3
    assert (observer.begun, observer.told, steps) == (2, 2, ["after", "after"])


def test_the_optimizer_behind_a_call_gets_what_the_call_has_prepared() -> None:
    """R4: the end of a window passes it on; the end of a short window has nothing of the kind."""
    window, _, _, _ = made()
    assert [window.run((), {}).skipped for _ in range(3)][2] == ((1, 2, 3), False, PREPARED)
    window.run((), {})
    window.flush("short")


@pytest.mark.parametrize("error", [ampkit.InputMismatch("x"), ampkit.CaptureError("x"), NoStepError("x")])
def test_a_call_that_did_nothing(error: Exception) -> None:
    """The window stays as it was, and the observer is not asked a second time."""
    window, calls, observer, steps = made()
    for first in (True, False):
        calls.error = error
        with pytest.raises(type(error)):
            window.run((), {})
        window.run((), {})
        assert (window.count, observer.begun) == (1 if first else 2, 1)
    assert calls.phases[-1].accumulated == (2,)
    assert steps == []


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_a_call_that_may_have_done_a_part(error: BaseException) -> None:
    """The window ends: what it has accumulated may have a part of this micro-batch."""
    window, calls, observer, _ = made()
    window.run((), {})
    calls.error = error
    with pytest.raises(type(error)):
        window.run((), {})
    assert window.count == 0
    window.run((), {})
    assert calls.phases[-1] == Phase(False, (), True)
    assert observer.begun == 2


def test_a_step_that_was_done_though_its_graph_is_wrong() -> None:
    """The window goes on, schedule and observer included, and then the error is raised."""
    window, calls, observer, steps = made(size=1)
    calls.error = StepDoneError("x", None)
    with pytest.raises(StepDoneError):
        window.run((), {})
    assert (window.count, observer.told, steps) == (0, 1, ["after"])


def test_a_caller_that_knows_the_place() -> None:
    """Lightning says where a batch stands: `first` drops what was accumulated, `last` steps however many there were."""
    window, calls, observer, _ = made(size=1)
    parts: Any = ("what else decides",)
    for first, last in ((True, False), (False, False), (False, True), (True, False), (True, True)):
        window.run((), {}, Place(first, last, parts))
    assert [phase.accumulated for phase in calls.phases] == [(), (1,), (1, 2), (), ()]
    assert {phase.others for phase in calls.phases} == {parts}
    assert (observer.begun, observer.told) == (3, 2)


def test_flush() -> None:
    """It steps on what there is, is counted under its reason, and does nothing where the window is empty."""
    window, _, observer, steps = made()
    window.flush("short")
    assert steps == []
    window.run((), {})
    window.flush("short")
    assert (steps, window.count, observer.told) == (["short", "after"], 0, 1)
