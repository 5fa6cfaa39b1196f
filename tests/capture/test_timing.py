"""What the report says of time: which calls are timed, that timing them waits for nothing, and the arithmetic."""

import json
import re
from typing import Any

import pytest
from harness import ENGINES, OPTIMIZERS, boosted_loss, make_batches, make_net, no_sync

import ampkit
from ampkit._capture.graph.timing import Clock, Durations, Saving, combined

Engine = tuple[str, str]


def trained(engine: Engine, sizes: list[int], **options: Any) -> ampkit.GraphedStep:
    model = make_net(engine[0])
    options = {"policy": "float32", "on_failure": "raise", "graph": engine[1], **options}
    step = ampkit.graphed_step(boosted_loss, model, OPTIMIZERS["adamw"](model.parameters()), **options)
    for batch in make_batches(engine[0], sizes):
        step(*batch)
    return step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("warmup", "calls", "eager", "replay"),
    [
        (3, 3, False, False),  # nothing replayed yet
        (3, 4, True, False),  # the first replay comes with a capture
        (3, 5, True, True),
        (2, 6, False, True),  # the first call starts libraries, the second is watched
        (1, 6, False, True),
        (6, 8, True, True),
    ],
)
def test_what_is_timed(engine: Engine, warmup: int, calls: int, eager: bool, replay: bool) -> None:
    """Warm-up calls but the first and last, and replays from the second, are timed. Other times are None."""
    report = trained(engine, [8] * calls, warmup=warmup).report()
    assert [report.eager_ms is not None, report.replay_ms is not None] == [eager, replay]
    assert all(ms is None or ms > 0 for ms in (report.eager_ms, report.replay_ms))
    assert (report.saved_s is not None) == (eager and replay)
    assert ("an eager step took" in str(report)) == (eager and replay and not report.emulated)
    assert ("a replay takes" in str(report)) == (replay and not report.emulated)
    for graph in report.per_graph:
        assert (graph.eager_ms, graph.replay_ms) == (report.eager_ms, report.replay_ms)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_report_says_what_replays_saved(engine: Engine) -> None:
    """A sentence with both times and their ratio, unless graphs are emulated; in JSON; the same when they are gone."""
    step = trained(engine, [8] * 12)
    report = step.report()
    assert report.eager_ms is not None
    assert report.replay_ms is not None
    assert report.saved_s == pytest.approx(9 * (report.eager_ms - report.replay_ms) / 1000)
    speed = re.search(r"\n  a replay takes [\d.]+ ms, an eager step took [\d.]+ ms: [\d.e+]+x", str(report))
    assert report.emulated == ("\n  emulated: " in str(report)) == (speed is None) == (engine[1] == "emulate")
    assert json.loads(json.dumps(report.to_dict()))["per_graph"][0]["eager_ms"] == report.eager_ms
    step.close()
    after = step.report()
    assert (after.eager_ms, after.replay_ms, after.saved_s) == (report.eager_ms, report.replay_ms, report.saved_s)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_inputs_that_take_turns_are_all_timed(engine: Engine) -> None:
    """Each graph has its own times, also where another one is called in between; those that went count on.

    The second input and later ones have no call to be timed between the first one and those that are looked at, unless
    the warm-up is longer.
    """
    few = trained(engine, [4, 6, 8] * 8).report()
    assert [graph.eager_ms is not None for graph in few.per_graph] == [True, False, False]
    report = trained(engine, [4, 6, 8] * 9, warmup=4).report()
    assert len(report.per_graph) == 3
    saved = 0.0
    for graph in report.per_graph:
        assert graph.eager_ms is not None
        assert graph.replay_ms is not None
        saved += graph.replays * (graph.eager_ms - graph.replay_ms) / 1000
    assert report.saved_s == pytest.approx(saved)
    evicted = trained(engine, [4] * 8 + [6] * 8, max_graphs=1).report()
    assert evicted.evictions == 1
    assert evicted.saved_s is not None
    (graph,) = evicted.per_graph
    assert evicted.eager_ms != graph.eager_ms, "the mean over both"


@pytest.mark.parametrize("engine", ENGINES)
def test_timing_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight replays are timed, and 64 calls later none so much as asks for the time."""
    step = trained(engine, [8] * 80)
    ((_, captured),) = step._engine._cache
    assert len(captured.timing.replay._marks) == 8

    def now(_: Clock) -> None:
        raise AssertionError("a call was timed")

    monkeypatch.setattr(Clock, "now", now)
    for batch in make_batches(engine[0], [8] * 3):
        step(*batch)


@pytest.mark.cuda
def test_timing_never_waits_in_a_call() -> None:
    """On the device: timed replays and eager steps run without a wait, and the times are there afterwards."""
    step = trained(("cuda", "auto"), [8])
    batches = make_batches("cuda", [8] * 12)
    with no_sync():
        step(*batches[0])  # timed, eager
    for batch in batches[1:3]:
        step(*batch)  # preflight, capture
    with no_sync():
        for batch in batches[3:]:
            step(*batch)
    report = step.report()
    assert report.eager_ms is not None
    assert report.replay_ms is not None
    assert report.replay_ms > 0
    assert report.eager_ms > 0


class Event:
    """A CUDA event that notes who waits for it."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def elapsed_time(self, end: "Event") -> float:
        return end.ms - self.ms


def test_events_are_read_late_and_once() -> None:
    """Noting a call waits for nothing; the median waits for its end; after that the events are gone."""
    durations = Durations(3)
    assert durations.median_ms() is None
    events = [Event(ms) for ms in (0.0, 1.0, 1.0, 6.0, 6.0, 8.0)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        assert durations.wanted
        durations.add(start, end)
    assert not durations.wanted
    assert [event.waits for event in events] == [0] * 6
    assert durations.median_ms() == 2.0
    assert durations.median_ms() == 2.0
    assert [event.waits for event in events] == [0, 1] * 3


@pytest.mark.parametrize(
    ("savings", "expected"),
    [
        ([], Saving(0, None, None)),
        ([Saving(3, 4.0, 1.0), Saving(1, 8.0, 5.0)], Saving(4, 5.0, 2.0)),
        ([Saving(3, 4.0, 1.0), Saving(7, None, 9.0)], Saving(3, 4.0, 1.0)),  # a ratio of the same replays
        ([Saving(3, None, 1.0), Saving(1, None, 5.0)], Saving(4, None, 2.0)),
        ([Saving(0, 4.0, 1.0)], Saving(0, None, None)),
    ],
)
def test_graphs_are_weighted_by_their_replays(savings: list[Saving], expected: Saving) -> None:
    """The means are weighted by replays, over the graphs that have both times if there are any."""
    assert combined(savings) == expected


def test_seconds_saved() -> None:
    """Replays times the difference; below zero where replays are slower; None where a time is missing."""
    assert Saving(1000, 12.5, 2.5).seconds == 10.0
    assert Saving(1000, 2.5, 12.5).seconds == -10.0
    assert Saving(1000, None, 1.0).seconds is None


def test_the_host_is_timed_without_a_device() -> None:
    """Without a CUDA stream, marks are times of the host's clock."""
    clock, durations = Clock(None), Durations(1)
    durations.add(clock.now(), clock.now())
    measured = durations.median_ms()
    assert measured is not None
    assert measured > 0


def test_large_numbers_are_written_out() -> None:
    """A ratio and times of any size read as numbers do."""
    report = ampkit.Report(1, 1, 0, 7000, {}, 0, (), 0, None, 21345.6, 1.954, 149405.0)
    assert "a replay takes 1.95 ms, an eager step took 21346 ms: 10924x, 149405 s saved so far" in str(report)
