"""Which instructions of the user's functions a call executes."""

import bdb
import io
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit._capture.host import executed as module
from ampkit._capture.host.code import instructions, names, names_looked_up, reads
from ampkit._capture.host.executed import Executed
from ampkit._torch.compile import original_code

CONFIG: Any = SimpleNamespace(on=False, off=True, first=1.0, second=2.0, third=3.0, keys={"a": 1.0})


def either(x: Any) -> Any:
    return CONFIG.first if CONFIG.on else CONFIG.second


def both(x: Any) -> Any:
    return CONFIG.on and CONFIG.first


def loop(x: Any) -> Any:
    for _ in range(3):
        if CONFIG.on:
            return CONFIG.first
        x = CONFIG.keys["a"]
    return x


def handles(x: Any) -> Any:
    try:
        return CONFIG.missing
    except AttributeError:
        return CONFIG.third


def generator(x: Any) -> Any:
    def each() -> Any:
        yield CONFIG.first
        yield CONFIG.second

    return next(each())


def defines(x: Any) -> Any:
    called = lambda: CONFIG.first  # noqa: E731
    CONFIG.uncalled = lambda: CONFIG.second
    return called()


def fails(x: Any) -> Any:
    raise KeyError(either(x))


CASES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "either": (either, {"CONFIG.on", "CONFIG.second"}),
    "both": (both, {"CONFIG.on"}),
    "loop": (loop, {"range", "CONFIG.on", "CONFIG.keys['a']"}),
    "handles": (handles, {"CONFIG.missing", "AttributeError", "CONFIG.third"}),
    "generator": (generator, {"next", "CONFIG.first", "Any"}),
    "defines": (defines, {"CONFIG.first"}),
    "comprehension": (lambda x: [CONFIG.third for each in x if each or CONFIG.on], {"CONFIG.on", "x"}),
}


@contextmanager
def watching(executed: Executed) -> Iterator[None]:
    """Have all functions of this file be watched."""

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            executed.watch(frame)

    with executed.noting():
        sys.setprofile(watch)
        try:
            yield
        finally:
            sys.setprofile(None)


def read_in(function: Callable[..., Any], executed: Executed) -> set[str]:
    """Return the expressions of a function that were executed."""
    found = reads(function.__code__)
    executed_reads = (
        read for read, places in found.items() if any(executed.has(place) and not place.sets for place in places)
    )
    return {read.variable + "".join(map(str, read.parts)) for read in executed_reads}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read(case: str) -> None:
    """R7: an expression in a branch that is not taken is not read. A second look begins anew."""
    function, expected = CASES[case]
    for _ in range(2):
        executed = Executed()
        with watching(executed):
            function((0,))
        assert read_in(function, executed) == expected
        assert executed.knows(function.__code__)


def test_other_branches_of_later_calls() -> None:
    """All calls in the context count, none behind it."""
    executed = Executed()
    with watching(executed):
        either(0)
    CONFIG.on = True
    try:
        either(0)
        assert read_in(either, executed) == {"CONFIG.on", "CONFIG.second"}
        with watching(executed := Executed()):
            either(0)
            CONFIG.on = False
            either(0)
    finally:
        CONFIG.on = False
    assert read_in(either, executed) == {"CONFIG.on", "CONFIG.first", "CONFIG.second"}


def test_names() -> None:
    """Names of attributes, and texts, in what was executed; all of them in code that was not watched."""

    def named(x: Any) -> Any:
        return getattr(CONFIG, "third") if x else CONFIG.first  # noqa: B009

    executed = Executed()
    with watching(executed):
        named(1)
    assert set(executed.names(named.__code__, names(named.__code__))) == {"getattr", "CONFIG", "third"}
    assert {"CONFIG", "on", "first", "second"} == set(executed.names(either.__code__, names(either.__code__)))


LOOK_UP: dict[str, tuple[Callable[..., Any], bool]] = {
    "entry": (lambda x: x["third"], True),
    "contained": (lambda x: "third" in x.keys, True),
    "getattr": (lambda x: getattr(x, "third", 1.0), True),
    "get": (lambda x: x.get("third"), True),
    "another function": (lambda x: x.group("third"), False),
    "an entry of a result": (lambda x: x.group("third")["second"], False),
}


@pytest.mark.parametrize(("function", "looks_up"), LOOK_UP.values(), ids=LOOK_UP)
@pytest.mark.quick(3)
def test_texts_that_look_something_up(function: Callable[..., Any], looks_up: bool) -> None:
    assert ("third" in names_looked_up(function.__code__)) == looks_up
    assert "third" in names(function.__code__)


def test_long_instructions() -> None:
    """The 300th name of a function needs an argument in two parts."""
    text = "def function(x):\n    if x:\n        pass\n"
    text += "".join(f"    CONFIG.a{i} = x\n" for i in range(300))
    text += "    return CONFIG.first if x else CONFIG.second\n"
    found: dict[str, Any] = {"CONFIG": SimpleNamespace(first=1.0, second=2.0)}
    exec(compile(text, __file__, "exec"), found)
    executed = Executed()
    with watching(executed):
        found["function"](1)
    assert any(place.first < place.last for _, place in instructions(found["function"].__code__))
    assert {"CONFIG.first", "x"} == read_in(found["function"], executed)


def test_a_debugger_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another tool has what it would use, each instruction is taken for executed."""
    before = sys.gettrace()
    if sys.version_info >= (3, 12):
        taken = [number for number in range(6) if sys.monitoring.get_tool(number) is None]
        for number in taken:
            sys.monitoring.use_tool_id(number, "of a test")
    else:
        sys.settrace(lambda *_: None)
    try:
        with watching(executed := Executed()):
            either(0)
    finally:
        if sys.version_info >= (3, 12):
            for number in taken:
                sys.monitoring.free_tool_id(number)
        sys.settrace(before)
    assert not executed.knows(either.__code__)
    assert read_in(either, executed) == {"CONFIG.on", "CONFIG.first", "CONFIG.second"}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="nothing is traced there")
def test_a_call_that_ends_the_tracing() -> None:
    """As `pdb.set_trace()` and `continue` do: what it executes behind that is not seen, so all counts."""
    with watching(executed := Executed()):
        either(0)
        assert executed.knows(either.__code__)
        sys.settrace(None)
        assert not executed.knows(either.__code__)
    assert read_in(either, executed) == {"CONFIG.on", "CONFIG.first", "CONFIG.second"}


TRACES = pytest.mark.skipif(sys.version_info >= (3, 12), reason="instructions are monitored there")
ALL_OF_EITHER = {"CONFIG.on", "CONFIG.first", "CONFIG.second"}


def debugged(debugger: Any) -> Any:
    debugger.set_trace()
    found = either(0)
    for _ in range(2):
        found += CONFIG.third
    return found


@pytest.mark.parametrize("commands", ["n n n n c", "n s n n n r n u d w c", "s s r n unt c", "BREAK c r c"])
@pytest.mark.quick(2)
def test_a_debugger_that_a_call_starts(commands: str) -> None:
    """It stops at the lines at which it stops without ampkit, and says nothing else. All counts as read."""
    texts = []
    for context in (nullcontext, lambda: watching(Executed())):
        lines = "\n".join(commands.split()).replace("BREAK", f"b {__file__}:{either.__code__.co_firstlineno + 1}")
        given, said = io.StringIO(lines), io.StringIO()
        bdb.Breakpoint.clearBreakpoints()
        try:
            with context():
                debugged(pdb.Pdb(stdin=given, stdout=said, nosigint=True, readrc=False))
        finally:
            sys.settrace(None)
            bdb.Breakpoint.clearBreakpoints()
        texts.append(said.getvalue())
    assert texts[0] == texts[1]
    assert texts[0].count("(Pdb)") == len(commands.split())


@TRACES
def test_a_debugger_ends_the_watching() -> None:
    """Before it, and behind it."""
    with watching(executed := Executed()):
        either(0)
        assert executed.knows(either.__code__)
        debugged(pdb.Pdb(stdin=io.StringIO("n\nc\n"), stdout=io.StringIO(), nosigint=True, readrc=False))
        either(0)
        assert not executed.knows(either.__code__)
    assert read_in(either, executed) == ALL_OF_EITHER
    assert sys.gettrace() is None


def lines_of(function: Callable[..., Any], *args: Any) -> list[tuple[str, int]]:
    """Call a function under a trace function of one's own; return the lines that it was told of."""
    found: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event not in ("call", "line", "return", "exception"):
            found.append((event, -1))
        if frame.f_code.co_filename == __file__ and event == "line":
            found.append((frame.f_code.co_name, frame.f_lineno - frame.f_code.co_firstlineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return found


@TRACES
def test_a_trace_function_that_a_call_sets_and_ends() -> None:
    """It is told of all lines. It is noticed though all is as before at the end."""
    expected = lines_of(loop, 0)
    assert ("loop", 2) in expected
    with watching(executed := Executed()):
        either(0)
        assert sys.gettrace() is None  # code may ask whether a debugger runs
        assert lines_of(loop, 0) == expected
        assert not executed.knows(either.__code__)
    assert read_in(either, executed) == ALL_OF_EITHER
    assert sys.gettrace() is None


@TRACES
def test_one_that_is_set_without_sys() -> None:
    """As tools do that are written in C. The next function that is called shows it, or the end."""
    with watching(executed := Executed()):
        either(0)
        module._set_trace(lambda *_: None)
        either(0)
        module._set_trace(module._trace_nothing)
    assert not executed.knows(either.__code__)
    with watching(executed := Executed()):
        either(0)
        module._set_trace(None)
    assert not executed.knows(either.__code__)


@TRACES
def test_one_that_stays() -> None:
    """A debugger with which the user goes on behind the call."""

    def trace(*_: object) -> None:
        pass

    try:
        with watching(Executed()):
            sys.settrace(trace)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)


@TRACES
@pytest.mark.parametrize("within", [True, False])
def test_a_generator_that_goes_on(within: bool) -> None:
    """A debugger that is started later stops at its lines, too, and gets no event that it does not know."""

    def each() -> Iterator[float]:
        yield CONFIG.first
        yield CONFIG.second
        yield CONFIG.third

    def rest(values: Iterator[float]) -> None:
        for _ in values:
            pass

    unwatched = each()
    next(unwatched)
    expected = lines_of(rest, unwatched)
    with watching(Executed()):
        watched = each()
        next(watched)
        found = lines_of(rest, watched) if within else []
    found = found or lines_of(rest, watched)
    assert found == expected
    assert len([line for line in found if line[0] == "each"]) == 2


@TRACES
def test_other_threads_trace_as_they_like() -> None:
    """A debugger of another thread changes nothing here."""
    found: list[Any] = []

    def other() -> None:
        found.append(sys.gettrace())
        found.append(lines_of(loop, 0))

    with watching(executed := Executed()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        either(0)
        assert executed.knows(either.__code__)
    assert found == [None, lines_of(loop, 0)]
    assert read_in(either, executed) == {"CONFIG.on", "CONFIG.second"}


def test_code_without_the_name_of_a_module() -> None:
    """`exec` may be given variables without `__name__`, or with None."""
    for own in ({"__name__": None}, {}):
        variables: dict[str, Any] = {**own, "CONFIG": SimpleNamespace(scale=1.0)}
        exec(compile("def loss(model, x):\n    return model(x).mean() * CONFIG.scale", __file__, "exec"), variables)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(variables["loss"], model, optimizer, graph="emulate")
        for _ in range(5):
            step(torch.ones(2, 4))
        assert (step.captures, step.replays) == (1, 2)


def test_nothing_is_left_behind() -> None:
    """No trace function and no tool stays, also after an exception."""

    def used() -> list[Any]:
        tools = [sys.monitoring.get_tool(number) for number in range(6)] if sys.version_info >= (3, 12) else []
        return [sys.gettrace(), *tools]

    before = used()
    with pytest.raises(KeyError), watching(Executed()):
        fails(0)
    assert used() == before


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="an instruction is noted once there")
def test_long_loops_end_the_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many instructions, all are taken for executed."""
    monkeypatch.setattr(module, "_MOST", 20)
    with watching(executed := Executed()):
        loop(0)
        assert sys.gettrace() is None
    assert read_in(loop, executed) == {"range", "CONFIG.on", "CONFIG.first", "CONFIG.keys['a']"}


class Trainer:
    """A training loop with a counter that the step reads behind a condition."""

    def __init__(self, model: nn.Module) -> None:
        self.call, self.debug, self.alpha, self.late = 0, False, 1.0, False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        self.step = ampkit.graphed_step(self.loss, model, optimizer, graph="emulate")

    def train(self, calls: int) -> None:
        for _ in range(calls):
            self.call += 1
            self.step(torch.ones(2, 4))

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.debug and self.call % 10 == 0:
            raise KeyError("a mistake")
        loss = model(x).square().mean()
        return loss * self.alpha if self.late else loss


class Counting(nn.Linear):
    """A module with such a counter."""

    calls, debug = 0, False

    def forward(self, x: Tensor) -> Tensor:
        if self.debug and self.calls > 3:
            raise KeyError("a mistake")
        return super().forward(x)


def test_a_counter_behind_a_condition() -> None:
    """R7: it makes no graph of its own for each value, unless the condition is true. Nor does that of a module."""
    trainer = Trainer(model := Counting(4, 2))
    for _ in range(8):
        model.calls += 1
        trainer.train(1)
    assert (trainer.step.captures, trainer.step.replays) == (1, 5)


PACKAGE = """
class Accelerator:
    is_split, syncs, scale, factor = False, True, 1.0, 1.0

    @property
    def weight(self):
        return self.factor

    def backward(self, loss):
        if self.is_split:
            loss = loss * self.syncs
        (loss * self.scale).backward()
"""


@pytest.mark.parametrize("read", ["scale", "factor"])
def test_a_condition_in_a_package(read: str) -> None:
    """R7: what a method of a package reads of its object counts where it is executed, as in code of the user's own."""
    package: dict[str, Any] = {"__name__": "package"}
    exec(compile(PACKAGE, "/lib/site-packages/package/accelerator.py", "exec"), package)
    model, accelerator = nn.Linear(4, 2), package["Accelerator"]()

    def gradients(x: Tensor) -> list[Tensor | None]:
        accelerator.backward(model(x).square().mean() * accelerator.weight)
        return [param.grad for param in model.parameters()]

    graphed = ampkit.graphed(modules=(model,), graph="emulate")(gradients)
    for i in range(8):
        model.zero_grad()
        accelerator.syncs = i % 2 == 0
        graphed(torch.ones(2, 4))
    assert (graphed.captures, graphed.replays) == (1, 5)
    model.zero_grad()
    setattr(accelerator, read, 2.0)
    with pytest.warns(ampkit.CaptureWarning, match=rf"accelerator\.{read} changed from 1\.0 to 2\.0"):
        graphed(torch.ones(2, 4))


def test_while_dynamo_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first watched call of a process imports it, and finders of modules are functions that may be watched."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert original_code(either.__code__) is None


def test_what_is_read_behind_a_condition_that_becomes_true() -> None:
    """R7: the calls behind the change are watched anew, so a later change of what they read is noticed."""
    trainer = Trainer(nn.Linear(4, 2))
    trainer.train(8)
    trainer.late = True
    with pytest.warns(ampkit.CaptureWarning, match=r"self\.late changed from False to True"):
        trainer.train(6)
    trainer.alpha = 2.0
    trainer.train(6)
    assert (trainer.step.captures, trainer.step.replays) == (3, 11)
    trainer.late, trainer.alpha = False, 3.0
    trainer.train(1)
    assert (trainer.step.captures, trainer.step.replays) == (3, 12)


class Lazy:
    """A loss that makes something in its first call, and reads a number in each later one."""

    def __init__(self) -> None:
        self.offset: Tensor | None = None
        self.decay, self.history = 0.5, set[int]()

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if self.offset is None:
            self.offset = torch.zeros(())
        else:
            loss = loss + self.offset * self.decay
        if self.history:
            loss = loss * self.decay
        self.history.add(1)
        return loss


def test_branches_that_the_first_call_does_not_take() -> None:
    """R7: the rehearsal is watched too, so what only later calls read is compared."""
    model, loss = nn.Linear(4, 2), Lazy()
    step = ampkit.graphed_step(loss, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), graph="emulate")
    for _ in range(8):
        step(torch.ones(2, 4))
    assert (step.captures, step.replays) == (1, 5)
    loss.decay = 0.25
    with pytest.warns(ampkit.CaptureWarning, match=r"self\.decay changed from 0\.5 to 0\.25"):
        step(torch.ones(2, 4))


class Keeps:
    """A loss that writes an attribute, which another function of the step reads then."""

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.features = model(x)
        return self.regularized()

    def regularized(self) -> Tensor:
        return self.features.square().mean()


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
def test_what_one_function_writes_and_another_one_reads() -> None:
    """R7: it is no change between calls, so it keeps nothing from being captured."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(Keeps(), model, optimizer, graph="emulate")
    for _ in range(10):
        step(torch.ones(2, 4))
    assert step.captures == 1
    assert step.replays >= 5
