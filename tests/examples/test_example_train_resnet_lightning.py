"""What examples/train_resnet_lightning.py promises: a JSON summary, the bits of Lightning alone, plain messages."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import ddp_train
import pytest
import torch
from lightning_harness import QUIET, _silent  # noqa: F401  # the second is a fixture
from torch.utils.data import Subset

from ampkit.lightning import AmpkitCallback

pytestmark = [pytest.mark.filterwarnings(text) for text in [*QUIET, "ignore:.*seems to be inactive"]]

EXAMPLES = Path(__file__).parents[2] / "examples"
MODULES = ("lightning.pytorch", "torchvision", "sklearn.datasets", "matplotlib.pyplot")  # that the script imports
Train = Callable[..., tuple[dict[str, Any], list[str]]]
IMAGES, BATCH = 32, 8  # for training: four steps an epoch


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script as a module, its digits cut to few for training and 32 for testing, and clean up behind it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything sets them
        monkeypatch.setenv(name, "0")
    module = importlib.import_module("train_resnet_lightning")
    shared = sys.modules["train_resnet"]
    all_digits = shared.digits

    def few_digits(path: Path) -> Any:
        data = all_digits(path)
        return data._replace(train=Subset(data.train, range(IMAGES)), test=Subset(data.test, range(32)))

    monkeypatch.setattr(shared, "digits", few_digits)
    benchmark = torch.backends.cudnn.benchmark
    yield module
    torch.backends.cudnn.benchmark = benchmark
    for name in ("train_resnet_lightning", "train_resnet"):
        del sys.modules[name]


@pytest.fixture
def train(example: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Train:
    """Return a function that runs `main` on the CPU and returns the summary and the lines on stdout."""

    def run(*options: str, output: str = "run") -> tuple[dict[str, Any], list[str]]:
        capsys.readouterr()
        common = ["--device", "cpu", "--epochs", "1", "--json", "-b", str(BATCH)]
        example.main([*common, "--output-dir", str(tmp_path / output), *options])
        lines = capsys.readouterr().out.splitlines()
        return json.loads(lines[-1]), lines

    return run


def test_json_prints_the_summary_file(train: Train, tmp_path: Path) -> None:
    """With --json stdout holds one line, the content of summary.json; the metrics and a checkpoint are beside it."""
    summary, lines = train("--epochs", "2", "--print-freq", "2")
    assert len(lines) == 1
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] == round(summary["accuracy"] * 32) / 32
    assert (summary["epochs"], summary["steps"]) == (2, 2 * (IMAGES // BATCH))
    assert sum(summary["graph"]["eager"].values()) == summary["steps"]
    assert summary["images_per_second"] > 0
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    assert Path(summary["checkpoint"]).exists()
    header = next((tmp_path / "run" / "metrics").glob("*/metrics.csv")).read_text().splitlines()[0]
    assert {"train_loss_step", "test_accuracy", "ampkit/samples_per_second"} <= set(header.split(","))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="sgd", marks=pytest.mark.slow),
        pytest.param(["--opt", "adamw", "--precision", "bf16-mixed"], id="adamw bf16", marks=pytest.mark.slow),
        pytest.param(
            ["--accumulate", "3", "--clip-grad", "1000", "--epochs", "5"],
            id="accumulate, a clip that is not reached",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ampkit_changes_no_bit(
    train: Train, example: ModuleType, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """--no-ampkit trains the same weights as ampkit does, with and without a graph."""
    options = ["--epochs", "3", *options]
    alone, _ = train("--no-ampkit", *options, output="alone")
    eager, _ = train(*options, output="eager")
    monkeypatch.setattr(example, "AmpkitCallback", lambda graph: AmpkitCallback(graph="emulate", on_failure="raise"))
    graphed, _ = train(*options, output="graphed")
    assert alone["weights_sha256"] == eager["weights_sha256"] == graphed["weights_sha256"]
    assert graphed["graph"]["replays"] > 0
    assert alone["ampkit"] is False


def test_resume(train: Train) -> None:
    """A run goes on from the checkpoint of another one, which Lightning alone may have written."""
    first, _ = train("--no-ampkit", "--lr-scheduler", "none")
    second, _ = train("--resume", first["checkpoint"], "--epochs", "2", "--lr-scheduler", "none", output="second")
    assert (second["epochs"], second["steps"]) == (2, 2 * (IMAGES // BATCH))
    assert sum(second["graph"]["eager"].values()) == IMAGES // BATCH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-ampkit", "--clip-grad", "1", "--precision", "16-mixed"], "Lightning cannot clip the gradients"),
        (["--precision", "64-true"], "invalid choice: '64-true'"),
        (["--devices", "0"], "argument --devices: 0 is not 1 or more"),
    ],
)
def test_wrong_options_are_explained(
    train: Train, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """An option that cannot work ends the run at once, with the reason."""
    with pytest.raises(SystemExit):
        train(*options)
    assert message in capsys.readouterr().err


def test_help_shows_every_default(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """--help groups the options, those that both examples have among them, and shows the default of each."""
    with pytest.raises(SystemExit):
        example.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for group in ("data:", "model:", "optimizer and schedule:", "trainer and results:"):
        assert group in text
    assert "--epochs N passes over the training images (default: 20)" in text
    assert "--no-ampkit train without ampkit (default: False)" in text


def in_two_processes(*options: str, output: Path, graph: str, forked: bool = False) -> dict[str, Any]:
    """Train 64 digits in two processes, which torchrun starts unless they are forked. Return the summary.

    The checkpoint of each epoch is kept.
    """
    output.mkdir()
    script = output / "run.py"
    script.write_text(f"""
import sys, train_resnet, train_resnet_lightning as example
from torch.utils.data import Subset
digits, AmpkitCallback, ModelCheckpoint = train_resnet.digits, example.AmpkitCallback, example.ModelCheckpoint
def few_digits(path):
    data = digits(path)
    return data._replace(train=Subset(data.train, range(64)), test=Subset(data.test, range(16)))
train_resnet.digits = few_digits
example.AmpkitCallback = lambda graph: AmpkitCallback(graph="{graph}", on_failure="raise")
example.ModelCheckpoint = lambda *args, **kwargs: ModelCheckpoint(*args, **kwargs, save_top_k=-1)
example.main(sys.argv[1:])
""")
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    options = ("--json", "--deterministic", "--output-dir", str(output), "-b", "4", *options)
    if forked:
        more |= ddp_train.as_torchrun()
        return ddp_train.launch(*options, script=str(script), timeout=240, forked=True, modules=MODULES, more=more)[0]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, *options], env={**os.environ, **more}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def two_epochs(strategy: str, device: str) -> list[str]:
    """Return the options of a run in two processes."""
    options = ["--strategy", strategy, "--opt", "adamw", "--lr", str(2.0**-10), "--lr-scheduler", "none"]
    return [*options, "--device", device, "--epochs", "2"]


def check_two_processes(tmp_path: Path, strategy: str, device: str, graph: str) -> None:
    """Assert that a run with graphs, and one that is resumed, have the weights of one without."""
    forked = device == "cpu"  # all but one: what differs for those of torchrun is the start
    options = two_epochs(strategy, device)
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(in_two_processes, *options, output=tmp_path / "off", graph="off", forked=forked)
        on = in_two_processes(*options, output=tmp_path / "on", graph=graph)
        off = pending.result()
    assert on["weights_sha256"] == off["weights_sha256"]
    assert off["graph"]["replays"] == 0
    assert on["graph"]["replays"] > 8
    (first,) = (tmp_path / "on").glob("epoch=0-*.ckpt")
    resume = ["--resume", str(first)]
    resumed = in_two_processes(*options, *resume, output=tmp_path / "resumed", graph=graph, forked=forked)
    assert resumed["weights_sha256"] == off["weights_sha256"]
    assert resumed["epochs"] == 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun(tmp_path: Path, strategy: str) -> None:
    """L4, R12: two processes by DistributedDataParallel or fully_shard, with and without graphs, and resumed."""
    check_two_processes(tmp_path, strategy, "cpu", "emulate")


@pytest.mark.slow
def test_two_processes_have_graphs(tmp_path: Path) -> None:
    """R12: two processes with a part of the parameters each, which are captured, print one summary."""
    options = two_epochs("fsdp", "cpu")
    summary = in_two_processes(*options, output=tmp_path / "on", graph="emulate", forked=True)
    assert summary["graph"]["replays"] > 8
    assert (summary["epochs"], summary["devices"]) == (2, 2)


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_on_two_gpus(tmp_path: Path, strategy: str) -> None:
    """L4, R12: the same with NCCL's collectives in the graph: 16-mixed under DDP, bf16-mixed under fully_shard."""
    check_two_processes(tmp_path, strategy, "cuda", "auto")


def test_shards_need_several_processes(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """R12: --strategy fsdp with one process is refused, with what to pass."""
    with pytest.raises(SystemExit):
        train("--strategy", "fsdp")
    assert "Pass --devices 2, or use torchrun." in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.slow
def test_on_a_gpu_most_steps_are_replays(tmp_path: Path) -> None:
    """16-mixed: the weights of Lightning alone, at a rate that float32 holds exactly, and the digits are learnt."""
    # Not SGD: torch's fused kernel keeps garbage in its momentum where the first step overflows (test_scaler.py).
    options = ["--json", "--deterministic", "--epochs", "8", "--lr-scheduler", "none"]
    options += ["--opt", "adamw", "--lr", str(2.0**-10)]
    summaries = []
    for more in (["--no-ampkit"], []):
        folder = tmp_path / f"run{len(more)}"
        command = [sys.executable, str(EXAMPLES / "train_resnet_lightning.py"), *options, *more]
        path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])  # ampkit may not be installed
        environment = {**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        done = subprocess.run(
            [*command, "--output-dir", str(folder)], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        summaries.append(json.loads(done.stdout))
    alone, ours = summaries
    assert ours["weights_sha256"] == alone["weights_sha256"]
    assert ours["accuracy"] == alone["accuracy"] >= 0.9
    assert ours["graph"]["replays"] > 0.9 * ours["steps"]
