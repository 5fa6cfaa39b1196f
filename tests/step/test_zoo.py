"""tests/benchmarks/zoo.py on small rows with an emulated graph: verdicts, the table, going on where a file ends."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 6
QUICK = ["torch/LSTM", "torch/GRU", "torch/PINN", "torch/diffusion UNet", "torch/GAN"]


def measure(name: str) -> dict[str, Any]:
    """Return the row in float32: not every CPU has fast kernels for bfloat16, or one for an LSTM at all."""
    return zoo.measure(name, "emulate", "cpu", STEPS, policy="float32")


def assert_captured(row: dict[str, Any]) -> None:
    assert "error" not in row, row["error"]
    assert (row["outcome"], row["captures"], row["replays"]) == ("whole", 1, STEPS - 3), row["failure"]
    assert (row["bits"], row["differing"], row["deterministic"]) == ("equal", [], True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUICK)
def test_rows_of_torch(name: str) -> None:
    assert_captured(measure(name))


@pytest.mark.slow
def test_torchvision() -> None:
    pytest.importorskip("torchvision")
    assert_captured(measure("torchvision/resnet, tiny"))


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("timm/resnet18", "whole"),
        ("timm/vit_tiny_patch16_224, Lion", "whole"),
        ("timm/resnet18, Mixup, ModelEmaV3", "whole"),
        ("transformers/llama", "whole"),
        ("transformers/bert, padded", "whole"),
        ("transformers/vit, LoRA", "whole"),
        ("torch_geometric/GCN", "eager"),
        ("torchdiffeq/dopri5", "eager"),
    ],
)
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_rows_of_other_libraries(name: str, outcome: str) -> None:
    pytest.importorskip(zoo.ROWS[name].library)
    if name.endswith("LoRA"):
        pytest.importorskip("peft")
    row = measure(name)
    assert "error" not in row, row["error"]
    assert (row["outcome"], row["bits"]) == (outcome, "equal")
    assert (outcome == "eager") is bool(row["failure"])


def test_the_line_in_the_way() -> None:
    """A step in parts has the first line of the message, under the path that Python would import it by."""
    row = measure("torch/CTC, lengths in tensors")
    assert (row["outcome"], row["replays"], row["bits"]) == ("in parts", 0, "equal")
    assert row["in_the_way"].startswith("zoo_small.py:")


def registered(monkeypatch: pytest.MonkeyPatch, loss: Callable[..., Tensor], **changes: Any) -> None:
    """Add a row of this loss, called "mine"."""
    monkeypatch.setitem(zoo.ROWS, "mine", replace(zoo.ROWS["torch/LSTM"], loss=loss, **changes))


def is_captured() -> bool:
    """Ask as transformers does: torch raises where there is no driver."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def told_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Read the device if nothing tells that this is captured, and compute something else if it is told so."""
    logits = model(images)
    if is_captured():
        return F.cross_entropy(2 * logits, labels)
    return F.cross_entropy(logits, labels) * (1.0 if float(logits.detach().isnan().any()) else 2.0)


def test_code_that_asks_is_compared_with_eager_code_that_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, told_loss)
    row = measure("mine")
    assert row["told_since"] > 1
    assert (row["outcome"], row["bits"], row["compared"]) == ("whole", "equal", "capturing=True")
    assert "both with capturing=True" in zoo.table([row])


def test_a_graphed_run_that_differs_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1, and the table tells by how much."""
    train = zoo.Subject.train

    def off_by_a_bit(self: zoo.Subject, steps: int, **options: Any) -> Any:
        state, report = train(self, steps, **options)
        if options["graph"] != "off":
            state["losses"] = state["losses"] + 1e-3
        return state, report

    monkeypatch.setattr(zoo.Subject, "train", off_by_a_bit)
    assert zoo.main(["--graph", "emulate", "--policy", "float32", "--only", "torch/LSTM"]) == 1
    assert "whole, differs by" in capsys.readouterr().out


def test_eager_that_differs_from_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.Generator().manual_seed(3)  # which no run seeds again

    def noisy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels) + torch.rand((), generator=drawn)

    registered(monkeypatch, noisy)
    row = measure("mine")
    assert row["bits"] == "eager differs"
    assert row["eager_distance"] > 0
    assert "eager itself differs by" in zoo.table([row])


def test_resuming(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows in the file are not run again, a line that was cut off is; a model that fails is a row with an error."""
    file = tmp_path / "rows.json"
    command = ["--graph", "emulate", "--policy", "float32", "--json", str(file), "--only", "torch/PINN", "mine"]

    def broken() -> nn.Module:
        raise LookupError("no such layer")

    monkeypatch.setitem(zoo.ROWS, "mine", replace(zoo.ROWS["torch/LSTM"], build=broken))
    assert zoo.main(command) == 0
    lines = file.read_text().splitlines()
    assert {json.loads(line)["name"] for line in lines} == {"torch/PINN", "mine"}
    assert "LookupError: no such layer (test_zoo.py:" in capsys.readouterr().out
    ran: list[str] = []
    measure_row = zoo.measure
    monkeypatch.setattr(zoo, "measure", lambda name, *args: ran.append(name) or measure_row(name, *args))
    assert zoo.main(command) == 0
    assert not ran
    kept = next(line for line in lines if "torch/PINN" in line)
    file.write_text(f'{kept}\n{{"name": "mi')
    assert zoo.main(command) == 0
    assert ran == ["mine"]
    assert [row["name"] for row in zoo.read([file])] == ["torch/PINN", "mine"]


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of several files, sorted by name: a sentence that counts them, a table of times, a table of all."""
    row = {
        "name": "a/b", "library": "a", "version": "1.0", "policy": "float32", "device": "H200", "note": "small | quick",
        "outcome": "whole", "bits": "equal", "distance": 0.0, "eager_distance": 0.0, "compared": "default",
        "replays": 6, "told_since": None, "in_the_way": None, "failure": None, "eager_optimizer": None,
        "last_loss": 1.0, "eager_ms": 4.0, "eager_range_ms": [3.5, 4.25],
        "graphed_ms": 0.5, "graphed_range_ms": [0.5, 0.75],
    }  # fmt: skip
    eager = {**row, "name": "a/c", "note": "", "outcome": "eager", "replays": 0, "failure": "x", "in_the_way": "d.py:7"}
    failed = {"name": "a/a", "library": "a", "version": "1.0", "policy": "float32", "device": "H200", "note": ""}
    files = tmp_path / "1.json", tmp_path / "2.json"
    files[0].write_text(f"{json.dumps(row)}\n{json.dumps(eager)}\n")
    files[1].write_text(json.dumps({**failed, "error": "ValueError: no"}) + "\n")
    assert zoo.main(["--table", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 rows, 1 that could not be trained. In a graph: 1 whole, 0 in parts, 1 eager.")
    times = "4.00 (3.50 to 4.25) | 0.50 (0.50 to 0.75) | 8.00 |"
    assert lines[6:8] == [f"| a/b (float32, small \\| quick) | {times}", f"| a/c (float32) | {times}"]
    assert lines[13].startswith("| a/a (float32) | not trained |")
    assert "ValueError: no" in lines[13]
    assert lines[14] == "| a/b (float32, small \\| quick) | whole | equal |  |"
    assert lines[15:] == ["| a/c (float32) | eager | equal | `d.py:7` |"]
    assert {line.replace("\\|", "").count("|") for line in lines if line.startswith("|")} == {5}


def test_written_into_a_page(tmp_path: Path) -> None:
    """The block between the two comments is replaced, and rows of zoo_unseen are left out of it."""
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    known = {"library": "a", "version": "1.0", "policy": "bfloat16", "device": "H200", "note": "", "error": "no"}
    names = ["torch/LSTM", next(iter(zoo.zoo_unseen.ROWS))]
    rows.write_text("".join(json.dumps({**known, "name": name}) + "\n" for name in names))
    page.write_text(f"# T\n\n<!-- begin: {zoo.MARK} -->\nold\n<!-- end: {zoo.MARK} -->\nbehind\n")
    assert zoo.main(["--table", str(rows), "--write", str(page)]) == 0
    text = page.read_text()
    assert "\n| torch/LSTM | not trained |" in text
    assert text.endswith("\nbehind\n")
    assert names[1] not in text
    assert "old" not in text
    page.write_text("# T\n")
    with pytest.raises(ValueError, match=r"page\.md: expected '<!-- begin: zoo\.py --table -->'"):
        zoo.main(["--table", str(rows), "--write", str(page)])


def test_the_page_has_what_the_script_writes() -> None:
    """The rows of docs/models.md are those of the script, as it shows and sorts them, and the sentence counts them."""
    block = zoo.marked.read(Path(__file__).parents[2] / "docs" / "models.md", zoo.MARK)
    lines = [line.strip("| ").split(" | ") for line in block.split("## All rows")[1].strip().splitlines()[2:]]
    expected = [zoo.shown({"name": name, "policy": row.policy, "note": row.note}) for name, row in zoo.ROWS.items()]
    names = [line[0] for line in lines]
    unseen = len(zoo.zoo_unseen.ROWS)
    assert len(expected) - len(names) == unseen > 0
    assert set(names) <= set(expected)
    assert [name.split(" (")[0] for name in names] == sorted(name.split(" (")[0] for name in names)
    outcomes = [f"{sum(line[1] == kind for line in lines)} {kind}" for kind in ("whole", "in parts", "eager")]
    equal = sum(line[2].startswith("equal") for line in lines)
    assert block.startswith(
        f"{len(names)} rows, 0 that could not be trained. In a graph: {', '.join(outcomes)}. Bits: {equal}"
    )


def test_shards_are_all_rows() -> None:
    """Each row is in one shard, so eight machines make one table."""
    shards = [zoo.chosen([], f"{i}/8") for i in range(1, 9)]
    assert sorted(name for shard in shards for name in shard) == sorted(zoo.ROWS)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    with pytest.raises(ValueError, match="from 1 to 8"):
        zoo.chosen([], "9/8")


def test_rows_are_what_the_table_promises() -> None:
    """As many models of timm and transformers as were asked for, and names that begin with the library."""
    names = list(zoo.ROWS)
    assert sum(name.startswith("timm/") and "," not in name for name in names) >= 28
    assert sum(name.startswith("transformers/") and "," not in name for name in names) >= 25
    assert sum(name.endswith(", LoRA") for name in names) >= 8
    assert all(name.split("/")[0] == row.library for name, row in zoo.ROWS.items())
