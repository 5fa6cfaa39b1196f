"""A call that is interrupted anywhere leaves a step that goes on, and a process as it was."""

import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from interrupts import (
    CAPTURE,
    CASES,
    IMPOSSIBLE,
    PACKAGE,
    PREFLIGHT,
    REHEARSAL,
    REPLAY,
    SKIPPED_REPLAY,
    STALE,
    WARM_UP,
    Accumulating,
    BFloat16,
    Callables,
    Float16,
    Job,
    Phase,
    TwoOptimizers,
    counts,
    interrupted_at,
    moments,
    trial,
)

_PER_CALL = 2  # moments that the suite tries; `python tests/support/interrupts.py --all` tries all of them


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A capture that cannot be compared, or a layout that is warmed up again, is said to the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param(kind, phase, id=f"{kind.__name__}-{phase.name}")
        for kind, phases in CASES.items()
        for phase in phases
    ],
)
@pytest.mark.sampled(8)
@pytest.mark.quick(2)
def test_a_sample_of_all_lines(kind: type[Job], phase: Phase) -> None:
    """R8: later calls train, replay what eager computes, and nothing is left on."""
    found = moments(kind, phase)
    counts["calls"] += 1
    stride = len(found) // _PER_CALL
    first = zlib.crc32(f"{kind.__name__} {phase.name}".encode()) % stride  # another one in each call
    broken = [problem for moment in found[first::stride] if (problem := trial(kind, phase, moment))]
    assert not broken, "\n".join(map(str, broken))


@pytest.mark.parametrize(
    ("kind", "phase", "lines"),
    [
        # Each of these left a step that raised in every later call, trained nothing, or trained something else.
        pytest.param(Float16, WARM_UP, ["self.scaler.update()", "self._count()"], id="between step and update"),
        pytest.param(TwoOptimizers, WARM_UP, ["self._count()", "self.watch_skips()"], id="between two optimizers"),
        pytest.param(BFloat16, CAPTURE, ["self._exchange(self._copies)", "self._write(list(masters), present)"],
                     id="weights in low precision"),
        pytest.param(Float16, PREFLIGHT, ["self._watch_calls(self._undo)", "leave(self)", "return self\n"],
                     id="entering and leaving the preflight"),
        pytest.param(Float16, REPLAY, ['group["lr"] = rate', "optimizer.grad_scale, optimizer.found_inf"],
                     id="what the optimizer is given for its step"),
        pytest.param(Float16, REHEARSAL, ["undo.note(trace.end)", "_enable_trace()"],
                     id="the trace of a rehearsal"),
        pytest.param(Float16, STALE, ["self._cache.clear()", "captured.reset()", "self._layouts.clear()",
                                      "self._settings[self.number] = now.settings", "self.generation = now"],
                     id="dropping graphs"),
        pytest.param(Float16, SKIPPED_REPLAY, ["self._count()"], id="a replayed step that is skipped"),
        pytest.param(Accumulating, CASES[Accumulating][-1], ["torch.clear_autocast_cache()", "captured.replay(leaves)"],
                     id="a window of micro-batches"),
        pytest.param(Callables, CASES[Callables][0], ["Passes.recording.add(run)", "exchange(self._places)"],
                     id="parameters of a graphed callable"),
    ],
)  # fmt: skip
@pytest.mark.sampled(5)
@pytest.mark.quick(2)
def test_where_it_hurt(kind: type[Job], phase: Phase, lines: list[str]) -> None:
    """R8: the moments between two changes that belong together."""
    found = moments(kind, phase)
    counts["calls"] += 1
    for line in lines:
        wanted = [moment for moment in found if line in f"{moment.line.source}\n"]
        assert wanted, f"{line!r} is no line of this call"
        assert [broken for moment in wanted if (broken := trial(kind, phase, moment))] == []


def test_an_interrupt_that_is_swallowed_is_an_error() -> None:
    """R8: the harness does not count an interrupt that no caller hears of."""
    job = Float16("emulate")
    moment = moments(Float16, PREFLIGHT)[3]

    def swallowing() -> None:
        with suppress(KeyboardInterrupt):
            job.call()

    with pytest.raises(AssertionError, match="swallowed"):
        interrupted_at(moment, swallowing)


def test_excused_lines_exist() -> None:
    """A line that was moved or rewritten would stay excused in its old place, and fail in its new one."""
    for file, line in IMPOSSIBLE:
        assert line in map(str.strip, Path(PACKAGE, file).read_text().splitlines()), f"{file}: {line}"
