"""What examples/train_resnet.py promises: a JSON summary, resumable runs, plain messages, equal bits with a graph."""

import importlib.util
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
from families import every
from matplotlib.image import imread
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import Subset
from torchvision.transforms.functional import to_pil_image

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_resnet.py"
PATHS = [str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(PATHS), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
MODULES = ("torchvision", "sklearn.datasets", "matplotlib.pyplot")  # that the script imports
IMAGES, BATCH = 32, 16  # for training, of `example`: two steps an epoch


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script as a module, its digits cut to few for training and 32 for testing, and clean up behind it."""
    spec = importlib.util.spec_from_file_location("train_resnet", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    all_digits = module.digits

    def few_digits(path: Path) -> Any:
        data = all_digits(path)
        return data._replace(train=Subset(data.train, range(IMAGES)), test=Subset(data.test, range(32)))

    monkeypatch.setattr(module, "digits", few_digits)
    benchmark = torch.backends.cudnn.benchmark
    yield module
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture
def train(
    example: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Return a function that runs `main` on the CPU and returns the summary and the lines on stdout."""

    def run(*options: str, output: str = "run") -> tuple[dict[str, Any], list[str]]:
        capsys.readouterr()
        common = ["--device", "cpu", "--epochs", "1", "-b", str(BATCH)]
        example.main([*common, "--output-dir", str(tmp_path / output), *options])
        lines = capsys.readouterr().out.splitlines()
        return json.loads((tmp_path / output / "summary.json").read_text()), lines

    return run


@pytest.fixture
def train_in_two_parts(example: ModuleType, train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that stops a run behind its first checkpoint, resumes it, and returns the last summary."""
    save = example.save_checkpoint

    def save_and_stop(*state: Any) -> None:
        save(*state)
        raise KeyboardInterrupt

    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr(example, "save_checkpoint", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(*options, output="parts")
        monkeypatch.setattr(example, "save_checkpoint", save)
        return train(*options, "--resume", str(tmp_path / "parts" / "checkpoint.pth"), output="parts")[0]

    return run


def test_the_last_line_is_a_sentence(train: Any, tmp_path: Path) -> None:
    """A run prints its epochs and the step's report, and last what one wants to know; summary.json has all."""
    summary, lines = train("--epochs", "2")
    file = re.escape(str(tmp_path / "run" / "summary.json"))
    said = re.fullmatch(rf"accuracy ([\d.]+)%, (\d+) images/s, \d+ s; more in {file}", lines[-1])
    assert said is not None
    assert float(said[1]) == pytest.approx(100 * summary["accuracy"], abs=0.005)
    assert int(said[2]) == round(summary["images_per_second"])
    assert lines[0].startswith("epoch 1/2: loss ")
    assert summary["accuracy"] == round(summary["accuracy"] * 32) / 32
    assert summary["graph"]["replays"] == 0
    assert sum(summary["graph"]["eager"].values()) == 2 * (IMAGES // BATCH)
    assert summary["images_per_second"] > 0
    assert summary["skipped_steps"] == 0
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    assert (summary["model"], summary["policy"]) == ("resnet8", "params=float32,compute=float32,output=float32")
    assert (summary["processes"], summary["strategy"], summary["optimizer"]) == (1, None, "sgd")


def test_the_progress_bar_shows_images_per_second(
    example: ModuleType, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar, which is hidden unless it is on a terminal, shows the speed so far beside loss and accuracy."""
    shown: list[str] = []
    monkeypatch.setattr(example.tqdm, "set_postfix_str", lambda bar, text: shown.append(text))
    train("--print-freq", "1")
    assert len(shown) == IMAGES // BATCH
    assert all(re.search(r"loss [\d.]+, accuracy .*, [1-9]\d* images/s$", text) for text in shown)


def test_json_prints_one_line(train: Any) -> None:
    """With --json stdout holds one line alone, the content of summary.json, so that a program can read it."""
    summary, lines = train("--json")
    assert [json.loads(line) for line in lines] == [summary]


@pytest.mark.slow
def test_curves_show_four_panels(train: Any, tmp_path: Path) -> None:
    """curves.png is a picture of a size that one can read, with something drawn in each of its quarters."""
    train("--policy", "float16", "--epochs", "2")
    picture = imread(tmp_path / "run" / "curves.png")
    height, width, _ = picture.shape
    assert height > 700
    assert width > 1000
    for rows in (slice(0, height // 2), slice(height // 2, None)):
        for columns in (slice(0, width // 2), slice(width // 2, None)):
            quarter = picture[rows, columns, :3]
            coloured = (quarter.max(axis=2) - quarter.min(axis=2)) > 0.2  # the curves: text and frames are grey
            assert coloured.sum() > 100


@pytest.mark.parametrize(
    "options",
    every(
        4,
        [
            ["--policy", "float32"],
            ["--policy", "float32", "--opt", "adam", "--lr-scheduler", "none", "--label-smoothing", "0.1"],
            ["--policy", "bfloat16", "--opt", "adamw", "--lr-scheduler", "step", "--lr-step-size", "1"],
            ["--policy", "float16", "--clip-grad", "1.0", "--channels-last"],
        ],
    ),
    ids=["float32-sgd-cosine", "float32-adam-none", "bfloat16-adamw-step", "float16-sgd-clip"],
)
def test_resume_is_bitwise(train: Any, train_in_two_parts: Any, options: list[str]) -> None:
    """A run that stops after an epoch and goes on with --resume ends with the bits of a run that never stopped."""
    options = ["--epochs", "3", *options]
    whole, _ = train(*options)
    parts = train_in_two_parts(*options)
    assert sum(parts["graph"]["eager"].values()) == 2 * (IMAGES // BATCH)  # the first epoch was not run again
    assert parts["weights_sha256"] == whole["weights_sha256"]
    checkpoints = [torch.load(summary["checkpoint"], weights_only=True) for summary in (whole, parts)]
    for name in ("scaler", "scheduler"):
        assert checkpoints[0][name] == checkpoints[1][name]
    for before, after in zip(checkpoints[0]["history"], checkpoints[1]["history"], strict=True):
        assert {**before, "images_per_second": 0} == {**after, "images_per_second": 0}


def image_folder(path: Path) -> list[str]:
    """Write 8 training and 2 test images below `path`, and return the options that make a run read them."""
    for index in range(10):
        folder = path / ("val" if index < 2 else "train") / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 40, 40), dtype=torch.uint8, generator=generator)
        to_pil_image(image).save(folder / f"{index}.png")
    return ["--dataset", "imagefolder", "--data-path", str(path), "-j", "0"]


@pytest.mark.slow
def test_resume_brings_random_augmentation_back(train: Any, train_in_two_parts: Any, tmp_path: Path) -> None:
    """An image folder trains, and random crops and flips go on after --resume where the first run left off."""
    options = [*image_folder(tmp_path / "images"), "-b", "4", "--epochs", "2", "--model", "resnet8"]
    assert train_in_two_parts(*options)["weights_sha256"] == train(*options)[0]["weights_sha256"]


@pytest.mark.slow
def test_seed_decides_the_weights(train: Any) -> None:
    """Two runs of one seed end with the same bits; another seed ends with others."""
    checksums = [train("--seed", seed)[0]["weights_sha256"] for seed in ("0", "0", "1")]
    assert checksums[0] == checksums[1] != checksums[2]


def test_resume_refuses_other_options(train: Any, tmp_path: Path) -> None:
    """--resume with options that would train something else names each of them, then and now."""
    train()
    checkpoint = str(tmp_path / "run" / "checkpoint.pth")
    with pytest.raises(SystemExit, match=r"that run had --epochs 1 \(now 4\), --lr 0\.05 \(now 0\.5\)\. Pass the same"):
        train("--resume", checkpoint, "--lr", "0.5", "--epochs", "4")


def test_resume_names_a_missing_file(train: Any, tmp_path: Path) -> None:
    """--resume with a file that is not there says so and where runs write theirs."""
    with pytest.raises(SystemExit, match=r"--resume nowhere\.pth: there is no such file\. A run writes DIR/checkpoint"):
        train("--resume", "nowhere.pth")


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("cifar10", "/cifar-10-batches-py/data_batch_1 exists"),
        ("imagefolder", "/train/<class>/<image>.jpg for training"),
    ],
)
def test_missing_data_says_what_to_put_where(train: Any, tmp_path: Path, dataset: str, expected: str) -> None:
    """A --data-path without the data ends the run with one message: which files belong in which folder."""
    folder = str(tmp_path / "no-data")
    with pytest.raises(SystemExit) as stopped:
        train("--dataset", dataset, "--data-path", folder)
    assert folder + expected in str(stopped.value)


def test_help_shows_every_default(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """--help groups the options and shows the default of each, the ones that users of timm look for among them."""
    with pytest.raises(SystemExit):
        example.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for group in ("data:", "model:", "optimizer and schedule:", "precision and speed:", "run and results:"):
        assert group in text
    options = vars(example.parse_args([]))
    assert text.count("(default: ") == len(options)
    assert "-b N, --batch-size N images per training step, in each process (default: 64)" in text
    assert "--epochs N passes over the training images (default: 20)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--cuda-graph", "on"],
            "--cuda-graph on needs a CUDA device, but --device is cpu. Use --cuda-graph auto or off.",
        ),
        (["--policy", "float7"], "Legal: float32, float16, bfloat16"),
        (["--epochs", "0"], "argument --epochs: 0 is not 1 or more"),
    ],
)
def test_wrong_options_are_explained(
    train: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """An option that cannot work ends the run at once, with what to pass instead."""
    with pytest.raises(SystemExit):
        train(*options)
    assert message in capsys.readouterr().err


def test_batch_larger_than_the_data_is_explained(train: Any) -> None:
    """A batch size that leaves no full batch is an error, not a run of no steps."""
    with pytest.raises(SystemExit, match=f"--batch-size 512: there are only {IMAGES} training images"):
        train("-b", "512")


@pytest.mark.slow
def test_a_batch_larger_than_the_share_of_a_process_is_explained(tmp_path: Path) -> None:
    """Under torchrun each process has a part of the images, which is what the message counts."""
    why = "--batch-size 1000: there are only 32 training images in each process."
    with pytest.raises(ddp_train.JobError, match=why):
        in_two_processes("-b", "1000", output=tmp_path / "run", graph="off")


@pytest.mark.parametrize(("image_size", "stride"), [(32, 1), (224, 2)])
def test_small_images_get_the_cifar_stem(example: ModuleType, image_size: int, stride: int) -> None:
    """A torchvision ResNet keeps the resolution of small images in its stem, and is itself for large ones."""
    args = example.parse_args(["--model", "resnet18", "--device", "cpu"])
    model = example.make_model(args, example.Data(None, None, classes=7, image_size=image_size))
    assert model.conv1.stride == (stride, stride)
    assert isinstance(model.maxpool, torch.nn.Identity) is (stride == 1)
    assert model.fc.out_features == 7


@pytest.mark.slow
def test_policy_with_low_precision_parameters(train: Any) -> None:
    """bf16-true trains too: weights and images are cast, without autocast."""
    summary, _ = train("--policy", "bf16-true", "--opt", "adamw")
    assert summary["policy"] == "params=bfloat16,compute=bfloat16,output=bfloat16"


@pytest.mark.slow
def test_compiled_model_keeps_its_names(train: Any, tmp_path: Path) -> None:
    """--torchcompile trains the same weights (with a backend that changes no arithmetic) under the same names."""
    plain, _ = train("--policy", "float32", output="plain")
    compiled, _ = train("--policy", "float32", "--torchcompile", "eager", output="compiled")
    assert compiled["weights_sha256"] == plain["weights_sha256"]


def run_script(
    *options: str, output: Path, before: str = "", processes: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own, or by torchrun in several, after the statements `before`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    script = written(output, before)
    command = [sys.executable, *torchrun, script, "--json", "--output-dir", str(output), *options]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def written(output: Path, before: str) -> str:
    """Write what runs the script after the statements `before` to a folder, and return its path."""
    output.mkdir(exist_ok=True)
    path = output / "run.py"
    path.write_text(f"import sys, train_resnet\n{before}\ntrain_resnet.main(sys.argv[1:])\n")
    return str(path)


def summary_of(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert process.returncode == 0, process.stderr
    summary: dict[str, Any] = json.loads(process.stdout)
    return summary


@pytest.mark.cuda
@pytest.mark.slow
def test_graph_trains_the_same_bits(tmp_path: Path) -> None:
    """float16 on the GPU: over 90% of the steps are replays, 0.97 of the test digits are right, and without the graph
    the weights are the same to the last bit."""
    options = ["--policy", "float16", "--deterministic"]
    graphed = summary_of(run_script(*options, "--cuda-graph", "on", output=tmp_path / "on"))
    eager = summary_of(run_script(*options, "--cuda-graph", "off", output=tmp_path / "off"))
    assert graphed["weights_sha256"] == eager["weights_sha256"]
    assert graphed["accuracy"] == eager["accuracy"] >= 0.97
    steps = graphed["graph"]["replays"] + sum(graphed["graph"]["eager"].values())
    assert steps == sum(eager["graph"]["eager"].values())
    assert graphed["graph"]["replays"] > 0.9 * steps
    assert eager["graph"]["replays"] == 0


@pytest.mark.cuda
@pytest.mark.slow
def test_graphed_run_resumes_bitwise(tmp_path: Path) -> None:
    """A graphed float16 run that stops and is resumed, capturing anew, ends with the bits of one that never stopped."""
    options = ["--policy", "float16", "--deterministic", "--cuda-graph", "on", "--epochs", "3"]
    whole = summary_of(run_script(*options, output=tmp_path / "whole"))
    stop = """
save = train_resnet.save_checkpoint
def save_and_stop(args, training, history):
    save(args, training, history)
    raise SystemExit("stopped by the test")
train_resnet.save_checkpoint = save_and_stop
"""
    assert "stopped by the test" in run_script(*options, output=tmp_path / "parts", before=stop).stderr
    checkpoint = str(tmp_path / "parts" / "checkpoint.pth")
    parts = summary_of(run_script(*options, "--resume", checkpoint, output=tmp_path / "parts"))
    assert parts["graph"]["replays"] > 0
    for name in ("weights_sha256", "accuracy", "loss_scale"):
        assert parts[name] == whole[name], name


def in_two_processes(*options: str, output: Path, graph: str, forked: bool = True) -> dict[str, Any]:
    """Run two epochs on the CPU, on 64 training digits of random brightness and 17 test digits.

    The processes are forks of one that has imported torch, with the environment of torchrun, or torchrun starts them.

    The checkpoint of the first epoch is kept as first.pth.
    """
    before = f"""
import shutil, torch
from pathlib import Path
from torch.utils.data import Subset
digits, graphed_step, save = train_resnet.digits, train_resnet.ampkit.graphed_step, train_resnet.save_checkpoint
class Brightened(Subset):
    def __getitems__(self, indices):
        return [(image + torch.randn(()), label) for image, label in super().__getitems__(indices)]
def few_digits(path):
    data = digits(path)
    return data._replace(train=Brightened(data.train, range(64)), test=Subset(data.test, range(17)))  # 3 batches and 2
def save_and_keep(args, training, history):
    save(args, training, history)
    if len(history) == 1 and args.rank == 0:
        shutil.copy(Path(args.output_dir, "checkpoint.pth"), Path(args.output_dir, "first.pth"))
train_resnet.digits = few_digits
train_resnet.ampkit.graphed_step = lambda *args, **kwargs: graphed_step(*args, **kwargs | {{"graph": "{graph}"}})
train_resnet.save_checkpoint = save_and_keep
"""
    options = ("--device", "cpu", "-j", "0", "-b", "4", "--epochs", "2", *options)
    if not forked:
        return summary_of(run_script(*options, output=output, before=before, processes=2))
    script, options = written(output, before), ("--json", "--output-dir", str(output), *options)
    more = {**ENVIRONMENT, **ddp_train.as_torchrun()}
    first, second = ddp_train.launch(*options, script=script, forked=True, modules=MODULES, more=more)
    assert second == {}  # one JSON line, of the first
    return first


@pytest.mark.slow
def test_torchrun(example: ModuleType, train: Any, tmp_path: Path) -> None:
    """Two processes: one JSON line, over all images, of the model that is saved; the second epoch alone, resumed with
    a graph and by as many processes, has the bits of both without; one process goes on from it too."""
    whole = in_two_processes(output=tmp_path / "whole", graph="off", forked=False)
    assert whole["processes"] == 2
    assert sum(whole["graph"]["eager"].values()) == 2 * (64 // (2 * 4))
    end, first = (torch.load(tmp_path / "whole" / name, weights_only=True) for name in ("checkpoint.pth", "first.pth"))
    assert str(tmp_path / "whole" / "checkpoint.pth") == whole["checkpoint"]

    model = example.ResNet8(10)
    model.load_state_dict(end["model"])
    assert example.weights_sha256(model) == whole["weights_sha256"]
    images, labels = example.digits(tmp_path).test.dataset[:17]
    with torch.inference_mode():
        logits = model.eval()(images)
    assert whole["accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert end["history"][1]["test_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)

    resume = ["--resume", str(tmp_path / "whole" / "first.pth")]
    resumed = in_two_processes(*resume, output=tmp_path / "resumed", graph="emulate")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["graph"]["replays"] > 0
    assert len(first["history"]) == 1
    for name in ("test_loss", "test_accuracy", "train_loss", "train_accuracy"):
        checkpoint = torch.load(resumed["checkpoint"], weights_only=True)
        assert checkpoint["history"][1][name] == end["history"][1][name]
    alone, _ = train("-b", "8", "-j", "0", "--epochs", "2", *resume)
    assert alone["epochs"] == 2
    with pytest.raises(SystemExit, match=r"that run had --processes 2 \(now 1\)\. Pass the same"):
        train("-b", "4", "-j", "0", "--epochs", "2", *resume)


@pytest.mark.slow
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.ranks)])
def test_torchrun_with_shards(train: Any, tmp_path: Path, others: bool) -> None:
    """R12: --strategy fsdp on two processes. The second epoch alone, resumed with a graph, has the bits of both
    without; the checkpoint has whole tensors, with which one process and DistributedDataParallel go on."""
    shards = ["--strategy", "fsdp"]
    whole = in_two_processes(*shards, output=tmp_path / "whole", graph="off")
    resume = ["--opt", "adamw", "--resume", str(tmp_path / "whole" / "first.pth")]
    resumed = in_two_processes(*shards, *resume, output=tmp_path / "resumed", graph="emulate")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["graph"]["replays"] == 64 // (2 * 4) - 3
    end, again = (torch.load(summary["checkpoint"], weights_only=True)["history"] for summary in (whole, resumed))
    for name in ("test_loss", "test_accuracy", "train_loss", "train_accuracy"):
        assert again[1][name] == end[1][name]
    checkpoint = torch.load(whole["checkpoint"], weights_only=True)
    assert not any(isinstance(tensor, DTensor) for tensor in checkpoint["model"].values())
    if not others:
        return
    copies = in_two_processes(*resume, output=tmp_path / "copies", graph="emulate")
    alone, _ = train("-b", "8", "-j", "0", "--epochs", "2", *resume)
    assert (copies["epochs"], alone["epochs"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun_with_shards_of_bfloat16_parameters(tmp_path: Path) -> None:
    """R12: one process has fewer test batches than the other, and repeats its last one in the parameters' dtype."""
    summary = in_two_processes("--strategy", "fsdp", "--policy", "bf16-true", output=tmp_path / "run", graph="emulate")
    assert (summary["epochs"], summary["graph"]["replays"]) == (2, 2 * (64 // (2 * 4)) - 3)
    assert (summary["processes"], summary["strategy"], summary["optimizer"]) == (2, "fsdp", "adamw")
    assert round(summary["accuracy"] * 17) == pytest.approx(summary["accuracy"] * 17)  # of 17 images


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--opt", "sgd"], "torch 2.11 has no fused SGD for fully_shard. Pass --opt adamw."),
        (["--channels-last"], "fully_shard takes contiguous, uncompiled modules"),
        ([], "--strategy fsdp: there is one process. Start several: torchrun"),
    ],
)
def test_what_does_not_go_with_shards_is_explained(
    train: Any, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """R12: --strategy fsdp with an option that cannot work, or without torchrun, ends the run at once."""
    with pytest.raises(SystemExit) as stopped:
        train("--strategy", "fsdp", *options)
    assert message in capsys.readouterr().err + str(stopped.value)


def test_torchrun_chooses_the_device(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun a device that all processes would share is refused, with what to pass instead."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    args = example.parse_args(["--device", "cpu"])
    args.device = "cuda:1"
    with pytest.raises(SystemExit, match=r"--device cuda:1: torchrun gives each process a device\. Use --device cuda"):
        example.join_processes(args)


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_on_two_gpus_trains_the_same_bits(tmp_path: Path, strategy: str) -> None:
    """R12: two GPUs over NCCL, float16: over 80% of the steps are replays, with the weights of a run without the graph,
    whether each GPU has all parameters or a part of them."""
    options = ["--policy", "float16", "--deterministic", "--epochs", "8", "--strategy", strategy]

    def run(graph: str) -> dict[str, Any]:
        return summary_of(run_script(*options, "--cuda-graph", graph, output=tmp_path / graph, processes=2))

    with ThreadPoolExecutor() as pool:
        graphed, eager = pool.map(run, ["on", "off"])
    assert graphed["weights_sha256"] == eager["weights_sha256"]
    assert graphed["accuracy"] == eager["accuracy"]
    assert graphed["graph"]["replays"] > 0.8 * 8 * 11
    assert eager["graph"]["replays"] == 0
