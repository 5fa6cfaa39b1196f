"""`AmpkitCallback(compile=...)`: the same bits with and without a graph, what is compiled, and what is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import ENGINES
from lightning_harness import Net, assert_same_runs, fit, fused, quiet

from ampkit import AmpkitWarning
from ampkit.lightning import AmpkitCallback

Engine = tuple[str, str]
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "fast")


class UsesIndex(Net):
    """Reads the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, 0)["loss"], "index": batch_idx}


@quiet
@pytest.mark.parametrize(
    ("kind", "accumulate"), [("bf16-mixed", 1), pytest.param("16-mixed", 3, marks=pytest.mark.seeds)]
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_graph_has_the_bits_of_the_same_compiled_step(
    engine: Engine, tmp_path: Path, kind: str, accumulate: int
) -> None:
    """R11: weights, moments, metrics, outputs and loss scale of a compiled fit with graphs and of one without.

    The calls of `self.log` end a graph of torch.compile, of which nothing is said.
    """
    device, graph = engine
    options: dict[str, Any] = {"kind": kind, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    runs = [  # a warning would be an error
        fit(tmp_path / way, device, way, make=lambda: Net(fused), options={"compile": "default"}, **options)
        for way in ("off", graph)
    ]
    assert_same_runs(*runs)
    report = runs[1].report
    assert report.replays == 22 - 3 * (3 if accumulate == 3 else 1)
    assert any("forward and backward" in line for line in report.compiled)
    assert any(line.startswith("compiled: update (AdamW") for line in report.compiled)
    assert not any("not compiled" in line for line in report.compiled)
    assert report.compile_s > 0


@pytest.mark.slow
@quiet
def test_clipping_by_value_is_not_compiled(tmp_path: Path) -> None:
    """R11: the update clips each element, as it would without `compile`; the report says that it is not compiled."""
    device, graph = "cpu", "emulate"
    options: dict[str, Any] = {"kind": "32-true", "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    runs = [
        fit(tmp_path / way, device, way, make=lambda: Net(fused), options={"compile": "default"}, **options)
        for way in ("off", graph)
    ]
    assert_same_runs(*runs)
    assert "not compiled: update, since each element of the gradients is clipped" in runs[1].report.compiled


@quiet
@pytest.mark.slow
def test_batch_idx_keeps_the_step_from_being_compiled(tmp_path: Path) -> None:
    """R11: each number of a batch would be compiled by itself, so a warning says that nothing is."""
    with pytest.warns(AmpkitWarning, match=r"compile='default'\): training_step uses batch_idx"):
        run = fit(tmp_path, "cpu", "off", make=UsesIndex, options={"compile": "default"})
    assert run.report.compiled == ()


def test_wrong_arguments() -> None:
    """What cannot be compiled is refused when the callback is made."""
    with pytest.raises(ValueError, match=r"AmpkitCallback\(compile='fast'\)"):
        AmpkitCallback(compile="fast")
    with pytest.raises(NotImplementedError, match="Pass compile=None while you measure"):
        AmpkitCallback(compile="max", numerics=10)
    with pytest.raises(NotImplementedError, match="Pass compile=None while you measure"):
        AmpkitCallback(compile="max", memory=True)


@quiet
@pytest.mark.slow
def test_what_is_compiled_already_is_refused(tmp_path: Path) -> None:
    """R11: a network that torch.compile has compiled, as in a step of one's own."""

    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = torch.compile(self.net)

    with pytest.raises(ValueError, match=r"AmpkitCallback\(compile='default'\): model.net is compiled already"):
        fit(tmp_path, "cpu", "emulate", make=Compiled, options={"compile": "default"})


@quiet
@pytest.mark.slow
def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: a strategy with several processes; nothing is launched, since `setup` is called by itself."""
    trainer = pl.Trainer(accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False)
    with pytest.raises(NotImplementedError, match="does not work with several processes"):
        AmpkitCallback(compile="default").setup(trainer, Net(), "fit")
