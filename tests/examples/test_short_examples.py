"""What the short examples promise: they learn, with the bits of eager steps, and say that graphs are emulated."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ENGINES, deterministic
from lightning_harness import QUIET, _silent  # noqa: F401  # the second is a fixture
from trainer_setups import taken_for_installed

EXAMPLES = Path(__file__).parents[2] / "examples"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Load]:
    """Return a function that imports an example, and forget these at the end."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    yield importlib.import_module
    for name in {*sys.modules} - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def on(module: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let an example train on this device also where there is another."""
    monkeypatch.setattr(module, "DEVICE", device)
    return module


def assert_report(text: str, graph: str) -> None:
    """The last table says that the steps are replays, and whether these are emulated."""
    steps = r"(?:steps|micro-batches \(\d+ optimizer steps\))"
    replayed = re.search(rf"^\d+ {steps}: (\d+) replayed, \d+ eager, 0 skipped", text, re.MULTILINE)
    assert replayed is not None, text
    assert int(replayed[1]) > 10
    assert ("\n  emulated: a replay calls the step again" in text) == (graph == "emulate")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "options", "learned"),
    [
        ("minimal", {}, 0.3),
        pytest.param("gan", {"steps": 200}, 0.9, marks=pytest.mark.slow),
        pytest.param("gpt", {"steps": 40}, 0.9, marks=pytest.mark.slow),
    ],
)
def test_it_learns_with_the_bits_of_eager_steps(
    name: str,
    options: dict[str, Any],
    learned: float,
    engine: tuple[str, str],
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it returns falls below this share of its first value; without graphs it returns the same numbers."""
    device, graph = engine
    module = on(load(name), device, monkeypatch)
    with deterministic():
        eager = module.main("off", **options)
        capsys.readouterr()
        assert module.main(graph, **options) == eager
    assert eager[-1] < learned * eager[0]
    assert_report(capsys.readouterr().out, graph)


def test_a_minimal_loop_has_40_lines() -> None:
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 40


@pytest.mark.parametrize("engine", ENGINES)
def test_averages_go_on_from_a_checkpoint(
    engine: tuple[str, str],
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run in two parts, and one without graphs, leave the checkpoint of a run in one; no TensorBoard is no error."""
    device, graph = engine
    module = on(load("ema_accumulate"), device, monkeypatch)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # an import of it fails
    main = module.main

    def saved(folder: str) -> Any:
        return torch.load(tmp_path / folder / "checkpoint.pth", map_location="cpu")

    with deterministic():
        whole = main(tmp_path / "whole", 4, graph)
        text = capsys.readouterr().out
        eager = main(tmp_path / "eager", 4, "off")
        with monkeypatch.context() as patch:
            patch.setattr(module.torch, "save", _interrupting(module.torch.save, 2))
            with pytest.raises(KeyboardInterrupt):
                main(tmp_path / "parts", 4, graph)
        rest = main(tmp_path / "parts", 4, graph)
    assert whole == eager
    assert whole[2:] == rest
    assert whole[-1] > 0.9
    assert text.startswith("no TensorBoard curves; for these: pip install tensorboard\n")
    assert_report(text, graph)
    for other in ("eager", "parts"):
        for name, part in saved("whole").items():
            torch.testing.assert_close(saved(other)[name], part, rtol=0, atol=0)


def _interrupting(save: Callable[..., None], calls: int) -> Callable[..., None]:
    """Return a function that saves, and raises a KeyboardInterrupt behind this many calls."""
    made = iter(range(1, calls + 1))

    def saves(*args: Any) -> None:
        save(*args)
        if next(made) == calls:
            raise KeyboardInterrupt

    return saves


def test_averages_write_curves(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, accuracy and the figures of the step, once an epoch, where TensorBoard is there."""
    written: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            assert isinstance(value, (int, float, torch.Tensor))
            written.append((name, epoch))

        def close(self) -> None:
            written.append(("closed", -1))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    module = on(load("ema_accumulate"), "cpu", monkeypatch)
    module.main(tmp_path, 2, "emulate")
    assert {("loss", 0), ("loss", 1), ("accuracy", 1), ("closed", -1)} <= {*written}
    assert ("replay_share", 1) in written


@pytest.mark.slow
@pytest.mark.filterwarnings(*QUIET, "ignore:.*seems to be inactive")
def test_lightning(load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics of training, and of the averaged weights in validation, are those of the Trainer without graphs."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything sets them
        monkeypatch.setenv(name, "0")
    main = load("lightning_ema").main
    eager = main("off", 2)
    capsys.readouterr()
    assert main("emulate", 2) == eager
    assert min(eager) > 0.9
    assert_report(capsys.readouterr().out, "emulate")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transformers(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """Logged losses are those of the plain Trainer."""
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    module = load("transformers_trainer")
    try:
        with taken_for_installed():
            eager = module.main(transformers.Trainer, 20)
            capsys.readouterr()
            assert module.main(steps=20) == eager
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert len(eager) == 2
    assert float(eager[1]) < float(eager[0])
    assert_report(capsys.readouterr().out, module.GRAPH)
