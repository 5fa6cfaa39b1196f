"""tests/benchmarks/beside_jax.py: the same training in a process of its own, or a message that says why not."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import beside_jax
import jax_worker
import pytest
import torch
from beside_jax import CASES, JaxError, Plan, Policy, Setting, ready
from loss_curves import BATCH, BATCHES
from test_bench import figures_of, saved
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

CPU, PLAN = torch.device("cpu"), Plan(repeats=2, seconds=0.01)
MLPS = {"mlp-tiny": (32, 64, 64, 10), "mlp-small": (64, 256, 256, 256, 10), "mlp-deep": (512,) * 18}
BF16 = Policy.parse("bfloat16")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def measure(case: Any, policy: Policy = BF16, steps_per_call: int = 0, source: str = "device") -> Any:
    return beside_jax.measure(case, Setting(policy, CPU, source), PLAN, steps_per_call)


def worker(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Have a script run in place of the worker, which needs JAX."""
    script = folder / "script.py"
    script.write_text(f"import json, pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\n{code}\n")
    monkeypatch.setattr(jax_worker, "__file__", str(script))


@pytest.mark.parametrize("model", MLPS)
def test_the_mlps_of_the_comparison(model: str) -> None:
    """Widths, batch size and optimizer are those of the table."""
    case = CASES[model](BATCHES.get(model, BATCH))
    layers = [module for module in case.model.modules() if isinstance(module, nn.Linear)]
    assert (layers[0].in_features, *(layer.out_features for layer in layers)) == MLPS[model]
    assert case.batch_size == (256 if model == "mlp-small" else 64)
    (group,) = case.optimizer(case.model.parameters()).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0.01)


def test_the_worker_gets_the_same_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights, batches, rate, betas, eps, weight decay, clipping, schedule and dtype arrive as torch has them."""
    numpy = pytest.importorskip("numpy")
    kept = tmp_path / "kept"
    kept.mkdir()
    result = {"losses": [2.0, 1.0], "ms": [3.0], "setup_s": 4.0, "peak_mib": None, "jax": "0", "optax": "1"}
    worker(
        monkeypatch,
        tmp_path,
        f"for name in ('{jax_worker.GIVEN}', '{jax_worker.ARRAYS}'):\n"
        f"    pathlib.Path({str(kept)!r}, name).write_bytes((folder / name).read_bytes())\n"
        f"(folder / '{jax_worker.RESULT}').write_text('''{json.dumps(result)}''')",
    )
    case = ready(CASES["mlp-tiny"](8), torch.float32, CPU, "device")
    measured = measure(case, steps_per_call=100)
    assert measured == ([2.0, 1.0], [3.0], 4.0, None, {"jax": "0", "optax": "1"})
    given = json.loads((kept / jax_worker.GIVEN).read_text())
    assert given == {
        **{"compute": "bfloat16", "lr": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
        **{"layers": 3, "batches": 4, "schedule": 20, "max_norm": 1.0, "steps_per_call": 100, "on_device": True},
        **{"checked": 20, "repeats": 2, "seconds": 0.01},
    }
    with numpy.load(kept / jax_worker.ARRAYS) as arrays:
        (x, y), first = case.batches[1], case.model[0]  # type: ignore[index]  # a Sequential
        assert torch.equal(torch.from_numpy(arrays["weight0"]).t(), first.weight)
        assert torch.equal(torch.from_numpy(arrays["bias0"]), first.bias)
        assert torch.equal(torch.from_numpy(arrays["inputs1"]), x)
        assert torch.equal(torch.from_numpy(arrays["targets1"]).long(), y)


def test_the_schedule_is_that_of_torch() -> None:
    """The closed form that the worker uses follows CosineAnnealingLR over its minimum and up again."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = CosineAnnealingLR(optimizer, 20)
    for count in range(50):
        expected = 0.5 * 0.5 * (1 + math.cos(math.pi * count / 20))
        assert math.isclose(optimizer.param_groups[0]["lr"], expected, rel_tol=1e-9, abs_tol=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("model", "policy", "text"),
    [
        ("resnet18-cifar", "bfloat16", "only MLPs are written: mlp-tiny, mlp-small and mlp-deep"),
        ("mlp", "bfloat16", "trained with AdamW, not with SGD"),
        ("mlp-tiny", "float16", "compute in bfloat16 or float32, with float32 weights"),
        ("mlp-tiny", "bf16-true", "compute in bfloat16 or float32, with float32 weights"),
    ],
)
def test_what_jax_would_train_otherwise_is_refused(model: str, policy: str, text: str) -> None:
    """A comparison with another training would be none."""
    with pytest.raises(JaxError, match=text):
        measure(CASES[model](4), Policy.parse(policy))


def test_a_worker_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last line of its error is the error of the row."""
    pytest.importorskip("numpy")
    worker(monkeypatch, tmp_path, "raise RuntimeError('no such device')")
    with pytest.raises(JaxError, match="the process with JAX failed: RuntimeError: no such device"):
        measure(CASES["mlp-tiny"](4))


@pytest.mark.usefixtures("on_cpu")
def test_rows_are_added_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of each kind for the MLPs, with the settings of the file, judged by the losses of torch. Others stay."""
    pytest.importorskip("numpy")
    monkeypatch.setattr(beside_jax, "has_jax", lambda: True)
    result = {"losses": [9.0] * 20, "ms": [3.0, 2.0], "setup_s": 4.0, "peak_mib": None, "jax": "0", "optax": "1"}
    worker(
        monkeypatch,
        tmp_path,
        "given = json.loads((folder / 'given.json').read_text())\n"
        "assert (given['repeats'], given['seconds'], given['checked'], given['on_device']) == (2, 0.01, 20, True)\n"
        f"(folder / '{jax_worker.RESULT}').write_text({json.dumps(result)!r})",
    )
    figures_of(tmp_path, "--policy", "bfloat16", "--variants", "amp", "--input", "device", "--model", "mlp-tiny")
    beside_jax.main([str(tmp_path / "bench.json")])
    (found,) = json.loads((tmp_path / "bench.json").read_text())["results"]
    amp, jit, scan = found["rows"]
    assert [row["variant"] for row in (amp, jit, scan)] == ["amp", "jax-jit", "jax-scan"]
    for row in (jit, scan):
        assert (row["ms"], row["fastest"], row["slowest"], row["setup_s"], row["loss"]) == (2.5, 2.0, 3.0, 4.0, 9.0)
        assert row["off"], "another loss than torch's"
        assert row["expected"] == amp["expected"]
        assert row["report"] == {"jax": "0", "optax": "1"}
    assert "JAX, lax.scan of 100" in capsys.readouterr().out


def test_what_cannot_be_beside_jax_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without JAX, a file that is not there, and figures of another device: one line each."""
    file = tmp_path / "bench.json"
    monkeypatch.setattr(beside_jax, "has_jax", lambda: False)
    with pytest.raises(SystemExit, match="pip install jax optax"):
        beside_jax.main([str(file)])
    monkeypatch.setattr(beside_jax, "has_jax", lambda: True)
    with pytest.raises(SystemExit, match="No such file"):
        beside_jax.main([str(file)])
    figures = saved()
    figures.setting["seconds_per_repeat"] = 0.1
    file.write_text(figures.to_json())
    with pytest.raises(SystemExit, match="the files differ in device"):
        beside_jax.main([str(file)])


@pytest.mark.parametrize("found", [True, False])
def test_the_module_is_asked_for_without_an_import(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To import JAX would take memory of the GPU that the other variants are measured with."""
    asked: list[str] = []
    spec = SimpleNamespace() if found else None
    monkeypatch.setattr(beside_jax.importlib.util, "find_spec", lambda name: asked.append(name) or spec)  # type: ignore[func-returns-value]
    assert beside_jax.has_jax() is found
    assert asked[0] == "jax"


class Steps:
    """Counts steps as the worker's training does, without JAX."""

    def __init__(self, at_once: int) -> None:
        self.at_once, self.done = at_once, 0
        self.calls: list[int] = []

    def run(self, count: int) -> list[float]:
        self.done += count
        return [1.0 / (i + 1) for i in range(count)]

    def seconds(self, count: int) -> float:
        self.calls.append(count)
        return count * 1e-3

    def whole_calls(self, count: int) -> int:
        return jax_worker.Training.whole_calls(SimpleNamespace(_at_once=self.at_once), count)  # type: ignore[arg-type]


@pytest.mark.parametrize(("at_once", "warm_up", "block"), [(0, 20, 50), (100, 100, 100)])
def test_blocks_are_whole_calls(at_once: int, warm_up: int, block: int) -> None:
    """A block of about 0.05 s at 1 ms a step; a scan is never cut short. The set-up is what other steps do not take."""
    steps = Steps(at_once)
    figures = jax_worker.measured(steps, {"checked": 20, "seconds": 0.05, "repeats": 3})
    assert steps.calls == [warm_up, block, block, block]
    assert (len(figures["losses"]), steps.done) == (20, 20 + warm_up)
    assert figures["ms"] == pytest.approx([1.0, 1.0, 1.0])
    assert figures["setup_s"] == 0.0  # less than 40 ms have passed


@pytest.mark.usefixtures("on_cpu")
def test_jax_trains_to_the_same_losses(tmp_path: Path) -> None:
    """After 20 steps in bfloat16 both come to the losses of torch, within the tolerance that rounding explains."""
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    check(tmp_path, "--model", "mlp-tiny")


@pytest.mark.cuda
@pytest.mark.parametrize("source", ["device", "prefetch"])
def test_jax_trains_to_the_same_losses_on_a_gpu(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for all three MLPs."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")  # what is not in use is free for other tests
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    check(tmp_path, "--model", *MLPS, "--input", source)


def check(tmp_path: Path, *argv: str) -> None:
    figures_of(tmp_path, "--policy", "bfloat16", "--variants", "amp", "graphed", "--no-profile", *argv)
    beside_jax.main([str(tmp_path / "bench.json")])
    for result in json.loads((tmp_path / "bench.json").read_text())["results"]:
        rows = {row["variant"]: row for row in result["rows"]}
        assert list(rows) == ["amp", "graphed", "jax-jit", "jax-scan"]
        for row in rows.values():
            assert (row["error"], row["off"]) == ("", False), row
            assert row["difference"] <= row["tolerance"]
            assert 0 < row["fastest"] <= row["ms"] <= row["slowest"]
