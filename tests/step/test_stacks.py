"""What `scan` and `window` of a GraphedStep have in common, by either of them (scenarios R11 and R12)."""

import gc
import weakref
from typing import Any

import pytest
from harness import ENGINES, boosted_loss, make_batches, no_sync
from stacks import SCHEDULES, Engine, Run, stack
from torch import Tensor, nn

import ampkit

SCAN: dict[str, Any] = {}
WINDOWS_OF_2, WINDOWS_OF_3, WINDOWS_OF_4, WINDOWS_OF_8 = ({"accumulate": n} for n in (2, 3, 4, 8))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("method", "options", "batches", "calls", "longest"),
    [("scan", SCAN, 20, 1, 16), ("window", WINDOWS_OF_2, 2, 6, 1)],
)
def test_graphs_end_with_the_step(
    method: str, options: dict[str, Any], batches: int, calls: int, longest: int, engine: Engine
) -> None:
    """The last reference to the step is the last one to its graphs: nothing waits for the garbage collector."""
    run = Run(engine, schedule=SCHEDULES["step"], **options)
    for _ in range(calls):
        getattr(run.step, method)(*stack(make_batches(engine[0], [4] * batches)))
    graph = weakref.ref(next(iter(run.step._engine._cache.multi_step.values())).graphs[longest])
    gc.disable()
    try:
        del run.step
        assert graph() is None
    finally:
        gc.enable()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("method", "options", "batches", "calls", "launches"),
    [("scan", SCAN, 25, 2, 5), ("window", WINDOWS_OF_4, 4, 6, 3)],
)
def test_no_wait(method: str, options: dict[str, Any], batches: int, calls: int, launches: int) -> None:
    """A call that captures nothing does not wait for the device, with rates that change."""
    run = Run(("cuda", "auto"), schedule=SCHEDULES["one cycle"], policy="float16", max_norm=1.0, **options)
    stacked = stack(make_batches("cuda", [4] * batches))
    for _ in range(calls):
        getattr(run.step, method)(*stacked)
    with no_sync():
        getattr(run.step, method)(*stacked)
    assert run.step.report().launches == launches


@pytest.mark.parametrize(
    ("method", "options", "batches", "fits", "calls", "later", "graphs"),
    [("scan", SCAN, 20, 3, 0, 1, 1), ("window", WINDOWS_OF_8, 8, 6, 4, 3, 3)],
)
def test_memory_budget(
    method: str, options: dict[str, Any], batches: int, fits: int, calls: int, later: int, graphs: int
) -> None:
    """Buffers of a launch's batches that do not fit: one warning, and single graphs go on."""
    one = 4 * (4 * 3 * 8 * 8 + 1) + 8 * 4
    run = Run(("cpu", "emulate"), memory_budget=fits * one, **options)
    stacked = stack(make_batches("cpu", [4] * batches))
    for _ in range(calls):
        getattr(run.step, method)(*stacked)
    with pytest.warns(ampkit.CaptureWarning, match=r"several calls in one graph: .*memory_budget is \d+.* launch of"):
        getattr(run.step, method)(*stacked)
    for _ in range(later):
        getattr(run.step, method)(*stacked)
    report = run.step.report()
    assert (report.launches, report.graphs) == (0, graphs)
    assert report.bytes <= fits * one
    assert run.step.replays > 20


@pytest.mark.parametrize("graph", ["off", "emulate"])
@pytest.mark.parametrize(
    ("method", "options", "shapes", "message"),
    [
        ("scan", SCAN, (1, 1, 1, 1, 2, 2, 2, 2), r"steps were done.*float32 of shape \(2,\) in one step.*\(1,\) in an"),
        ("window", WINDOWS_OF_3, (1, 2, 2), r"window: the micro-batches were done, .*in one micro-batch, .*\(1,\)"),
    ],
)
def test_aux_that_does_not_stack(
    method: str, options: dict[str, Any], shapes: tuple[int, ...], message: str, graph: str
) -> None:
    """A shape that varies is said once all calls were made, and the schedule has followed."""
    left = list(shapes)

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Any:
        loss, _ = boosted_loss(model, images, labels, boost)
        return loss, images[0, 0, 0, : left.pop()]

    schedule = SCHEDULES["step"]
    run = Run(("cpu", graph), loss_fn=loss_fn, on_failure="eager", warmup=9, schedule=schedule, **options)
    with pytest.raises(ValueError, match=message):
        getattr(run.step, method)(*stack(make_batches("cpu", [4] * len(shapes))))
    assert not left
    assert run.scheduler is not None
    assert run.scheduler.last_epoch == len(shapes) // options.get("accumulate", 1)
