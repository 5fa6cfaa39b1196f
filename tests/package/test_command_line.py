"""python -m ampkit: exit codes, what goes to which stream, mistakes in one line, Ctrl-C, and `env` for bug reports."""

import functools
import json
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch

import ampkit
from ampkit import __main__ as command_line
from ampkit.__main__ import main

ROOT = Path(__file__).parents[2]
COMMANDS = ("bench", "doctor", "trace", "ops", "explain", "env")
SHORT = ["--variants", "amp", "--repeats", "1", "--seconds", "0.01"]
# What the commands are called with below. The user's own module, in the folder that the command runs in.
MODULE = """
import functools
import os
import subprocess
import sys
import time

import torch
from torch import nn


def loss_fn(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def training(batch=4):
    print("printed by the module")
    subprocess.run(["echo", "printed by a child of the module"], check=True)
    model = nn.Linear(8, 4)
    batches = [(torch.ones(batch, 8), torch.zeros(batch, dtype=torch.long))] * 4
    return loss_fn, model, functools.partial(torch.optim.SGD, lr=0.1, fused=True), batches


def example():
    print("printed by the module")
    return nn.Linear(4, 4), torch.ones(2, 4)


def elsewhere():
    os.chdir(os.sep)
    return example()


def misfit():
    return nn.Linear(4, 4), torch.ones(2, 5)


def raises(batch=4):
    return inner()


def inner():
    raise KeyError("of the user")


def raises_in_the_step(batch=4):
    return lambda model, x, y: inner(), *training(batch)[1:]


def needs_two(a, b): ...


def slow(batch):
    # From the second batch size on a step takes a minute.
    def loss(model, x, y):
        if len(x) > 1:
            time.sleep(60)
        return loss_fn(model, x, y)

    return loss, *training(batch)[1:]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.ones(8), torch.tensor(0)


def slow_with_workers():
    def loss(model, x, y):
        open("started", "w").close()
        time.sleep(60)
        return loss_fn(model, x, y)

    return loss, *training()[1:3], torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2)


number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with the module `mine`, and modules that cannot be imported: the current one, as `python -m` has it."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "imports_missing.py").write_text("import math\nimport a_missing_package.part\n")
    (tmp_path / "no_python.py").write_text("def f(:\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit('no data here')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield tmp_path
    for name in ("mine", "imports_missing", "no_python", "ends"):
        sys.modules.pop(name, None)


# As `python -m ampkit`, also where whoever runs the tests ignores SIGINT: processes in the background inherit that.
CODE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("ampkit", run_name="__main__", alter_sys=True)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def as_if_in(function: Any, file: str) -> types.FunctionType:
    """Return a function whose lines are not taken for the user's, as those of this file are."""
    return types.FunctionType(function.__code__.replace(co_filename=file), function.__globals__)


# ----------------------------------------------------------------------------------------------------------- bug report


def test_env_says_what_a_bug_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Versions, GPUs, driver, the variables of a fixed list and no others, and the settings that decide kernels."""
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\nGCC 12.2.0\n")
    monkeypatch.setattr("ampkit._commands.environment._DRIVER", driver)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for name in ("NCCL_SECRET", "TORCH_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    assert main(["env", "--json", "-"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert found["ampkit"] == ampkit.__version__
    assert (found["torch"]["version"], found["torch"]["cuda"]) == (torch.__version__, torch.version.cuda)
    assert {"cudnn", "nccl"} <= found["torch"].keys()
    assert found["cuda"]["available"] is True
    assert found["cuda"]["driver"] == "570.86.10"
    assert [(part["name"], part["capability"]) for part in found["cuda"]["gpus"]] == [("NVIDIA H200", "9.0")] * 2
    assert found["cuda"]["gpus"][0]["memory_bytes"] == 140 << 30
    assert {"numpy", "triton", "lightning", "torchvision"} <= found["packages"].keys()
    assert found["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert found["settings"]["torch.backends.cudnn.benchmark"] is torch.backends.cudnn.benchmark
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    told = (
        "NVIDIA H200, compute capability 9.0, 140.00 GiB",
        "570.86.10",
        torch.__version__,
        "expandable_segments:True",
    )
    for part in told:
        assert part in text
    assert "hunter2" not in printed + text


@pytest.mark.parametrize(
    "error", [AssertionError("Torch not compiled with CUDA enabled"), RuntimeError("Found no NVIDIA driver\nand more")]
)
def test_env_without_a_gpu_says_why(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No driver, or a torch without CUDA: the report has the reason, and everything else."""

    def fails() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", fails)
    assert main(["env", "--json", "-"]) == 0
    cuda = json.loads(capsys.readouterr().out)["cuda"]
    assert (cuda["available"], cuda["gpus"]) == (False, [])
    assert cuda["why_not"] == str(error).splitlines()[0]
    assert main(["env"]) == 0
    assert f"none: {cuda['why_not']}\n" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints it, and returns."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ampkit {ampkit.__version__}\n"


# ------------------------------------------------------------------------------------------------------- JSON to a pipe


@pytest.mark.parametrize(
    "argv",
    [
        ["ops", "--device", "cpu"],
        ["explain", "mine:example", "--device", "cpu"],
        ["doctor", "mine:training"],
        ["bench", "--model", "mine:training", "-b", "2", *SHORT],
        ["env"],
    ],
    ids=" ".join,
)
def test_json_to_standard_output_alone(argv: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--json -`: what the module prints, and a child of it, goes to standard error; the JSON is what a file has."""
    codes = [main([*argv, "--json", where]) for where in ("-", "out.json")]
    printed = capfd.readouterr()
    assert codes == [0, 0]
    found, end = json.JSONDecoder().raw_decode(printed.out)
    assert found.keys() == json.loads((folder / "out.json").read_text()).keys()
    assert printed.out[end:].count("\n") > 5, "with a file, the text is printed"
    if "mine:training" in argv:
        assert "printed by a child of the module\n" in printed.err
    if "mine" in str(argv):
        assert "printed by the module\n" in printed.err


@pytest.mark.slow
def test_a_difference_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ops --diff --json -`: the table is JSON on standard output, and the difference is text on standard error."""
    table = ampkit.op_table("cpu")
    (folder / "old.json").write_text(ampkit.OpTable("cpu", "9.9", {**table, "aten::mm": "float32"}).to_json())
    assert main(["ops", "--device", "cpu", "--diff", "old.json", "--json", "-"]) == 1
    printed = capsys.readouterr()
    assert ampkit.OpTable.from_json(printed.out) == table
    assert "aten::mm: float32 -> lower" in printed.err


def test_a_file_is_whole_or_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full while a file is written: the old one is still there, and the command says so with code 2."""
    file = folder / "env.json"
    file.write_text("the old one")

    def full(path: Path, text: str) -> int:
        with path.open("w") as opened:
            opened.write(text[:10])
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", as_if_in(full, os.__file__))
        assert main(["env", "--json", str(file)]) == 2
    assert file.read_text() == "the old one"
    assert not list(folder.glob("*.part"))
    assert main(["env", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["ampkit"] == ampkit.__version__


def test_a_file_is_where_it_was_looked_for(folder: Path) -> None:
    """The user's code changes the current folder: a relative path is still one of the folder where the user is."""
    assert main(["explain", "mine:elsewhere", "--device", "cpu", "--json", "out.json"]) == 0
    assert (folder / "out.json").exists()


@pytest.mark.slow
def test_no_reader() -> None:
    """`python -m ampkit ops | head`: neither a traceback nor a word, and the exit code that shells give."""
    closed = "import os; reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader); os.close(writer)"
    done = forks.run_code(closed + CODE, "ops", "--device", "cpu")
    assert (done.returncode, done.stderr) == (141, "")


# ------------------------------------------------------------------------------------------------------------- mistakes


MISTAKES = {
    "doctor no.such:thing": "'no.such:thing': No module named 'no'. Write module:function",
    "explain mine": "'mine': expected module:function",
    "explain ./mine.py": "'./mine.py': expected module:function",
    "doctor mine:train": "module 'mine' has no attribute 'train'. It has loss_fn, training, ",
    "doctor mine:number": "'mine:number' is int, expected a function",
    "explain mine:needs_two": "'mine:needs_two' cannot be called without arguments",
    "bench --model mine:needs_two": "'mine:needs_two' cannot be called with the batch size or without arguments",
    "explain mine:training": "'mine:training' returned (function, Linear, partial, list), expected (model, inputs)",
    "explain mine:misfit --device cpu": "mine:misfit: RuntimeError: ",
    "bench --model resnet19": "'resnet19': expected module:function. Write module:function or file.py:function: ",
    "explain no.py:example": "'no.py:example': there is no file 'no.py'. Write module:function or file.py:function: ",
    "explain mine.py:none": "'mine.py:none': file 'mine.py' has no attribute 'none'. It has loss_fn, training, ",
    "explain mine.py": "'mine.py': expected module:function. ",
    "explain mine.py:f()": "'mine.py:f()': expected module:function. ",
    "doctor mine:training --policy float17": "argument --policy: Policy.parse('float17'): ",
    "trace mine:training --policy float17 -o out": "argument --policy: Policy.parse('float17'): ",
    "bench --variants bare": "--variants bare: none can be measured here",
    "bench --variants none": "invalid choice: 'none'",
    "bench -b 1e3": "'1e3' is not an int from 1 to 2147483647",
    "bench -b 99999999999999999999": "is not an int from 1 to 2147483647",
    "bench --read missing.json": "missing.json: No such file or directory",
    "bench --read binary": "binary: 'utf-8' codec",
    "bench --read empty.json": "empty.json: the file does not say the checked_steps of the run",
    "ops --diff missing.json": "argument --diff: 'missing.json': No such file or directory",
    "ops --diff binary": "argument --diff: 'binary': 'utf-8' codec",
    "ops --frobnicate": "unrecognized arguments: --frobnicate",
    "env --json none/env.json": "argument --json: 'none/env.json': there is no folder 'none'",
    "benhc": "invalid choice: 'benhc'",
}


@pytest.mark.parametrize("argv", MISTAKES)
def test_mistakes(argv: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's mistake is one line that says what to write, on standard error, with exit code 2, and no traceback."""
    (folder / "binary").write_bytes(b"\x80\x81")
    (folder / "empty.json").write_text('{"schema": 1, "notes": [], "results": []}')
    assert main(argv.split()) == 2
    printed = capsys.readouterr()
    command = next((name for name in COMMANDS if argv.startswith(name)), "")
    prefix = f"python -m ampkit {command}".rstrip()
    assert printed.err.startswith(f"{prefix}: error: ")
    assert MISTAKES[argv] in printed.err
    assert printed.err.count("\n") == 1
    assert "results" not in printed.out


def test_without_arguments_the_help_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with the exit code of wrong arguments."""
    monkeypatch.setattr(sys, "argv", ["ampkit"])
    assert main() == main([]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("usage: python -m ampkit [-h]")
    assert all(f"\n    {command} " in printed.err for command in COMMANDS)


@pytest.mark.parametrize("place", ["mine.py", "./mine.py", "{folder}/mine.py", "deep/er/mine-2.py", "deep/er/json.py"])
def test_a_file_instead_of_a_module(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may lie anywhere, import what lies beside it, and have a name that is no module's or another one's."""
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("mine-2.py", "json.py"):
        (folder / "deep" / "er" / name).write_text("from beside_it import example")
    (folder / "deep" / "er" / "beside_it.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    try:
        assert main(["explain", f"{place.format(folder=folder)}:example", "--device", "cpu"]) == 0
        assert main(["explain", f"{place.format(folder=folder)}:example", "--device", "cpu"]) == 0
        assert sys.modules["json"] is json
    finally:
        for name in {*sys.modules} - before:
            del sys.modules[name]
    printed = capsys.readouterr().out
    assert printed.count("1 operations.") == 2
    assert printed.count("printed by the module") == 2


@pytest.mark.parametrize("wrong", ["none/out.json", ".", "/proc/out.json", "x" * 300])
@pytest.mark.parametrize(
    "argv", ["doctor mine:raises", "explain mine:raises", "bench --model mine:raises", "ops", "env"]
)
def test_output_files_are_tried_before_the_work(
    argv: str, wrong: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is missing or cannot be written to: said first. Otherwise the user's function would have raised."""
    assert main([*argv.split(), "--json", wrong]) == 2
    said = capsys.readouterr().err
    assert f"argument --json: {wrong!r}" in said
    assert re.search("there is no folder|is a folder|cannot be written", said)
    assert sorted(path.name for path in folder.glob("*.part")) == []


# ------------------------------------------------------------------------------------------------------ the user's code


@pytest.mark.parametrize("argv", ["doctor {}:f", "explain {}:f", "bench --model {}:f", "explain {}.py:f"])
@pytest.mark.parametrize(
    ("module", "line", "raised"),
    [
        ("imports_missing", 2, "ModuleNotFoundError: No module named 'a_missing_package'"),
        ("no_python", 1, "SyntaxError: "),
        ("ends", 2, "SystemExit: no data here"),
    ],
)
def test_a_module_that_cannot_be_imported(
    argv: str, module: str, line: int, raised: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It exists, and what it imports does not: file, line and name are said; the code is not that of a wrong name."""
    assert main(argv.format(module).split()) == 3
    said = capsys.readouterr().err
    assert f'File "{folder / module}.py", line {line}' in said
    assert f"error: your code raised {raised}" in said
    assert "importlib" not in said
    assert "__main__.py" not in said


@pytest.mark.parametrize(
    "argv",
    [
        "doctor mine:raises",
        "explain mine:raises",
        "bench --model mine:raises --variants amp",
        "doctor mine:raises_in_the_step",
    ],
)
def test_an_exception_of_the_users(argv: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user's frames are shown, no others, and the exit code is 3."""
    assert main(argv.split()) == 3
    printed = capsys.readouterr()
    number = MODULE.splitlines().index('    raise KeyError("of the user")') + 1
    place = f'{folder / "mine.py"}:{number}: `raise KeyError("of the user")`'
    assert printed.err.splitlines()[-1].endswith(f": error: your code raised KeyError: 'of the user' ({place})")
    files = set(re.findall(r'File "(.*)", line', printed.err))
    assert files == {str(folder / "mine.py")}
    assert "return inner()" in printed.err or "lambda" in printed.err


def test_a_defect_of_ampkit(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What no one foresaw keeps its traceback, and the last line says what to report; it is no "differs"."""

    def fails(device_type: str) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(command_line, "op_table", as_if_in(fails, str(ROOT / "ampkit" / "_op_table.py")))
    assert main(["ops"]) == 2
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "RuntimeError: unforeseen" in said
    assert "python -m ampkit env" in said.splitlines()[-1]


# -------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.slow
def test_trouble_is_no_difference(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ops --diff` as diff(1): 0 for the same rules, 1 for others, 2 where they cannot be compared."""
    monkeypatch.setattr("ampkit.__main__.op_table", functools.cache(ampkit.op_table))
    ops = ["ops", "--device", "cpu", "--diff"]
    table = ampkit.op_table("cpu")
    (folder / "same.json").write_text(table.to_json())
    (folder / "other.json").write_text(ampkit.OpTable("cpu", "9.9", {**table, "aten::mm": "float32"}).to_json())
    (folder / "cuda.json").write_text(ampkit.op_table("cuda").to_json())
    (folder / "text.json").write_text("no table")
    files = ("same.json", "other.json", "cuda.json", "text.json", "none.json")
    assert [main([*ops, file]) for file in files] == [0, 1, 2, 2, 2]
    assert "text.json" in capsys.readouterr().err


def test_a_bench_in_which_all_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its exit code is 1, and it says so; the table, with the user's line in each row, is printed and written."""
    argv = ["bench", "--model", "mine:raises_in_the_step", *SHORT, "--json", "out.json"]
    assert main(argv) == 1
    printed = capsys.readouterr()
    assert printed.err.endswith(
        "bench: error: no variant could be measured. Each row of the table, or of the JSON, says why.\n"
    )
    assert "KeyError: 'of the user' (" in printed.out
    (row,) = json.loads((folder / "out.json").read_text())["results"][0]["rows"]
    assert "mine.py:" in row["error"]


def test_a_bench_in_which_some_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit code is 0, and a line on standard error counts them."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)
    assert main(["bench", "--model", "mine:training", *SHORT, "--variants", "amp", "compile"]) == 0
    assert capsys.readouterr().err.endswith("python -m ampkit bench: 1 of 2 rows failed. Each of them says why.\n")


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupted(argv: list[str], folder: Path, ready: Callable[[], bool]) -> tuple[int, str, str]:
    """Send SIGINT to a command that is at work, and return its exit code and what it printed; no child is left."""
    (folder / "mine.py").write_text(MODULE)
    script = folder / "run.py"
    script.write_text(f"import os\nos.setsid()\nos.chdir({str(folder)!r})\n{CODE}")
    out, err = folder / "stdout", folder / "stderr"
    process = forks.Fork(forks.Script([str(script), *argv], ENVIRONMENT, str(out), str(err)))
    try:
        until(lambda: ready() or process.poll() is not None)
        assert process.poll() is None, err.read_text()
        process.send_signal(signal.SIGINT)
        until(lambda: process.poll() is not None)
        until(lambda: not group_lives(process.pid))
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    assert process.returncode is not None
    return process.returncode, out.read_text(), err.read_text()


def until(reached: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ctrl_c_in_a_bench(tmp_path: Path) -> None:
    """A signal in the second table: the row of the first is printed and written, without a traceback; code 130."""
    file = tmp_path / "out.json"
    argv = ["bench", "--model", "mine:slow", "-b", "1", "2", *SHORT, "--json", "out.json"]
    code, out, err = interrupted(argv, tmp_path, file.exists)
    assert code == 130
    assert "Traceback" not in err
    assert err.endswith("python -m ampkit bench: interrupted.\n")
    figures = json.loads(file.read_text())
    assert [(result["batch"], len(result["rows"])) for result in figures["results"]] == [(1, 1)]
    assert figures["notes"][-1].startswith("Not complete: KeyboardInterrupt")
    assert figures["notes"][-1] in out
    assert f"{figures['results'][0]['rows'][0]['ms']:.3f}" in out


@pytest.mark.slow
def test_ctrl_c_with_child_processes(tmp_path: Path) -> None:
    """The workers of a DataLoader, which get no signal themselves, end with the command."""
    code, _, err = interrupted(["doctor", "mine:slow_with_workers"], tmp_path, (tmp_path / "started").exists)
    assert code == 130
    assert "Traceback" not in err


def test_ctrl_c_that_lightning_makes_an_exit_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Trainer raises SystemExit(1) of a KeyboardInterrupt: the command was interrupted all the same."""

    def as_a_trainer(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    monkeypatch.setattr(command_line, "op_table", as_a_trainer)
    assert main(["ops"]) == 130


# ----------------------------------------------------------------------------------------------------------- documented


def test_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """In the help of every command, and on the page of the command line."""
    for argv in ([], *([command] for command in COMMANDS)):
        assert main([*argv, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        for text in ("Exit code: 0 if", "2 if the command could not do its work", "3 if your code", "130 after Ctrl-C"):
            assert text in shown
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "3", "130", "141"]
    for command in COMMANDS:
        assert f"python -m ampkit {command}" in page


def test_bug_reports_are_asked_for_it() -> None:
    """Where bug reports are described, the command is named that prints what they need."""
    for page in ("README.md", "docs/troubleshooting.md"):
        assert "python -m ampkit env" in (ROOT / page).read_text()
