"""AmpkitCallback(numerics=, memory=): the figures reach the loggers, the faults are named, and no bit changes."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINES, Compiled
from lightning_harness import QUIET, Net, Run, _silent, assert_same_runs, fit, fused  # noqa: F401 - a fixture

from ampkit.lightning import AmpkitCallback

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

Engine = tuple[str, str]


def column(run: Run, name: str) -> list[float]:
    """Return what was logged under a name."""
    with (Path(run.trainer.logger.log_dir) / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.parametrize(
    ("kind", "accumulate"), [("32-true", 1), pytest.param("16-mixed", 3, marks=[pytest.mark.slow, pytest.mark.seeds])]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_bit_changes(engine: Engine, tmp_path: Path, kind: str, accumulate: int) -> None:
    """L1, P1: measuring numbers and recording memory leave everything that a fit makes as it is."""
    device, graph = engine
    runs = [
        fit(
            tmp_path / str(n),
            device,
            graph,
            make=lambda: Net(fused),
            kind=kind,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.1,
            options=options,
        )
        for n, options in enumerate(({}, {"numerics": 3, "memory": True}))
    ]
    assert_same_runs(*runs)
    assert runs[1].report.replays > 0
    callback = runs[1].callback
    report = callback.numerics.report()
    assert report.steps == runs[1].trainer.global_step
    assert report.observed >= report.steps // 3
    assert {"net.0", "net.1", "net.4"} <= {row.name for row in report.rows}
    weights = sum(tensor.nbytes for tensor in runs[1].module.state_dict().values())
    assert callback.memory.at_peak["parameter"] >= weights
    assert callback.memory.at_peak["optimizer state"] >= 2 * sum(p.nbytes for p in runs[1].module.parameters())
    assert callback.memory.at_peak["input"] > 0
    assert runs[0].callback.numerics is runs[0].callback.memory is None


@pytest.mark.slow
def test_figures_reach_the_loggers(tmp_path: Path) -> None:
    """Numbers in each reading, as far as the host knows them by then; bytes by category once."""
    run = fit(tmp_path, "cpu", "emulate", kind="16-mixed", options={"numerics": 2, "memory": True})
    assert set(column(run, "ampkit/numerics/step")) >= {float(step) for step in range(2, 18, 2)}
    assert all(value > 0 for value in column(run, "ampkit/numerics/largest_gradient"))
    assert all(scale in (2.0**k for k in range(10, 24)) for scale in column(run, "ampkit/numerics/scale"))
    (parameters,) = column(run, "ampkit/memory/parameter_MiB")
    assert parameters == run.callback.memory.at_peak["parameter"] / 2**20
    assert not {"numerics", "memory"} & {name.partition("/")[0] for name in run.trainer.progress_bar_metrics}


class Overflowing(Net):
    """The second linear layer multiplies by so much that float16 does not hold it."""

    def __init__(self) -> None:
        super().__init__(fused, dropout=0.0)
        with torch.no_grad():
            self.net[4].weight.fill_(1e4)
            self.net[1].weight.fill_(4.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_an_overflow_is_named(engine: Engine, tmp_path: Path) -> None:
    """A layer that overflows is named with its direction, under a Trainer as elsewhere."""
    device, graph = engine
    options = {"numerics": 100}
    run = fit(tmp_path, device, graph, make=Overflowing, kind="16-mixed", options=options)
    found = run.callback.numerics.report().first_overflow
    assert (found.name, found.direction) == ("net.4", "forward")
    assert run.report.skipped > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": 0}, r"AmpkitCallback\(numerics=0\): expected an int of at least 1"),
        ({"memory": 1}, r"AmpkitCallback\(memory=1\): expected True or False"),
        ({"memory": True, "warmup": 1}, r"memory=True, warmup=1.* Use warmup=2"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    """They are refused when the callback is made, with what to pass."""
    with pytest.raises(ValueError, match=message):
        AmpkitCallback(**options)


@pytest.mark.parametrize("options", [{"warmup": 2}, {"graph": "off", "warmup": 1}], ids=str)
@pytest.mark.slow
def test_memory_with_a_short_warm_up(tmp_path: Path, options: dict[str, Any]) -> None:
    """The first step is recorded where the second is under the preflight; without a graph there is no preflight."""
    run = fit(tmp_path, "cpu", options.pop("graph", "emulate"), options={"memory": True, **options})
    assert run.callback.memory.peak > 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.slow
def test_a_compiled_part_runs_on(tmp_path: Path) -> None:
    """The step whose memory is recorded runs eagerly, and it alone: all others run what torch.compile has made."""
    calls = []
    for memory in (False, True):
        made: list[Compiled] = []

        def make(made: list[Compiled] = made) -> Net:
            module = Net(fused)
            made.append(Compiled(module.net))
            module.net = made[0].module
            return module

        run = fit(
            tmp_path / str(len(calls)), "cpu", "emulate", make=make, options={"memory": memory, "host_writes": "ignore"}
        )
        calls.append(made[0].calls)
    assert calls[1] == calls[0] - 1 > 10
    assert run.callback.memory.at_peak["activation"] > 0
