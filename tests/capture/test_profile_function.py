"""Profilers of Python that the user's code starts in a call that is watched."""

import cProfile
import profile
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit._capture.host.profiling import seeing_calls

BETA = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * BETA


def squared(x: Any) -> Any:
    return abs(x) ** 2


class Watching:
    """A context that notes the functions of this file that are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __enter__(self) -> "Watching":
        self._context = seeing_calls(self._note)
        self.has_seen_all = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.saw_all = self.has_seen_all()
        self._context.__exit__(*error)

    def _note(self, frame: FrameType) -> bool:
        if frame.f_code.co_filename == __file__:
            self.called.append(frame.f_code.co_name)
        return False


def events_of(function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """Return what a profile function of one's own is told while a function is called."""
    found: list[tuple[str, str]] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: found.append((event, frame.f_code.co_name)))
    function(*args)
    sys.setprofile(before)
    # Without ampkit, sys.setprofile is a function of C.
    return [event for event in found if event not in (("c_call", "events_of"), ("c_return", "events_of"))]


def test_a_profile_function_is_shared() -> None:
    """It is told what it is told without ampkit, and all calls are seen."""
    expected = events_of(squared, 2.0)
    assert expected == [("call", "squared"), ("c_call", "squared"), ("c_return", "squared"), ("return", "squared")]
    with Watching() as watching:
        assert sys.getprofile() is None
        assert events_of(squared, 2.0) == expected
        assert sys.getprofile() is None
        squared(3.0)
    assert watching.saw_all
    assert watching.called.count("squared") == 2
    assert sys.getprofile() is None


def test_one_that_stays() -> None:
    """It is the user's behind the context, too."""

    def note(*_: object) -> None:
        pass

    try:
        with Watching() as watching:
            sys.setprofile(note)
            assert sys.getprofile() is note
        assert sys.getprofile() is note
    finally:
        sys.setprofile(None)
    assert watching.saw_all


def test_the_profiler_of_the_standard_library() -> None:
    """It checks that each function that returns has been called."""
    profiler = profile.Profile()
    with Watching() as watching:
        profiler.runcall(squared, 2.0)
    assert any(name == "squared" for _, _, name in profiler.timings)
    assert watching.saw_all
    assert "squared" in watching.called


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it has a place of its own there")
@pytest.mark.parametrize("ends", [True, False])
def test_a_profiler_of_c(ends: bool) -> None:
    """It takes Python's one place, so what is called then is not seen, and that is said."""
    profiler = cProfile.Profile()
    try:
        with Watching() as watching:
            assert watching.has_seen_all()
            profiler.enable()
            squared(2.0)
            if ends:
                profiler.disable()
                squared(2.0)
            assert not watching.has_seen_all()
        assert (sys.getprofile() is None) is ends
    finally:
        profiler.disable()
    assert "squared" not in watching.called


def test_one_that_runs_already() -> None:
    """It is left alone. From Python 3.12 on the calls are seen all the same."""

    def note(*_: object) -> None:
        pass

    sys.setprofile(note)
    try:
        with Watching() as watching:
            squared(2.0)
            assert sys.getprofile() is note
    finally:
        sys.setprofile(None)
    beside_it = sys.version_info >= (3, 12)
    assert watching.saw_all is beside_it
    assert watching.called.count("squared") == beside_it


def test_other_threads_have_one_of_their_own() -> None:
    """Python has one for each thread."""
    found: list[Any] = []

    def other() -> None:
        found.append(sys.getprofile())
        found.append(events_of(squared, 2.0))

    with Watching() as watching:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [None, events_of(squared, 2.0)]
    assert watching.saw_all


@pytest.mark.parametrize("kind", ["function", "profile", "pdb"])
def test_what_a_step_reads_while_it_is_profiled(kind: str) -> None:
    """R7: a later change of it is noticed."""
    global BETA

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x).square().mean()
        if kind == "function":
            sys.setprofile(lambda *_: None)
            value = scaled(value)
            sys.setprofile(None)
            return value
        if kind == "profile":
            return profile.Profile().runcall(scaled, value)
        sys.settrace(lambda *_: None)
        value = scaled(value)
        sys.settrace(None)
        return value

    model = nn.Linear(4, 2)
    step = ampkit.graphed_step(loss, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), graph="emulate")
    try:
        for _ in range(6):
            step(torch.ones(2, 4))
        assert (step.captures, step.replays) == (1, 3)
        BETA = 2.0
        with pytest.warns(ampkit.CaptureWarning, match=r"BETA changed from 1\.0 to 2\.0"):
            step(torch.ones(2, 4))
    finally:
        BETA = 1.0
    assert (sys.gettrace(), sys.getprofile()) == (None, None)


class Scaled(nn.Linear):
    """Reads an attribute, under a profiler that is written in C."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        profiler = cProfile.Profile()
        profiler.enable()
        try:
            return self.result(x)
        finally:
            profiler.disable()

    def result(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_attributes_that_are_read_under_a_profiler_of_c() -> None:
    """R7: all that stands in the methods of modules counts as read then."""
    model = Scaled(4, 2)
    model.scale = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, graph="emulate")
    for _ in range(6):
        step(torch.ones(2, 4))
    assert step.captures == 1
    model.scale = 2.0
    with pytest.warns(ampkit.CaptureWarning, match=r"scale changed from 1\.0 to 2\.0"):
        step(torch.ones(2, 4))


class Summarised(nn.Linear):
    """Has an attribute that changes between steps, and that no step reads."""

    seen = 0

    def summary(self) -> str:
        return f"{self.seen} batches"


def test_a_step_that_is_profiled_as_a_whole() -> None:
    """R7: it is captured, or the profiler is named as the reason why it is not."""
    model = Summarised(4, 2)
    model.seen = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, graph="emulate")

    def train() -> None:
        for _ in range(6):
            step(torch.ones(2, 4))
            model.seen += 1

    profiler = cProfile.Profile()
    if sys.version_info >= (3, 12):
        profiler.runcall(train)
        assert (step.captures, step.replays) == (1, 3)
        return
    with pytest.warns(ampkit.CaptureWarning, match=r"seen changed from 0 to 1\. .* A profiler runs, as cProfile"):
        profiler.runcall(train)
