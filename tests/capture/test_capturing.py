"""Code that asks whether it is being captured, and has a branch that a graph cannot contain."""

import random
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import ENGINES, answering, assert_same, deterministic, seeing_capture, training_state
from torch import Tensor, nn

import ampkit

pytestmark = pytest.mark.usefixtures("no_device_is_needed")

asks = torch.cuda.is_current_stream_capturing  # imported by name, before any capture
QUESTIONS = {
    "is_compiling": torch.compiler.is_compiling,
    "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
    "torch._dynamo": torch._dynamo.is_compiling,
}


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    """The generators of Python and numpy are left as they were."""
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


class Masked(nn.Module):
    """Leaves out padding on the host, which waits for the device, unless it is told that it is being captured.

    As transformers does with a padding mask, with other last bits in each branch.
    """

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.checkpointed = checkpointed
        self.told: list[bool] = []

    def branch(self, x: Tensor) -> Tensor:
        self.told.append(asks())
        hidden = self.inner(x)
        if self.told[-1]:
            return torch.tanh(hidden) * 0.75
        return torch.sigmoid(hidden) if float((hidden > -100).all()) else x

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return self.last(torch.utils.checkpoint.checkpoint(self.branch, x, use_reentrant=False))
        return self.last(self.branch(x))


class Hopeless(Masked):
    """Waits for the device in both branches, draws random numbers everywhere, and changes its input and a buffer."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__(checkpointed)
        self.register_buffer("calls", torch.zeros(()))

    def branch(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        self.calls.add_(1)
        hidden = super().branch(x)
        hidden = nn.functional.dropout(hidden, 0.3) * float(torch.rand([])) * random.random() * np.random.rand()
        return hidden if float(x.isfinite().all()) else x


class Raising(Hopeless):
    """Its other branch raises, behind all that it changes, as Autoformer of transformers 5.17 does."""

    def branch(self, x: Tensor) -> Tensor:
        hidden = super().branch(x)
        return hidden.view(7) if self.told[-1] else hidden


class Deaf(Masked):
    """Waits for the device, and does not ask."""

    def branch(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return torch.sigmoid(hidden) if float((hidden > -100).all()) else x


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(
    engine: tuple[str, str], kind: type[Masked] = Masked, calls: int = 9, **options: Any
) -> tuple[list[Any], ampkit.GraphedStep, Masked, list[str]]:
    """Return loss and state after each call, the step, its model, and the warnings."""
    device, graph = engine
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = kind(options.pop("checkpointed", False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-5, fused=True)
    history = []
    with warnings.catch_warnings(record=True) as caught, deterministic():
        warnings.simplefilter("always")
        step = ampkit.graphed_step(mean, model, optimizer, graph=graph, **options, host_writes="ignore")
        for i in range(calls):
            x = torch.linspace(-1, 1, 24, device=device).reshape(4, 6) + i / 8
            history.append((step(x).loss, x, training_state(model, optimizer, step.scaler)))
    return history, step, model, [str(w.message) for w in caught if issubclass(w.category, ampkit.CaptureWarning)]


def by_hand(engine: tuple[str, str], answers: list[bool], checkpointed: bool = False) -> list[Any]:
    """Return the same of eager steps, with these answers."""
    device, _ = engine
    torch.manual_seed(0)
    model = Masked(checkpointed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-5, fused=True)
    step = ampkit.graphed_step(mean, model, optimizer, graph="off", capturing=False, host_writes="ignore")
    history = []
    with deterministic():
        for i, answer in enumerate(answers):
            x = torch.linspace(-1, 1, 24, device=device).reshape(4, 6) + i / 8
            call = seeing_capture(step, answer)
            history.append((call(x).loss, x, training_state(model, optimizer, step.scaler)))
    return history


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_other_branch_is_captured(engine: tuple[str, str], checkpointed: bool) -> None:
    """R2: one warning names line and call; the bits are those of eager with False before it, with True from it on."""
    history, step, _, messages = trained(engine, checkpointed=checkpointed)
    report = step.report()
    assert report.told_since == 3
    assert_same(history, by_hand(engine, [False, False, *[True] * 7], checkpointed))
    assert (step.captures, step.replays) == (1, 5)
    assert report.failure is None
    assert "from call 3 on, code that asks whether it is being captured is told so" in str(report)
    (message,) = messages
    assert "test_capturing.py:" in message
    assert "From call 3 on the answer is True, in eager calls too" in message
    assert "capturing=True" in message


@pytest.mark.parametrize("question", QUESTIONS, ids=QUESTIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_code_that_asks_whether_it_is_compiled(
    engine: tuple[str, str], question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: it is told the same, also where it has imported the function by name, and in calls without a graph."""
    monkeypatch.setattr(sys.modules[__name__], "asks", QUESTIONS[question])
    history, step, _, (message,) = trained(engine)
    assert step.report().told_since == 3
    assert_same(history, by_hand(engine, [False, False, *[True] * 7]))
    assert (step.captures, step.replays) == (1, 5)
    assert "torch.compiler.is_compiling() took a branch" in message
    expected = by_hand(engine, [True] * 9)
    for graph in ("off", engine[1]):
        assert_same(trained((engine[0], graph), capturing=True)[0], expected)
    assert not QUESTIONS[question]()


def test_torch_and_compiled_code_are_told_by_torch() -> None:
    """D2: torch's own code is told the truth; compiled code that asks is not compiled again in a capture."""
    torchs = types.ModuleType("torch.something")
    exec("import torch\ndef ask(): return torch.compiler.is_compiling()", vars(torchs))
    told: list[tuple[bool, bool]] = []

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return x * 2.0 if torch.compiler.is_compiling() else x

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        told.append((torch.compiler.is_compiling(), torchs.ask()))
        return model(compiled(x)).square().mean()

    for capturing in (True, False):
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        options: dict[str, Any] = {"graph": "emulate", "on_failure": "raise", "host_writes": "ignore"}
        step = ampkit.graphed_step(loss_fn, model, optimizer, capturing=capturing, **options)
        for _ in range(6):
            step(torch.ones(4, 6))
        assert step.replays == 3
        assert set(told) == {(capturing, False)}
        told.clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("engine", ENGINES)
def test_true_from_the_first_call(engine: tuple[str, str]) -> None:
    """R2: capturing=True takes that branch in all calls, without a warning, also where nothing is captured."""
    expected = by_hand(engine, [True] * 9)
    history, step, _, messages = trained(engine, capturing=True)
    assert_same(history, expected)
    assert (step.replays, messages, step.report().told_since) == (6, [], None)
    history, step, _, _ = trained((engine[0], "off"), capturing=True)
    assert_same(history, expected)
    assert step.replays == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_false_stays_eager(engine: tuple[str, str]) -> None:
    """R2: capturing=False keeps the bits of torch alone; the message names the line."""
    history, step, model, messages = trained(engine, capturing=False)
    assert_same(history, by_hand(engine, [False] * 9))
    assert step.replays == 0
    assert not any(model.told)
    assert "test_capturing.py:" in messages[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Hopeless, Raising, Deaf])
def test_where_no_branch_can_be_captured(engine: tuple[str, str], kind: type[Masked]) -> None:
    """The message is that of the branch that eager takes, and all steps have its bits: the second look is undone."""
    history, step, model, messages = trained(engine, kind)
    expected, *_ = trained((engine[0], "off"), kind, capturing=False)
    assert_same(history, expected)
    assert step.replays == 0
    report = step.report()  # the update of the parameters is a graph, behind the eager branch
    assert (report.parts, report.in_parts + sum(report.eager.values())) == ((), 9)
    assert len(messages) == 1
    assert "test_capturing.py:" in messages[0]
    assert step.report().told_since is None
    assert sum(model.told) <= 1  # the call of the second look
    assert not any(model.told[3:])


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_told_so_again_after_a_change(engine: tuple[str, str]) -> None:
    """R2: where graphs are dropped, since memory was replaced, the answer stays True."""
    device, graph = engine
    model = Masked().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    step = ampkit.graphed_step(mean, model, optimizer, graph=graph, host_writes="ignore")
    x = torch.ones(4, 6, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for _ in range(7):
            step(x)
        model.inner.weight.data = model.inner.weight.data.clone()
        del model.told[:]
        for _ in range(7):
            step(x)
    assert all(model.told)
    assert step.captures == 2


def test_what_it_may_be() -> None:
    """A ValueError names the argument and what came."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"graphed_step\(capturing='yes'\).*'auto', True or False"):
        ampkit.graphed_step(
            mean, model, torch.optim.SGD(model.parameters(), lr=0.1), capturing="yes", host_writes="ignore"
        )


def test_sync_batch_norm_takes_one_branch() -> None:
    """SyncBatchNorm of torch asks too. In what a graph is made of it takes the branch of a capture, eagerly as well."""
    scope: dict[str, Any] = {"__name__": "torch.nn.modules._functions", "asks": asks}
    exec("def ask(): return asks()", scope)
    for answer in (True, False):
        with answering(answer):  # of a preflight, a rehearsal, or a capture
            assert scope["ask"]() is True
    assert scope["ask"]() is False
    scope["__name__"] = "torch.optim.optimizer"
    with answering(True):
        assert scope["ask"]() is False
