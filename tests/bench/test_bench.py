"""python -m ampkit bench: what is measured, that no variant has an advantage or is wrong unseen, and what is shown."""

import copy
import functools
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import few
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import _text
from ampkit.__main__ import main
from ampkit._commands.bench import losses as _bench_losses
from ampkit._commands.bench import measure as _bench
from ampkit._commands.bench import process as _bench_process
from ampkit._commands.bench import profile as _bench_profile
from ampkit._commands.bench import report as _bench_report
from ampkit._commands.bench import session as _bench_session
from ampkit._commands.bench import variants as _bench_variants
from ampkit._commands.bench.cases import CASES, GPT, MEAN, STD, Case, ready, user_case
from ampkit._commands.bench.report import Figures, Result, Row
from ampkit._commands.bench.variants import VARIANTS, Loop, Setting, Variant, torch_amp
from ampkit._precision.policy import Policy

SHORT = ["--repeats", "2", "--seconds", "0.01"]
ROW_KEYS = {
    *("variant", "label", "ms", "fastest", "slowest", "ratio", "busy_ms", "busy_share", "kernels", "idle_share"),
    *(
        "between_share",
        "copy_share",
        "host_us",
        "launch_us",
        "setup_s",
        "peak_mib",
        "setup_peak_mib",
        "loss",
        "expected",
        "difference",
    ),
    *("tolerance", "noise", "compared", "off", "error", "report"),
}


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def tiny(batch: int) -> tuple[Any, ...]:
    """Gradients far above norm 1, so that a step without clipping goes elsewhere."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = [(4 * torch.randn(batch, 16), torch.randint(4, (batch,))) for _ in range(3)]
    return loss_fn, model, functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9), batches


def fixed() -> tuple[Any, ...]:
    return tiny(6)


def pictures(batch: int) -> tuple[Any, ...]:
    """Normalised images that are not in channels_last, with weights beside them, which are no images."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
    batches = [(torch.randn(batch, 3, 8, 8), torch.randint(4, (batch,)), torch.rand(batch)) for _ in range(2)]
    return weighted, model, functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9), batches


def weighted(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(model(x), y, reduction="none") * weights).mean()


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """Each run begins with a garbage collection: let it look at what the tests make alone."""
    torch.optim.SGD([torch.zeros(1)])  # imports what makes most of it
    with _bench_process.little_garbage():
        yield


@pytest.fixture(autouse=True)
def module_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mine")
    module.tiny, module.fixed, module.pictures = tiny, fixed, pictures  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def bench(*argv: str) -> int:
    return main(["bench", *argv])


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what the command says of a mistake of the user's: one line, no table, and the exit code of such."""
    assert bench(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m ampkit bench: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def figures_of(tmp_path: Path, *argv: str) -> dict[str, Any]:
    out = tmp_path / "bench.json"
    bench(*argv, *SHORT, "--json", str(out))
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def plant(monkeypatch: pytest.MonkeyPatch, key: str, build: Callable[[Case, Setting], Loop]) -> None:
    monkeypatch.setitem(VARIANTS, key, Variant("planted", build))


# ------------------------------------------------------------------------------------------------------------ one run


@pytest.mark.usefixtures("on_cpu")
def test_rows_json_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per variant and batch size in one run: times within their spread, losses as expected, a table."""
    argv = ["--model", "mine:tiny", "-b", "8", "4", "--variants", "graphed", "amp", "amp-fused", "float32"]
    figures = figures_of(tmp_path, *argv)
    assert figures["policy"] == str(Policy.parse("bfloat16"))
    assert figures["command"].startswith("python -m ampkit bench --model mine:tiny -b 8 4")
    assert [(result["model"], result["batch"]) for result in figures["results"]] == [("mine:tiny", 4), ("mine:tiny", 8)]
    printed = capsys.readouterr().out
    for result in figures["results"]:
        rows = {row["variant"]: row for row in result["rows"]}
        assert list(rows) == ["float32", "amp", "amp-fused", "graphed"], "in the order of VARIANTS"
        for row in rows.values():
            assert row.keys() == ROW_KEYS
            assert 0 < row["fastest"] <= row["ms"] <= row["slowest"]
            assert row["setup_s"] >= 0
            assert (row["error"], row["off"]) == ("", False)
            assert f"{row['ms']:.3f}" in printed
            assert f"{row['loss']:.4f} ({row['expected']:.4f})" in printed
        assert (rows["amp"]["ratio"], rows["amp"]["loss"]) == (1.0, rows["amp"]["expected"])
        assert rows["graphed"]["ratio"] == rows["amp"]["ms"] / rows["graphed"]["ms"]
        assert rows["graphed"]["report"]["replays"] > 0, "it was captured, not eager in disguise"
        assert rows["graphed"]["host_us"] is rows["graphed"]["peak_mib"] is rows["graphed"]["busy_ms"] is None
    assert "No CUDA device" in figures["notes"][0]
    assert "graphed_step, emulated" in printed
    assert "MiB" not in printed, "a column that has no figure is left out"
    assert "Graphs are emulated here: no null region." in printed
    assert figures["null_regions"] == {}, "the file says the same"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.slow
def test_quick_ends_soon_and_says_what_it_cannot_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--quick needs no GPU: one small model, and the note names what only a GPU can show."""
    monkeypatch.setitem(CASES, "mlp", functools.partial(user_case, "mlp", tiny))
    out = tmp_path / "quick.json"
    bench("--quick", "--json", str(out))
    (result,) = json.loads(out.read_text())["results"]
    assert (result["model"], result["batch"]) == ("mlp", 64)
    assert [row["variant"] for row in result["rows"]] == ["amp", "amp-fused", "graphed"]
    assert not any(row["off"] or row["error"] for row in result["rows"])
    printed = capsys.readouterr().out
    for text in ("--quick: few repeats", "Not measured here: how long kernels run", "peak memory, bare capture"):
        assert text in printed


@pytest.mark.usefixtures("on_cpu")
def test_json_to_standard_output_is_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json -` can be piped: no table, no progress bar."""
    bench("--model", "mine:fixed", "-b", "1", "2", "--variants", "amp", *SHORT, "--json", "-")
    captured = capsys.readouterr()
    (result,) = json.loads(captured.out)["results"]
    assert result["batch"] == 6, "a function without a parameter decides itself, and is measured once"
    assert captured.err == ""


@pytest.mark.parametrize("source", few(["device", "prefetch", "uint8"], ["uint8"]))
@pytest.mark.usefixtures("on_cpu")
def test_every_variant_gets_the_same_input(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--input: all get what `loss_fn` takes, in the dtype of the policy, in channels_last where it was uint8."""
    layout = torch.channels_last if source == "uint8" else torch.contiguous_format

    def watched(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        assert (x.shape, x.dtype, y.dtype, weights.shape) == ((4, 3, 8, 8), torch.float32, torch.int64, (4,))
        assert x.is_contiguous(memory_format=layout)
        return weighted(model, x, y, weights)

    monkeypatch.setattr("mine.pictures", lambda batch: (watched, *pictures(batch)[1:]))
    keys = ["amp", "graphed", *(["lightning"] if find_spec("lightning") else [])]
    figures = figures_of(tmp_path, "--model", "mine:pictures", "-b", "4", "--input", source, "--variants", *keys)
    assert figures["input"] == source
    (result,) = figures["results"]
    assert result["batch"] == 4
    assert [(row["error"], row["off"]) for row in result["rows"]] == [("", False)] * len(keys)


def test_images_survive_uint8() -> None:
    """What is encoded comes back normalised, to half a step of a pixel's 255, and cut off at black and white."""
    case = user_case("pictures", pictures, 4)
    encoded = ready(case, torch.float32, torch.device("cpu"), "uint8")
    pixels, labels, weights = encoded.batches[1]
    assert (pixels.dtype, pixels.shape, pixels.is_contiguous()) == (torch.uint8, (4, 8, 8, 3), True)
    assert encoded.batch_size == 4
    assert encoded.decode is not None
    images, *others = encoded.decode(encoded.batches[1])
    assert others == [labels, weights]
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    expected = case.batches[1][0].clamp(-mean / std, (1 - mean) / std)
    torch.testing.assert_close(images, expected, rtol=0, atol=float(0.51 / 255 / std.min()))
    assert (
        ready(case, torch.bfloat16, torch.device("cpu"), "uint8").decode(encoded.batches[1])[0].dtype == torch.bfloat16
    )


@pytest.mark.usefixtures("on_cpu")
def test_uint8_needs_images(capsys: pytest.CaptureFixture[str]) -> None:
    """A model without images says so; nothing else is measured in its place."""
    said = refused(capsys, "--model", "mine:tiny", "--input", "uint8", "--variants", "amp")
    assert re.search(r"mine:tiny: --input uint8: the batches contain no images, .* \(N, 3, H, W\)", said)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.slow
def test_lightning_trains_the_same_steps(tmp_path: Path) -> None:
    """The Lightning callback runs on the same batches to the same loss."""
    pytest.importorskip("lightning")
    (result,) = figures_of(tmp_path, "--model", "mine:fixed", "--variants", "amp", "lightning")["results"]
    row = next(row for row in result["rows"] if row["variant"] == "lightning")
    assert (row["error"], row["off"]) == ("", False)
    assert row["report"]["replays"] > 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("source", ["uint8", pytest.param("prefetch", marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_scan_trains_the_same_steps(source: str, tmp_path: Path) -> None:
    """R11: a scan of 96 steps per call reaches the loss that single steps reach, with decoded images too."""
    flags = ("--model", "mine:pictures", "-b", "4", "--input", source, "--variants", "amp", "scan")
    (result,) = figures_of(tmp_path, *flags)["results"]
    row = next(row for row in result["rows"] if row["variant"] == "scan")
    assert (row["error"], row["off"]) == ("", False)
    assert row["report"]["launches"] > 0
    assert row["ms"] > 0


def test_stacks_go_round_the_batches_in_order() -> None:
    """Slice i of stack j is the batch of step i + 3 j."""
    batches = [(torch.tensor([i]),) for i in range(4)]
    assert [stack.flatten().tolist() for (stack,) in _bench_session.stacks(batches, 3)] == [
        [0, 1, 2],
        [3, 0, 1],
        [2, 3, 0],
        [1, 2, 3],
    ]


@pytest.mark.cuda
@pytest.mark.parametrize("source", ["device", "prefetch", "uint8"])
def test_every_variant_on_a_gpu(source: str, tmp_path: Path) -> None:
    """All variants but the compiled ones: each figure is there, and what must hold between them does."""
    kinds = [(key, variant) for key, variant in VARIANTS.items() if key != "lightning"]
    keys = [key for key, variant in kinds if not variant.compiles]
    figures = figures_of(tmp_path, "--model", "mine:pictures", "-b", "32", "--input", source, "--variants", *keys)
    assert figures["device"] == torch.cuda.get_device_name()
    rows = {row["variant"]: row for row in figures["results"][0]["rows"]}
    assert list(rows) == keys
    for row in rows.values():
        assert (row["error"], row["off"]) == ("", False)
        together = VARIANTS[row["variant"]].together
        assert (row["host_us"] or 0) > 0 if together == 1 else row["host_us"] is None
        assert row["kernels"] >= 5
        assert row["busy_ms"] > 0
        assert 0 <= row["between_share"] <= row["idle_share"] <= 1  # 1 after rounding, if other tests stall the host
        assert 0 <= row["copy_share"] <= 1 - row["idle_share"]
        assert 0 < row["peak_mib"] < 1024
    for captured in ("bare", "graphed"):
        assert 0 < rows[captured]["launch_us"] <= rows[captured]["host_us"]
    assert rows["bare"]["kernels"] < rows["amp"]["kernels"]
    assert rows["amp"]["launch_us"] is None
    assert rows["graphed"]["report"]["captures"] == 1
    assert figures["notes"] == []


# ----------------------------------------------------------------------------------------------------------- honesty


def not_clipped(case: Case, setting: Setting) -> Loop:
    return torch_amp(case, setting, whole=False)


def other_learning_rate(case: Case, setting: Setting) -> Loop:
    """A third too high."""
    return torch_amp(replace(case, optimizer=functools.partial(case.optimizer, lr=0.065)), setting)


def no_schedule(case: Case, setting: Setting) -> Loop:
    """Clipped and at the right learning rate, which it keeps."""
    return torch_amp(case, setting._replace(schedule=100_000))


def never_steps(case: Case, setting: Setting) -> Loop:
    model = case.model.to(setting.device)

    def train(batches: Iterator[Any], on_loss: Callable[[Tensor], None]) -> None:
        for batch in batches:
            on_loss(case.loss_fn(model, *batch).detach())

    return Loop(train)


def diverges(case: Case, setting: Setting) -> Loop:
    def train(batches: Iterator[Any], on_loss: Callable[[Tensor], None]) -> None:
        for _ in batches:
            on_loss(torch.tensor(float("nan")))

    return Loop(train)


@pytest.mark.parametrize(
    "wrong", few([not_clipped, other_learning_rate, no_schedule, never_steps, diverges], (not_clipped, diverges))
)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.sampled(2)
def test_a_loss_that_is_off_is_marked(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variant that does something else than the others is marked, and the others are not."""
    plant(monkeypatch, "compile", wrong)
    (result,) = figures_of(tmp_path, "--model", "mine:fixed", "--variants", "amp-fused", "compile", "graphed")[
        "results"
    ]
    assert [row["variant"] for row in result["rows"] if row["off"]] == ["compile"]
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("planted")]
    assert line.endswith(" !")
    assert "more than 5% of the expected fall, and by m" in printed
    (row,) = [row for row in result["rows"] if row["off"]]
    assert row["compared"] == 20, "this model is compared to the end"
    assert wrong is diverges or row["difference"] > row["tolerance"] >= 0.05


@pytest.mark.usefixtures("on_cpu")
def test_a_variant_that_fails_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No compiler, say: the error's first line and the user's are in the row; the others are measured."""

    def fails(case: Case, setting: Setting) -> Loop:
        raise RuntimeError("no working C compiler\nwith a page of output")

    plant(monkeypatch, "compile", fails)
    argv = ["--model", "mine:fixed", "--variants", "amp", "compile"]
    (result,) = figures_of(tmp_path, *argv)["results"]
    good, bad = result["rows"]
    assert good["error"] == ""
    assert re.match(r"RuntimeError: no working C compiler \(.*test_bench\.py:\d+: `raise RuntimeError", bad["error"])
    assert (bad["ms"], bad["ratio"]) == (None, None)
    assert "planted           failed: RuntimeError: no working C compiler (" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
def test_a_failure_of_the_host_time_leaves_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes last, and may want more memory than the steps: the row keeps what it has, and a note says why."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(_bench, "host_time", fails)
    figures = figures_of(tmp_path, "--model", "mine:tiny", "-b", "4", "8", "--variants", "amp")
    rows = [row for result in figures["results"] for row in result["rows"]]
    assert [(row["error"], row["host_us"]) for row in rows] == [("", None)] * 2, "the larger one is tried, too"
    assert all(row["ms"] and row["loss"] for row in rows)
    notes = [f"No host time of torch AMP, eager, mine:tiny, batch {batch}: out of memory." for batch in (4, 8)]
    assert figures["notes"][1:] == notes
    printed = capsys.readouterr().out
    assert "failed" not in printed
    assert notes[1] in printed


def test_the_host_time_is_of_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them go to the device than two calls take; without CUDA there is no such time."""
    fed, called = [], []

    def feed(batches: Any, case: Case, setting: Setting) -> Any:
        fed.extend(batches)
        return fed

    monkeypatch.setattr(_bench_profile, "feed", feed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    case = user_case("fixed", fixed, 6)
    assert len(case.batches) == 3

    def step(*batch: Tensor) -> Tensor:
        called.append(batch)
        return torch.zeros(())

    host_us, launch_us = _bench_profile.host_time(step, case, Setting(Policy(), torch.device("cuda")))
    assert host_us is not None
    assert host_us > 0
    assert launch_us is None
    assert fed == list(case.batches[:2])
    assert called == fed * _bench_profile.HOST_PAIRS
    assert _bench_profile.host_time(step, case, Setting(Policy(), torch.device("cpu"))) == (None, None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.slow
def test_a_sweep_ends_for_a_variant_that_runs_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--sweep doubles the batch; where memory ends is a row, and larger batches are not tried on that variant."""
    tried = []

    def needs_memory(case: Case, setting: Setting) -> Loop:
        tried.append(case.batch_size)
        if case.batch_size >= 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return torch_amp(case, setting)

    plant(monkeypatch, "compile", needs_memory)
    figures = figures_of(tmp_path, "--quick", "--model", "mine:tiny", "--sweep", "--variants", "amp", "compile")
    assert [result["batch"] for result in figures["results"]] == [8, 16, 32, 64, 128, 256, 512, 1024]
    errors = [result["rows"][1]["error"] for result in figures["results"]]
    assert errors == ["", "", "out of memory", *["out of memory at batch 32 already"] * 5]
    assert tried == [8, 16, 32]
    assert all(result["rows"][0]["ms"] for result in figures["results"])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.slow
def test_a_sweep_ends_where_there_is_no_room_for_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the input fits: rows say so, larger ones are not made, and the next model is measured."""
    made = []

    def needs_memory(case: Case, *args: Any) -> Case:
        made.append(case.batch_size)
        if case.batch_size == 32:
            raise RuntimeError("CUDA error: out of memory")
        return ready(case, *args)

    monkeypatch.setattr(_bench, "ready", needs_memory)
    argv = ["--model", "mine:tiny", "mine:fixed", "-b", "8", "32", "64", "--variants", "amp", "graphed"]
    results = figures_of(tmp_path, *argv)["results"]
    assert made == [8, 32, 6]
    assert [[row["error"] for row in result["rows"]] for result in results] == [
        ["", ""],
        ["out of memory"] * 2,
        ["out of memory at batch 32 already"] * 2,
        ["", ""],
    ]
    assert [result["batch"] for result in results] == [8, 32, 64, 6]


@pytest.mark.usefixtures("on_cpu")
def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the second variant: the first one's row is in the file and on the terminal."""

    def interrupted(case: Case, setting: Setting) -> Loop:
        raise KeyboardInterrupt

    plant(monkeypatch, "compile", interrupted)
    out = tmp_path / "bench.json"
    assert bench("--model", "mine:fixed", "--variants", "amp", "compile", *SHORT, "--json", str(out)) == 130
    figures = json.loads(out.read_text())
    assert [row["variant"] for row in figures["results"][0]["rows"]] == ["amp"]
    captured = capsys.readouterr()
    assert "torch AMP, eager" in captured.out
    assert figures["notes"][-1] == "Not complete: KeyboardInterrupt ended the run early."
    assert figures["notes"][-1] in captured.out
    assert captured.err == "python -m ampkit bench: interrupted.\n"


@pytest.mark.usefixtures("on_cpu")
def test_nothing_is_handed_from_one_variant_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts from the same weights, and from an empty cache of compiled code; the environment is put back."""
    weights, caches = [], []

    def watched(case: Case, setting: Setting) -> Loop:
        weights.append([param.clone() for param in case.model.parameters()])
        caches.append((os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]))
        return torch_amp(case, setting)

    for key in ("amp", "compile", "graphed"):
        plant(monkeypatch, key, watched)
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    figures_of(tmp_path, "--model", "mine:fixed", "--variants", "amp", "compile", "graphed")
    assert (os.environ["TRITON_CACHE_DIR"], os.environ.get("TORCHINDUCTOR_CACHE_DIR")) == ("before", None)
    assert len(set(caches)) == 3
    for later in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], later, strict=True))


@pytest.mark.usefixtures("on_cpu")
def test_without_expected_losses_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch AMP itself fails: a note says why there is nothing to compare with."""

    def fails(*_: Any, **__: Any) -> Loop:
        raise ValueError("not on this machine")

    monkeypatch.setattr(_bench_losses, "torch_amp", fails)
    figures = figures_of(tmp_path, "--model", "mine:fixed", "--variants", "graphed")
    (note,) = figures["notes"][1:]
    assert note.startswith("No expected losses for batch 6, torch AMP failed: ValueError: not on this machine (")
    (row,) = figures["results"][0]["rows"]
    assert (row["expected"], row["off"], row["ratio"]) == (None, False, None)
    assert row["ms"] > 0


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_a_bare_step_is_compared_with_a_bare_eager_one(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clipping, schedule and input it has a loss of its own; one that says that it does all that is off."""

    def bare(case: Case, setting: Setting) -> Loop:
        step = torch_amp(case, setting, whole=False).step
        assert step is not None

        def train(batches: Iterator[Any], on_loss: Callable[[Tensor], None]) -> None:
            for _ in batches:
                on_loss(step(*case.batches[0]))

        return Loop(train)

    monkeypatch.setitem(VARIANTS, "bare", Variant("planted", bare, whole=whole))
    (result,) = figures_of(tmp_path, "--model", "mine:fixed", "--variants", "amp", "bare")["results"]
    assert [row["off"] for row in result["rows"]] == [False, whole]
    assert result["rows"][1]["error"] == ""
    assert (result["rows"][1]["difference"] == 0.0) is not whole


REFERENCE = [3.0, 2.5, 2.0, 1.0]  # falls by 2


def judged(losses: list[float], *nudged: list[float], reference: list[float] = REFERENCE) -> Row:
    row = Row("graphed", "graphed_step")
    ends = range(5, 5 * len(reference) + 1, 5)
    _bench_losses.Expected.of([reference, *nudged], 0.03, ends).judge(losses, row)
    return row


def test_losses_are_compared_pass_by_pass() -> None:
    """Without noise the tolerance is the floor; the worst pass counts, not the last; a flat curve has some."""
    row = judged([3.0, 2.5, 2.5, 1.0], REFERENCE)
    assert (row.difference, row.tolerance, row.noise, row.compared, row.off) == (0.25, 0.03, 0.0, 20, True)
    assert not judged([3.05, 2.5, 2.0, 1.0]).off
    flat = judged([2.0, 2.01], reference=[2.0, 2.0])
    assert (flat.difference, flat.off) == (pytest.approx(0.1), True)
    assert not judged([0.0, 0.0], reference=[0.0, 0.0]).off


def test_noise_widens_the_tolerance_from_where_it_is() -> None:
    """What nudged runs differ by, four times; in earlier passes, where they do not, the floor holds."""
    nudged = [3.0, 2.5, 2.1, 1.0], [3.0, 2.5, 1.95, 1.0]  # up to 0.15 apart, of 2
    late = judged([3.0, 2.5, 2.0, 1.5], *nudged)
    assert (late.difference, late.tolerance, late.noise, late.off) == (0.25, *map(pytest.approx, (0.3, 0.075)), False)
    assert judged([3.0, 2.5, 2.0, 1.7], *nudged).off
    early = judged([3.0, 2.3, 2.0, 1.0], *nudged)
    assert (early.difference, early.tolerance, early.off) == (pytest.approx(0.1), 0.03, True)


def test_noise_cannot_hide_a_wrong_loss_unseen() -> None:
    """Where noise leaves a loss little to say, the row tells; nan, and what noise does not explain, is off even so."""
    wild = [3.0, 2.5, 1.0, 3.0]
    row = judged([3.0, 2.5, 5.0, 4.0], wild)
    assert (row.off, row.compared, row.difference, row.tolerance) == (False, 10, 1.5, 2.0)
    assert judged([3.0, 2.5, 7.0, 4.0], wild).off
    assert judged([3.0, 2.5, float("nan"), 4.0], wild).off
    assert judged([3.0, 2.4, 2.0, 1.0], wild).off, "earlier passes are compared as strictly as ever"
    lost = judged([3.0, 2.5, 99.0, 99.0], [3.0, 2.5, float("nan"), float("nan")])
    assert (lost.off, lost.compared) == (False, 10)
    figures = saved()
    figures.results[0].rows = [row]
    printed = _bench_report.table(figures)
    assert "- (1.0000) ?" in printed
    assert (
        "? mlp, batch 64: after step 10 of 20, rounding alone changes losses so much that comparing them proves little."
        in printed
    )
    assert judged(REFERENCE, [9.0, 9.0, 9.0, 9.0]).compared == 0


def test_a_nudge_is_less_than_rounding() -> None:
    """Every parameter moves by half a unit in the last place at most, most of them do; the model stays as it was."""
    model = nn.Linear(64, 64)
    before = copy.deepcopy(model)
    for dtype in (torch.float16, torch.bfloat16):
        nudged, other = _bench_losses.nudge(model, dtype, 1), _bench_losses.nudge(model, dtype, 2)
        moved = ((nudged.weight - model.weight) / model.weight).abs()
        assert 0.4 < moved.max() / (torch.finfo(dtype).eps / 2) < 1.01
        assert (moved > 0).float().mean() > 0.9
        assert not torch.equal(nudged.weight, other.weight)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------- what the times mean


def test_setup_is_what_the_first_steps_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that is moved by hand: building, three slow steps, then fast ones; blocks are of fast ones."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(_bench_session.time, "perf_counter", lambda: clock.now)
    plan = _bench_session.Plan(repeats=3, seconds=10.0, checked=10)
    session = _bench_session.TimedLoop([(1,), (2,)], torch.device("cpu"), plan)
    clock.now += 7.0  # the variant is built
    for i, batch in enumerate(session.steps()):
        assert batch == (1 + i % 2,) or i >= 10
        clock.now += 5.0 if i < 3 else 0.5
        session.on_loss(torch.tensor(float(i)))
    assert session.setup_s == pytest.approx(7.0 + 3 * 4.5)
    assert session.ms == pytest.approx([500.0] * 3)
    assert session.losses == [0.5, 2.5, 4.5, 6.5, 8.5], "means over a pass, within the checked steps"


_calls = itertools.count()


def event(
    name: str, start: float, end: float, device: str = "CUDA", annotation: bool = False, call: int | None = None
) -> Any:
    """What torch.profiler gives for an event, by default one that a call of its own launched."""
    return SimpleNamespace(
        id=next(_calls) if call is None else -1 - call,
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(start=start, end=end),
    )


def test_busy_time_counts_overlap_once() -> None:
    """Time in which a kernel runs: overlapping kernels once, fills and copies within the device too, nothing else."""
    events = [
        event("gemm", 10, 20),
        event("relu", 15, 25),  # on another stream
        event("inside", 16, 17),
        event("gemm", 30, 32),
        event("Memset (Device)", 40, 41),
        event("Memcpy DtoD (Device -> Device)", 41, 43),
        event("Memcpy HtoD (Pinned -> Device)", 50, 90),
        event("Memcpy DtoH (Device -> Pinned)", 90, 95),
        event("Optimizer.step#SGD.step", 0, 100, annotation=True),
        event("aten::mm", 0, 200, device="CPU"),
    ]
    seen = _bench_profile.device_work(reversed(events))
    assert (seen.busy_us, seen.kernels) == (15 + 2 + 1 + 2, 4)
    assert _bench_profile.device_work([]) == _bench_profile.device_work(events[-4:]) == (0.0, 0, 0.0, 0.0, 0.0)


def steps_of_100_us(n: int, start: float = 0.0) -> list[Any]:
    """In each a copy is hidden, another stream works to the 80th, a copy is not hidden, and 10 us are idle."""
    events = []
    for at in (start + 100.0 * i for i in range(n)):
        events += [
            event("gemm", at, at + 60),
            event("Memcpy HtoD (Pinned -> Device)", at + 10, at + 30),
            event("decode", at + 40, at + 80),
            event("inside decode", at + 50, at + 70),
            event("Memcpy DtoH (Device -> Pinned)", at + 75, at + 90),
        ]
    return events


def test_idle_and_copying_are_shares_of_the_steps_in_the_middle() -> None:
    """Streams overlap: what is neither a kernel nor a copy is idle, what is only a copy is shown apart."""
    n = _bench_profile.ALL_STEPS
    seen = _bench_profile.device_work([*steps_of_100_us(n), event("last", 100 * n - 10, 100 * n)])
    assert (seen.idle_share, seen.copy_share) == pytest.approx((0.1, 0.1))
    assert (seen.busy_us, seen.kernels) == (80 * n + 10, 3 * n + 1)
    # The first copy stands alone, for the queue was empty, and the device waits for the host in the first three steps.
    start = event("Memcpy HtoD (Pinned -> Device)", 0, 50)
    later = [*steps_of_100_us(n - 3, start=300), event("last", 100 * n - 10, 100 * n)]
    seen = _bench_profile.device_work([start, *later])
    assert (seen.idle_share, seen.copy_share) == pytest.approx((0.1, 0.1))
    assert _bench_profile.device_work([event("gemm", 0, 70)]) == (70.0, 1, 0.0, 0.0, 0.0)


def test_the_profile_of_a_variant_fills_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the events of so many steps, per step; and a profiler that sees nothing is told of, without figures."""
    row, case = Row("amp", "torch AMP, eager"), user_case("fixed", fixed, 6)
    setting = Setting(Policy(), torch.device("cpu"))
    n = _bench_profile.ALL_STEPS
    trained = []

    def steps(batches: Any, device: torch.device, events: list[Any]) -> Iterator[Any]:
        for batch in batches:
            trained.append(batch)
            yield batch
        events.extend(found)

    monkeypatch.setattr(_bench_profile, "_profiled_steps", steps)
    found: list[Any] = []
    assert _bench_profile.profile(row, case, setting) == "torch.profiler saw no kernel"
    assert (row.busy_ms, row.idle_share) == (None, None)
    found = [*steps_of_100_us(n), event("last", 100 * n - 10, 100 * n)]
    assert _bench_profile.profile(row, case, setting) == ""
    assert len(trained) == 2 * len(case.batches)
    assert row.busy_ms == pytest.approx(0.08, rel=0.01)
    assert (row.idle_share, row.between_share, row.copy_share) == pytest.approx((0.1, 0.1, 0.1))


def test_gaps_within_a_graph_are_not_between_launches() -> None:
    """What one call launched is one piece: in each step 20 us within a graph and 10 behind it are idle."""
    n, events = _bench_profile.ALL_STEPS, []
    for i in range(n):
        at = 100.0 * i
        events += [event("gemm", at, at + 30, call=i), event("relu", at + 50, at + 90, call=i)]
    seen = _bench_profile.device_work([*events, event("last", 100 * n - 10, 100 * n)])
    assert (seen.idle_share, seen.between_share) == pytest.approx((0.3, 0.1))


def test_events_of_the_profiler_have_what_is_read() -> None:
    """The names of a real event's attributes: torch may change them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(4).add(1)
    events = profiler.events()
    assert {found.device_type.name for found in events} == {"CPU"}
    assert _bench_profile.device_work(events).kernels == 0
    assert all(found.time_range.end >= found.time_range.start and not found.is_user_annotation for found in events)
    assert all(isinstance(found.id, int) for found in events)


# ---------------------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nope", "'nope': expected module:function.* Models: mlp, mlp-tiny, "),
        ("mine:other", "module 'mine' has no attribute 'other'"),
        ("mine:number", r"'mine:number' is int, expected a function that returns \(loss_fn, model, optimizer"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_a_model_that_is_none(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What may stand behind --model is said where something else does."""
    assert re.search(f"error: --model .*{message}", refused(capsys, "--model", model))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (3, r"f returned int, expected \(loss_fn, model, optimizer, batches\)"),
        ((1, 2), r"returned \(int, int\), expected"),
        ((3, nn.Linear(1, 1), torch.optim.SGD, [()]), "a loss_fn or an optimizer that cannot be called"),
        ((loss_fn, 3, torch.optim.SGD, [()]), "returned int for the model"),
        ((loss_fn, nn.Linear(1, 1), torch.optim.SGD, []), "an empty sequence for the batches"),
        ((loss_fn, nn.Linear(1, 1), torch.optim.SGD, [torch.ones(1)]), "a batch that is not a tuple"),
        (
            (loss_fn, nn.Linear(1, 1), torch.optim.SGD, [(torch.ones(1, device="meta"),)]),
            "returned a batch on meta",
        ),
    ],
)
def test_a_function_that_returns_something_else(made: Any, message: str) -> None:
    """The user learns which part of it is wrong."""
    with pytest.raises(ValueError, match=message):
        user_case("f", lambda: made, 8)


def test_a_case_is_the_same_each_time_and_another_for_another_seed() -> None:
    """Weights and data come from the seed, of the benchmark's own models and of a user's function."""
    rng = torch.get_rng_state()
    for make in (functools.partial(CASES["mlp"], 4), functools.partial(user_case, "tiny", tiny, 4)):
        one, same, other = make(), make(), make(seed=1)
        assert one.batch_size == 4
        for a, b, c in zip(one.model.parameters(), same.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)
            assert a.dim() == 1 or not torch.equal(a, c)
        assert torch.equal(one.batches[0][0], same.batches[0][0])
        assert not torch.equal(one.batches[0][0], other.batches[0][0])
    assert torch.equal(rng, torch.get_rng_state()), "the caller's random numbers go on where they were"


@pytest.mark.parametrize("name", ["resnet18-cifar", "gpt2-like"])
def test_models_train_on_their_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is that of a guess at first, and every parameter gets a gradient."""
    if name == "gpt2-like":
        small = functools.partial(GPT, words=100, tokens=12, width=16, layers=2, heads=2)
        for key, value in {"GPT": small, "WORDS": 100, "TOKENS": 12}.items():
            monkeypatch.setattr("ampkit._commands.bench.cases." + key, value)
    else:
        pytest.importorskip("torchvision")
    case = CASES[name](2)
    loss = case.loss_fn(case.model, *case.batches[0])
    guess = torch.tensor(100.0 if name == "gpt2-like" else 10.0).log()
    assert abs(loss - guess) < 1.0
    loss.backward()
    assert all(param.grad is not None and param.grad.any() for param in case.model.parameters())


def test_gpt_does_not_see_the_next_word() -> None:
    """Attention is causal: another last word leaves the logits before it as they were."""
    torch.manual_seed(0)
    model = GPT(words=50, tokens=8, width=16, layers=2, heads=2)
    words = torch.randint(50, (2, 8))
    changed = words.clone()
    changed[:, -1] = (words[:, -1] + 1) % 50
    before, after = model(words), model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Lightning, without CUDA: a note instead of a row."""
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(_bench, "has_lightning", lambda: False)
    keys, notes = _bench.select(None, cuda)
    ours = ["graphed", "graphed-compile", "graphed-default"]
    assert keys == ["float32", "amp", "amp-fused", "compile", "reduce-overhead", "bare", *ours]
    assert notes == ["Left out: Lightning with ampkit's callback, which needs pip install 'ampkit[lightning]'."]
    keys, notes = _bench.select(["graphed", "max-autotune", "amp"], cpu)
    assert keys == ["amp", "graphed"]
    assert notes[0].endswith("peak memory, torch.compile max-autotune.")
    for quickly in ("quick", "sweep"):
        keys, notes = _bench.select(None, cuda, **{quickly: True})
        assert keys == ["amp", "amp-fused", "bare", "graphed"]
        assert notes[-1] == "Left out unless --variants names them: torch.compile, float32 and Lightning."


def test_every_precision_of_lightning_is_found() -> None:
    """The Trainer gets the policy's own name, and what has none is refused."""
    for name in ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"):
        assert _bench_variants.lightning_precision(Policy.parse(name), torch.device("cuda")) == {"precision": name}
    with pytest.raises(ValueError, match="Lightning has no precision for the policy params=float32,compute=float16"):
        _bench_variants.lightning_precision(Policy(compute="float16", ops={"add": "float32"}), torch.device("cuda"))


# ------------------------------------------------------------------------------------------------------ what is shown


def saved(
    model: str = "mlp", batch: int = 64, device: str = "a GPU", source: str = "prefetch", checked: int = 20
) -> Figures:
    setting = {"device": device, "torch": "2", "cuda": "13", "date": "2026-11-21", "policy": "float16", "repeats": 3}
    setting |= {"input": source, "checked_steps": checked, "tolerance": 0.03}
    losses = {"loss": 2.0, "expected": 2.0, "difference": 0.0, "tolerance": 0.03, "noise": 0.0, "compared": 20}
    amp = Row("amp", "torch AMP, eager", 8.0, 7.5, 9.0, 1.6, 100, host_us=8000.0, peak_mib=100.0, **losses)
    bare = Row(
        "bare", "bare capture (*)", 1.9, 1.9, 1.9, 1.8, 80, 0.05, 0.01, 0.0, 60.0, 55.0, 0.2, 110.0, 120.0, **losses
    )
    graphed = Row(
        "graphed", "graphed_step", 2.0, 1.9, 8.5, 1.8, 85, 0.016, 0.003, 0.002, 150.0, 60.0, 0.3, 104.0, 130.0
    )
    graphed = replace(graphed, **{**losses, "loss": 2.5, "difference": 0.2}, off=True)
    rows = [amp, bare, graphed, Row("lightning", "Lightning", error="ValueError: no")]
    return Figures(setting, ["A note."], [Result(model, batch, rows)])


def test_the_table() -> None:
    """Every figure of a row, the mark, the failed row, and what the marks mean."""
    lines = _bench_report.table(saved()).splitlines()
    assert lines[:2] == ["a GPU, torch 2, float16, median of 3 repeats, input: prefetch", "A note."]
    (graphed,) = [line for line in lines if line.startswith("graphed_step")]
    cells = "2.000 [1.900, 8.500] 4.00x 1.800 90% 85 1.6% 0.3% 0.2% 150 60 0.30 104 2.5000 (2.0000) !"
    assert graphed.split() == ["graphed_step", *cells.split()]
    assert "Lightning         failed: ValueError: no" in lines
    assert "(*) only the kernels: one batch that is on the device already, no clipping, no schedule." in lines
    assert lines[-1].startswith(
        "! off: in one of the passes over the batches the loss differs from the expected one by more than 3% of the "
    )


def test_noise_is_told_of() -> None:
    """Where rounding moves the losses the reader learns by how much, and what is let pass."""
    figures = saved()
    figures.results[0].rows[2] = replace(figures.results[0].rows[2], tolerance=0.12, noise=0.03)
    printed = _bench_report.table(figures)
    assert "mlp, batch 64: rounding alone changes losses by 3.0% of their fall, so 12% is tolerated." in printed
    assert "rounding alone" not in _bench_report.table(saved())


def swept(*points: tuple[int, float | None, float | None], model: str = "mlp", base: str = "amp-fused") -> Figures:
    """Batch size, and milliseconds of the eager and of the captured step: None where it ran out of memory."""
    parts = []
    for batch, *times in points:
        part = saved(model, batch)
        part.results[0].rows = [
            Row(key, key, ms, ms, ms, peak_mib=ms and memory, error="" if ms else "out of memory")
            for key, ms, memory in zip((base, "graphed"), times, (1000.0, 1100.0), strict=True)
        ]
        parts.append(part)
    return _bench_report.joined(parts)


def test_where_a_capture_stops_paying() -> None:
    """The null region: batch sizes at which a step saves less than 5% of the eager one, with memory beside speed."""
    figures = swept((64, 10.0, 9.4), (8, 8.0, 2.0), (16, 8.0, 7.61), (32, 8.0, 4.0), (128, 20.0, 20.2))
    lines = _bench_report.table(figures).splitlines()
    at = lines.index("mlp: graphed compared with amp-fused")
    assert [line.split() for line in lines[at + 1 : at + 7]] == [
        ["batch", "eager", "ms", "graphed", "ms", "saves", "eager", "MiB", "graphed", "MiB"],
        ["8", "8.000", "2.000", "75%", "1000", "1100"],
        ["16", "8.000", "7.610", "5%", "1000", "1100", "~"],
        ["32", "8.000", "4.000", "50%", "1000", "1100"],
        ["64", "10.000", "9.400", "6%", "1000", "1100"],
        ["128", "20.000", "20.200", "-1%", "1000", "1100", "~"],
    ]
    assert lines[at + 7] == "~ null region: at batch 16, 128 the capture saves less than 5% of a step."
    assert json.loads(figures.to_json())["null_regions"] == {"mlp": [16, 128]}
    assert Figures.from_json(figures.to_json()) == figures
    printed = _bench_report.table(swept((8, 8.0, 2.0), (16, 8.0, 4.0), base="amp"))
    assert "mlp: graphed compared with amp\n" in printed, "where the fused optimizer was not measured"
    assert (
        "No null region: the capture saves 5% of a step or more at each batch size where both have a time." in printed
    )
    assert "beside" not in _bench_report.table(swept((8, 8.0, 2.0)))


def test_nothing_is_said_of_a_null_region_that_nobody_knows() -> None:
    """Every captured row failed, by something else than memory: neither the table nor the file tells of savings."""
    figures = swept((8, 8.0, None), (16, 8.0, None))
    for result in figures.results:
        result.rows[1].error = "CaptureError: no"
    printed = _bench_report.table(figures)
    assert "mlp: graphed compared with amp-fused\n" in printed
    assert "failed" in printed
    assert "null region" not in printed.lower()
    assert json.loads(figures.to_json())["null_regions"] == {}
    one_left = swept((8, 8.0, 2.0), (16, 8.0, None))
    assert json.loads(one_left.to_json())["null_regions"] == {"mlp": []}
    assert "No null region" in _bench_report.table(one_left)


def test_a_batch_size_that_was_measured_twice_has_two_shares() -> None:
    """--read of two runs of the same: each line has the share of its own times."""
    lines = [line.split() for line in _bench_report.table(swept((8, 8.0, 2.0), (8, 8.0, 4.0))).splitlines()]
    assert [line[3] for line in lines if line[:1] == ["8"]] == ["75%", "50%"]


def test_a_captured_step_that_needs_more_memory_is_told_of() -> None:
    """Where only the eager step fits, a line says so; the null region is of those that both have a time."""
    printed = _bench_report.table(swept((8, 8.0, 2.0), (16, 9.0, None), (32, 10.0, None), (64, None, None)))
    assert "Memory: at batch 16, 32 the eager step fits and the captured one does not." in printed
    assert ["16", "9.000", "out", "of", "memory", "-", "1000", "-"] in [line.split() for line in printed.splitlines()]
    assert "No null region" in printed
    assert "Memory:" not in _bench_report.table(swept((8, 8.0, 2.0), (16, None, 3.0)))


def test_saved_figures_are_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--read: the tables of several files, and what they have in common once."""
    files = [tmp_path / f"{i}.json" for i in range(3)]
    for file, part in zip(files, (saved("mlp"), saved("resnet50"), saved("mlp", 128)), strict=True):
        file.write_text(part.to_json())
        assert Figures.from_json(file.read_text()) == part
    bench("--read", *map(str, files))
    printed = capsys.readouterr().out
    assert [printed.count(f"\n{name}, batch") for name in ("mlp", "resnet50")] == [2, 1]
    assert printed.count("A note.") == 1


def test_files_of_unequal_repeats_are_shown_with_their_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--read of a short and a long run: the head does not speak of one of them alone, nor does a file of both."""
    files = [tmp_path / f"{i}.json" for i in range(3)]
    for file, repeats in zip(files, (7, 3, 5), strict=True):
        part = saved("mlp", repeats)
        part.setting |= {"repeats": repeats, "seconds_per_repeat": 0.3}
        file.write_text(part.to_json())
    both = tmp_path / "both.json"
    bench("--read", *map(str, files[::2]), "--json", str(both))
    assert "median of 5 to 7 repeats, input" in capsys.readouterr().out
    bench("--read", str(both), str(files[1]), "--json", "-")
    figures = json.loads(capsys.readouterr().out)
    assert (figures["repeats"], figures["seconds_per_repeat"]) == ([3, 7], 0.3)
    bench("--read", str(both))
    assert "median of 5 to 7 repeats, input" in capsys.readouterr().out


def test_nan_survives_a_file() -> None:
    """JSON has no nan: a loss that is one comes back as nothing, still marked."""
    figures = saved()
    figures.results[0].rows[0].loss, figures.results[0].rows[0].off = float("nan"), True
    again = Figures.from_json(figures.to_json())
    assert again.results[0].rows[0].loss is None
    assert "nan (2.0000) !" in _bench_report.table(again)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a file that `python -m ampkit bench --json` wrote"),
        ("no json", "not a file that"),
        ('{"schema": 0}', "of another version of ampkit"),
        (saved(device="another GPU").to_json(), "the files differ in device: a GPU, another GPU"),
        (saved(source="uint8").to_json(), "the files differ in input: prefetch, uint8"),
        (saved(checked=8).to_json(), "the files differ in checked_steps: 20, 8"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message, not a traceback, and no table of figures that do not belong together."""
    (tmp_path / "good.json").write_text(saved().to_json())
    (tmp_path / "bad.json").write_text(text)
    assert message in refused(capsys, "--read", str(tmp_path / "good.json"), str(tmp_path / "bad.json"))
    assert "none.json: No such file" in refused(capsys, "--read", str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "argv", [["--policy", "fp8"], ["-b", "0"], ["--seconds", "0"], ["--variants", "jit"], ["-b", "8", "--sweep"]]
)
def test_wrong_arguments_are_explained(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is legal reaches the user through argparse."""
    said = {"fp8": "Legal: float32, float16", "0": "is not", "jit": "choose from", "8": "not allowed"}[argv[1]]
    assert said in refused(capsys, *argv)


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "0", "long"])
def test_a_block_takes_a_finite_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no length of time is refused before anything is measured, not in each row."""
    said = refused(capsys, "--seconds", seconds)
    assert f"argument --seconds: {seconds!r} is not a finite number above 0" in said


@pytest.mark.usefixtures("on_cpu")
def test_a_block_of_the_longest_finite_time_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e308 s: as many steps as a block has at most, not an OverflowError."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(_bench_session.time, "perf_counter", lambda: clock.now)
    plan = _bench_session.Plan(repeats=1, seconds=1e308, checked=4)
    session = _bench_session.TimedLoop([(1,)], torch.device("cpu"), plan)
    steps = 0
    for _ in session.steps():
        clock.now += 0.001
        steps += 1
    assert steps == 4 + 20 + 1000


def test_a_file_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder, or a folder in its place: said before anything is measured, not behind it."""
    monkeypatch.setattr(_bench, "run", lambda *_, **__: pytest.fail("it measured"))
    for wrong, says in ((tmp_path / "none" / "out.png", "there is no folder '"), (tmp_path, "is a folder")):
        said = refused(capsys, "--model", "mine:fixed", "--json", str(wrong))
        assert f"argument --json: '{wrong}'" in said
        assert says in said


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts on a terminal, leaves nothing behind, and is silent elsewhere."""
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        bar = _text.ProgressBar(2, shown=True)
        bar.show("one")
        bar.show("two")
        bar.clear()
        written = capsys.readouterr().err
        assert ("2/2 two" in written) is terminal
        assert written.endswith("\r\033[K") is terminal


def test_compiled_code_that_is_kept(tmp_path: Path) -> None:
    """A folder for each variant of each model; behind them the environment is as before."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with _bench_process.Caches(tmp_path / "kept") as caches:
        for _ in range(2):
            with caches.of("mlp", 64, "compile"):
                folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
                folder.mkdir(parents=True, exist_ok=True)
    assert folder == tmp_path / "kept" / "mlp-64-compile"
    assert folder.is_dir()
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
