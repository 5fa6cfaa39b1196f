"""What a step writes to files in each call, and no replay would: it is named, and no line of a log is missing."""

import contextlib
import csv
import gzip
import io
import json
import logging
import os
import pickle
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import line_of
from tape import taped
from torch import Tensor, nn

import ampkit

STATE: dict[str, Any] = {}


class Block(nn.Module):
    """A layer, with kernels enough to be a part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        for _ in range(4):
            out = torch.tanh(out) * 1.5
        return out


class Net(nn.Module):
    """A block, a file that is open, and a function that the forward calls with it."""

    def __init__(self, in_forward: Callable[[Any], object] = bool) -> None:
        super().__init__()
        self.block = Block()
        self.log: Any = None
        self.in_forward = in_forward

    def forward(self, x: Tensor) -> Tensor:
        self.in_forward(self.log)
        out: Tensor = self.block(x)
        return out


class Logging(torch.optim.SGD):
    """An optimizer that may write to a file in each step."""

    log: Any = None
    in_step: Callable[[Any], object] = bool

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.in_step(self.log)
        super().step(closure)


class Logbook:
    """An object beside the model that keeps a file open."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")

    def say(self) -> None:
        self.file.write("a step\n")


@pytest.fixture(autouse=True)
def fresh_state(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "lines").write_text("".join(f"{k}\n" for k in range(100)))
    STATE.update(path=tmp_path / "log", lines=tmp_path / "lines", calls=0)
    yield
    for value in STATE.values():
        if hasattr(value, "close"):
            value.close()
    STATE.clear()


def trained(
    change: Callable[..., object],
    graph: str,
    *,
    place: str = "loss",
    opened: Any = None,
    calls: int = 10,
    **options: Any,
) -> tuple[Any, str]:
    """Return a step behind some calls, and all that it has said. `change` is called at a place of it."""
    torch.manual_seed(0)
    model = Net(change if place == "forward" else bool)
    model.log = opened
    if place == "hook":
        model.register_forward_hook(lambda *_: change(opened))
    elif place == "hook of a gradient":
        model.block.fc.weight.register_post_accumulate_grad_hook(lambda _: change(opened))
    elif place == "after_step":
        options["after_step"] = lambda model: change(opened)

    def loss_fn(model: Net, x: Tensor) -> Tensor:
        if place == "loss":
            change(model.log)
        out: Tensor = model(x).square().mean()
        return out

    optimizer = Logging(model.parameters(), lr=2**-7, fused=True)
    if place == "optimizer":
        optimizer.log, optimizer.in_step = opened, change
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph, **options)
    with warnings.catch_warnings(record=True) as said, taped():
        warnings.simplefilter("always")
        for _ in range(calls):
            step(torch.ones(4, 6))
    return step, "\n".join(str(each.message) for each in said)


def opens_to_append(_: Any) -> None:
    with open(STATE["path"], "a") as file:  # HERE opens_to_append
        file.write("a step\n")


def opens_by_io(_: Any) -> None:
    with io.open(STATE["path"], mode="ab") as file:  # noqa: UP020  # HERE opens_by_io
        file.write(b"a step\n")


def opens_a_path(_: Any) -> None:
    with STATE["path"].open("a") as file:  # HERE opens_a_path
        file.write("a step\n")


def writes_a_text(_: Any) -> None:
    STATE["path"].write_text("a step\n")  # HERE writes_a_text


def opens_by_os(_: Any) -> None:
    number = os.open(STATE["path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # HERE opens_by_os
    os.write(number, b"a step\n")
    os.close(number)


def pickles(_: Any) -> None:
    with contextlib.closing(open(STATE["path"], "ab")) as file:  # HERE pickles
        pickle.dump([1, 2], file)


def saves_by_numpy(_: Any) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(STATE["path"].with_suffix(".npy"), numpy.ones(3))  # HERE saves_by_numpy


def saves_several_by_numpy(_: Any) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.savez(STATE["path"].with_suffix(".npz"), ones=numpy.ones(3))  # HERE saves_several_by_numpy


def saves_a_text_by_numpy(_: Any) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.savetxt(STATE["path"], numpy.ones(3))  # HERE saves_a_text_by_numpy


def compresses(_: Any) -> None:
    with gzip.open(STATE["path"], "ab") as file:  # HERE compresses
        file.write(b"a step\n")


def saves_a_tensor(_: Any) -> None:
    torch.save(torch.ones(3), STATE["path"])  # HERE saves_a_tensor


def saves_into_a_buffer(_: Any) -> None:
    torch.save(torch.ones(3), io.BytesIO())  # HERE saves_into_a_buffer


def saves_under_other_names(_: Any) -> None:
    folder = STATE["path"].parent
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:  # HERE saves_under_other_names
        file.write("a step\n")


OPENING = [
    opens_to_append,
    opens_by_io,
    opens_a_path,
    writes_a_text,
    opens_by_os,
    pickles,
    saves_by_numpy,
    saves_several_by_numpy,
    saves_a_text_by_numpy,
    compresses,
    saves_a_tensor,
    saves_into_a_buffer,
    saves_under_other_names,
]
OF_OPTIMIZER = "the step changes the attribute log of its optimizer on the host, which a replay would not do"
REMEDY = "changed by each call, which a replay would not do"


def check_is_named(change: Callable[..., object], said: str, name: str) -> None:
    """Check that a message names the line, what it writes to, and what to do about it."""
    (line,) = [line for line in said.splitlines() if f"{name} is {REMEDY}" in line]
    assert line_of(change) in line, said
    assert "return what is to be kept in aux, or change it behind the call. Pass host_writes='ignore'" in line


def name_of(change: Callable[..., object]) -> str:
    """Return how messages name the marked line, which `host_writes` takes."""
    file, number, _ = line_of(change).split(":", 2)
    return f"{Path(file).name}:{number}"


def content() -> list[tuple[str, int]]:
    """Return the files that were written, with their sizes."""
    folder: Path = STATE["path"].parent
    return sorted(("" if "tmp" in each.name else each.name, each.stat().st_size) for each in folder.iterdir())


def started_anew() -> None:
    """Remove what was written."""
    for each in STATE["path"].parent.iterdir():
        if each != STATE["lines"]:
            each.unlink()


@pytest.mark.parametrize("change", OPENING, ids=lambda change: change.__name__)
def test_a_file_that_each_call_opens(change: Callable[..., object]) -> None:
    """W1: its line is named, all calls write; with host_writes="ignore" the step is captured."""
    trained(change, "off")
    expected = content()
    started_anew()
    step, said = trained(change, "emulate")
    assert (step.report().outcome, step.replays) != ("captured", 0), said
    assert step.replays == 0
    check_is_named(change, said, f"the file written in {name_of(change)}")
    assert content() == expected
    step, said = trained(change, "emulate", host_writes="ignore", on_failure="raise")
    assert (step.replays, said) == (7, "")


@pytest.mark.parametrize("place", ["loss", "forward", "hook", "hook of a gradient", "after_step", "optimizer"])
@pytest.mark.parametrize("is_open", [False, True], ids=["opened", "open"])
def test_wherever_it_is(place: str, is_open: bool) -> None:
    """W1: the same in a forward, in hooks and in `after_step`; where it is done in parts, no part has the line."""

    def change(log: Any) -> None:
        if log is None:
            opens_to_append(log)
        else:
            log.write("a step\n")
            log.flush()

    with STATE["path"].open("a") if is_open else contextlib.nullcontext() as opened:
        step, said = trained(change, "emulate", place=place, opened=opened)
    assert (OF_OPTIMIZER if place == "optimizer" and is_open else REMEDY) in said
    assert (step.replays > 0) is (place == "after_step")  # which is called behind
    assert STATE["path"].read_text() == "a step\n" * 10
    if place == "forward":
        assert [part.module for part in step.report().parts] == ["block"]


def test_names_of_what_may_stop() -> None:
    """W1: with the name of the line, as the message has it, only this one may stop."""
    name = name_of(opens_to_append)
    step, said = trained(opens_to_append, "emulate", host_writes=[name], on_failure="raise")
    assert (step.replays, said) == (7, "")
    step, said = trained(opens_by_io, "emulate", host_writes=[name])
    assert step.replays == 0
    check_is_named(opens_by_io, said, "")


# ----------------------------------------------------------------------------------------------- files that stay open


def writes_a_line(log: Any) -> None:
    log.write("a step\n")


def prints_to_it(log: Any) -> None:
    print("a step", file=log)


def dumps_to_it(log: Any) -> None:
    json.dump({"a": 1}, log)


def writes_a_row(log: Any) -> None:
    csv.writer(log).writerow(["a", "step"])


def writes_bytes(log: Any) -> None:
    log.write(b"a step\n")


def reads_a_line(log: Any) -> None:
    assert log.readline()


def iterates(log: Any) -> None:
    assert next(log)


def kinds_of_files() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    return {
        "write": (lambda: STATE["path"].open("a"), writes_a_line),
        "write, unbuffered": (lambda: STATE["path"].open("ab", buffering=0), writes_bytes),
        "print": (lambda: STATE["path"].open("a"), prints_to_it),
        "json": (lambda: STATE["path"].open("a"), dumps_to_it),
        "csv": (lambda: STATE["path"].open("a", newline=""), writes_a_row),
        "gzip": (lambda: gzip.open(STATE["path"], "ab"), writes_bytes),
        "temporary": (lambda: tempfile.NamedTemporaryFile("w", dir=STATE["path"].parent), writes_a_line),
        "StringIO": (io.StringIO, writes_a_line),
        "BytesIO": (io.BytesIO, writes_bytes),
        "read": (lambda: STATE["lines"].open(), reads_a_line),
        "next": (lambda: STATE["lines"].open(), iterates),
    }


def size_of(file: Any) -> int:
    """Return how much was written to a file, and close it."""
    if hasattr(file, "getvalue"):
        return len(file.getvalue())
    file.close()
    return STATE["path"].stat().st_size if STATE["path"].exists() else 0


@pytest.mark.filterwarnings("ignore:.*prints or logs")
@pytest.mark.parametrize("kind", kinds_of_files())
@pytest.mark.parametrize("where", ["module", "dict", "object"])
def test_a_file_that_stays_open(kind: str, where: str) -> None:
    """W1: in an attribute of the model, in a global dict, in an object: it is named as a list that grows would be."""
    make, write = kinds_of_files()[kind]
    name = {
        "module": "the attribute file" if kind == "temporary" else "the attribute log",
        "dict": r"the variable STATE['log']",
        "object": r"the variable STATE['holder'].log",
    }[where]

    def change(log: Any) -> None:
        if where == "dict":
            write(STATE["log"])  # HERE change
        elif where == "object":
            write(STATE["holder"].log)
        else:
            write(log)

    def run(graph: str, **options: Any) -> tuple[Any, str, int]:
        file = STATE["log"] = make()
        STATE["holder"] = type("Holder", (), {})()
        STATE["holder"].log = file
        step, said = trained(change, graph, opened=file if where == "module" else None, **options)
        return step, said, size_of(file)

    _, _, expected = run("off")
    started_anew()
    step, said, size = run("emulate")
    assert step.replays == 0
    assert re.search(rf"test_file_writes.py:\d+: `.*` - {re.escape(name)}\S* is {REMEDY}", said), said
    assert "return what is to be kept in aux, or change it behind the call. Pass host_writes='ignore'" in said
    assert size == expected
    step, _, _ = run("emulate", host_writes="ignore", on_failure="raise")
    assert step.replays == 7


def test_an_object_that_writes() -> None:
    """W1: a method of an object of the user's writes to the file that the object holds."""
    STATE["book"] = book = Logbook(STATE["path"])
    step, said = trained(lambda _: STATE["book"].say(), "emulate")
    book.file.close()
    assert step.replays == 0
    assert f"`self.file.write(\"a step\\n\")` - the variable STATE['book'].file is {REMEDY}" in said
    assert STATE["path"].read_text() == "a step\n" * 10


def test_a_writer_of_rows() -> None:
    """W1: a writer of `csv` holds its file, which is found in it."""
    with STATE["path"].open("a", newline="") as file:
        STATE["rows"] = csv.writer(file)
        step, said = trained(lambda _: STATE["rows"].writerow([1, 2]), "emulate")
    assert step.replays == 0
    assert f"the variable STATE['rows'] is {REMEDY}" in said
    assert STATE["path"].read_text() == "1,2\n" * 10 or STATE["path"].read_bytes() == b"1,2\r\n" * 10


def test_names_of_files_that_may_stop() -> None:
    """W1: `host_writes` takes the name of a file that stays open, as that of a list."""
    with STATE["path"].open("a") as file:
        step, said = trained(writes_a_line, "emulate", opened=file, host_writes=["log"], on_failure="raise")
    assert (step.replays, said) == (7, "")


# ------------------------------------------------------------------------------------------------- what is no reason


def reads_a_file(_: Any) -> None:
    with open(STATE["lines"]) as file:
        assert file.read(1)
    assert STATE["lines"].read_text()


def reads_from_the_start(log: Any) -> None:
    log.seek(0)
    assert log.readline()


def writes_once(_: Any) -> None:
    if not STATE["calls"]:
        STATE["calls"] = 1
        opens_to_append(None)


def silences(_: Any) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pass


@pytest.mark.parametrize("change", [reads_a_file, reads_from_the_start, writes_once, silences])
def test_what_is_no_reason(change: Callable[..., object]) -> None:
    """W1: a file that is read whole, one that only the first call writes, what goes nowhere: captured, not said."""
    with STATE["lines"].open() as file:
        step, said = trained(change, "emulate", opened=file, on_failure="raise")
    assert (step.replays, said) == (7, "")


def test_a_file_that_the_loop_writes_to() -> None:
    """W1: what is written between the calls to a file that the step reads the name of makes no other graph."""
    with STATE["path"].open("a") as file:
        STATE["log"] = file
        model = Net(lambda log: (log.closed, STATE["log"].closed))
        model.log = file
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-7, fused=True)
        step = ampkit.graphed_step(
            lambda model, x: model(x).mean(), model, optimizer, graph="emulate", on_failure="raise"
        )
        for _ in range(10):
            step(torch.ones(4, 6))
            file.write("a step\n")
        assert (step.replays, step.report().graphs) == (7, 1)


def logs(_: Any) -> None:
    STATE["logger"].warning("a step")


def logs_by_name(_: Any) -> None:
    logging.getLogger("loop").warning("a step")


@pytest.mark.parametrize("change", [logs, logs_by_name])
def test_a_log_in_a_file_is_said_once(change: Callable[..., object]) -> None:
    """W1: `logging` that writes to a file is a line that logs: it is captured, and said once."""
    logger = STATE["logger"] = logging.getLogger("loop")
    logger.addHandler(handler := logging.FileHandler(STATE["path"]))
    try:
        step, said = trained(change, "emulate", on_failure="raise")
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert step.replays == 7
    assert said.count("prints or logs something") == 1


def prints_to_stdout(_: Any) -> None:
    print("a step", file=STATE["stdout"])


def test_stdout_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """W1: standard output that goes to a file is no file of the step's: a line that prints is said once."""
    with STATE["path"].open("a") as file:
        monkeypatch.setattr(sys, "stdout", file)
        STATE["stdout"] = file
        step, said = trained(prints_to_stdout, "emulate", on_failure="raise")
        monkeypatch.undo()
    assert step.replays == 7
    assert said.count("prints or logs something") == 1


def test_a_file_whose_class_raises() -> None:
    """A file of the user's own class, and one that is closed, have no position that counts. Nothing is called."""

    class Odd(io.StringIO):
        def tell(self) -> int:
            raise AssertionError("called")

    STATE["odd"], STATE["closed"] = Odd(), io.StringIO()
    STATE["closed"].close()
    step, said = trained(lambda _: (STATE["odd"].closed, STATE["closed"].closed), "emulate", on_failure="raise")
    assert (step.replays, said) == (7, "")
