"""What a step changes on the host in each call, and no replay would: it is named, and nothing is silently stale."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic, training_state
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
STATE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    STATE.update(calls=0, losses=[], by_size={}, scale=1.0, aux=[])
    yield
    STATE.clear()


class Net(nn.Module):
    """A layer, and what user code may count in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.calls, self.losses, self.cached, self.last = 0, [], None, [0.0, 0.0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def loss_of(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def counts_in_model(model: Net, x: Tensor) -> Tensor:
    model.calls += 1
    return loss_of(model, x)


def keeps_losses_in_model(model: Net, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    model.losses.append(loss.detach())
    return loss


def counts_in_a_dict(model: Net, x: Tensor) -> Tensor:
    STATE["calls"] += 1
    return loss_of(model, x)


def keeps_losses_in_a_dict(model: Net, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    STATE["losses"].append(loss.detach())
    return loss


def other_branch_each_fourth_call(model: Net, x: Tensor) -> Tensor:
    model.calls += 1
    return loss_of(model, x) * (2.0 if model.calls % 4 == 0 else 1.0)


def ramps(model: Net, x: Tensor) -> Tensor:
    STATE["scale"] = min(1.5, STATE["scale"] + 0.1)
    return loss_of(model, x) * STATE["scale"]


WRITES: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "number of the model": (counts_in_model, r"model.calls \+= 1` - the attribute calls is changed"),
    "list of the model": (keeps_losses_in_model, r"model.losses.append.* - the attribute losses is changed"),
    "number in a dict": (counts_in_a_dict, r"STATE\['calls'\] is changed by each call"),
    "list in a dict": (keeps_losses_in_a_dict, r"STATE\[.losses.\]\.append.*STATE\['losses'\] is changed"),
    "branch": (other_branch_each_fourth_call, "the attribute calls is changed"),
    "ramp": (ramps, "is changed by each call|with 1"),
}


def trained(
    engine: Engine, graph: str, loss_fn: Callable[..., Any], calls: int = 24, **options: Any
) -> tuple[list[Any], Any, Net]:
    """Return losses and state of each call, the step, and its model."""
    torch.manual_seed(0)
    model = Net().to(engine[0])
    if hooks := options.pop("hooks", None):
        hooks(model.fc)
    make = options.pop("optimizer", lambda params: torch.optim.SGD(params, lr=2**-7, fused=True))
    optimizer = make(model.parameters())
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph, **options)
    made = torch.Generator().manual_seed(1)
    history = []
    for _ in range(calls):
        out = step(torch.randn(4, 6, generator=made).to(engine[0]))
        history.append((out.loss, training_state(model, optimizer, step.scaler)))
    return history, step, model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("write", WRITES)
def test_is_named(engine: Engine, write: str) -> None:
    """W1: a counter, a list that grows, a branch of each fourth call: the line is named, all calls are eager's."""
    loss_fn, message = WRITES[write]
    with deterministic():
        eager, _, counted = trained(engine, "off", loss_fn)
        expected = {"calls": counted.calls, "losses": len(counted.losses), "state": STATE["calls"]}
        STATE.update(calls=0, losses=[], scale=1.0)
        with pytest.warns(ampkit.CaptureWarning, match=message):
            graphed, step, model = trained(engine, engine[1], loss_fn, on_failure="eager")
    assert_same(eager, graphed)
    assert step.replays == 0
    assert {"calls": model.calls, "losses": len(model.losses), "state": STATE["calls"]} == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_what_may_stop(engine: Engine) -> None:
    """W1: with host_writes="ignore" the step is captured, and a counter stops."""
    _, step, model = trained(engine, engine[1], counts_in_model, on_failure="raise", host_writes="ignore")
    assert step.replays == 21
    assert model.calls == (4 if engine[0] == "cuda" else 24)  # an emulated replay runs the code again


class Counting(torch.optim.SGD):
    """It counts its steps on the host."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=2**-7, fused=True)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step(closure)


HOOKS: dict[str, Callable[[Any, Callable[..., None]], object]] = {
    "forward hook": lambda layer, count: layer.register_forward_hook(count),
    "hook of a gradient": lambda layer, count: layer.weight.register_hook(count),
    "hook behind a gradient": lambda layer, count: layer.weight.register_post_accumulate_grad_hook(count),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", [*HOOKS, "after_step", "optimizer", "function"])
def test_wherever_it_is(engine: Engine, place: str) -> None:
    """W1: the same in hooks, also those that a backward pass calls, in `after_step`, optimizers, under `graphed`."""

    def count(*_: Any) -> None:
        STATE["calls"] += 1

    if place == "function":
        model = Net().to(engine[0])

        @ampkit.graphed(modules=(model,), graph=engine[1], on_failure="raise")
        def evaluate(x: Tensor) -> Tensor:
            count()
            with torch.no_grad():
                return loss_of(model, x)

        def run() -> None:
            for _ in range(5):
                evaluate(torch.ones(4, 6, device=engine[0]))
    else:
        option: dict[str, Any] = {place: Counting if place == "optimizer" else count}
        if place in HOOKS:
            option = {"hooks": lambda layer: HOOKS[place](layer, count)}
        run = functools.partial(trained, engine, engine[1], loss_of, 6, on_failure="raise", **option)
    with pytest.raises(ampkit.CaptureError, match=r"STATE\['calls'\] is changed|attribute count of its optimizer"):
        run()


def caches(model: Any, x: Tensor) -> Tensor:
    if model.cached is None:
        model.cached = torch.ones(6, device=x.device)
    STATE["by_size"].setdefault(len(x), 2.0)
    return (model(x) * model.cached * STATE["by_size"][len(x)]).square().mean()


def says_once(model: Any, x: Tensor) -> Tensor:
    if not STATE["calls"]:
        STATE["calls"] = 1
    return loss_of(model, x)


def writes_the_same(model: Any, x: Tensor) -> Tensor:
    model.last = [0.5, float(len(x))]
    STATE["scale"] = 1.0
    return loss_of(model, x)


def makes_a_list_anew(model: Any, x: Tensor) -> Tensor:
    STATE["aux"] = []
    out = model(x)
    STATE["aux"].append(out.square().mean())
    return out.abs().mean() + sum(STATE["aux"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss_fn", [caches, says_once, writes_the_same, makes_a_list_anew])
def test_what_is_no_reason(engine: Engine, loss_fn: Callable[..., Any]) -> None:
    """W1: a cache that the first call fills, a message said once, the same value again, a list made anew: captured."""
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("error")
        eager, _, _ = trained(engine, "off", loss_fn)
        STATE.update(calls=0, losses=[], by_size={}, scale=1.0, aux=[])
        graphed, step, _ = trained(engine, engine[1], loss_fn, on_failure="raise")
    assert_same(eager, graphed)
    assert step.replays == 21


def test_wrong_choice() -> None:
    """Another word is an error that names the argument."""
    model = Net()
    with pytest.raises(ValueError, match="host_writes='keep'"):
        ampkit.graphed_step(loss_of, model, torch.optim.SGD(model.parameters(), lr=1e-2), host_writes="keep")


def counts_twice(model: Net, x: Tensor) -> Tensor:
    model.calls += 1
    STATE["calls"] += 1
    return loss_of(model, x)


@pytest.mark.parametrize("engine", ENGINES)
def test_names_of_what_may_stop(engine: Engine) -> None:
    """W1: with names, only these stay as the capture leaves them; what is changed beside them is named."""
    names = ["calls", "STATE['calls']", "count"]
    _, step, _ = trained(engine, engine[1], counts_twice, optimizer=Counting, host_writes=names, on_failure="raise")
    assert step.replays == 21
    for left, message in (
        (names[:1] + names[2:], r"the variable STATE\['calls'\] is changed"),
        (names[1:], "the attribute calls is changed"),
        (names[:2], "changes the attribute count of its optimizer"),
    ):
        STATE.update(calls=0)
        with pytest.warns(ampkit.CaptureWarning, match=message):
            _, step, _ = trained(
                engine, engine[1], counts_twice, optimizer=Counting, host_writes=left, on_failure="eager"
            )
        assert step.replays == 0


def prints(model: Net, x: Tensor) -> Tensor:
    print("a step")
    return loss_of(model, x)


def logs(model: Net, x: Tensor) -> Tensor:
    logging.getLogger("loop").warning("a step")
    return loss_of(model, x)


def prints_once(model: Net, x: Tensor) -> Tensor:
    if not STATE["aux"]:
        STATE["aux"] = [1]
        print("set up")
    return loss_of(model, x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss_fn", [prints, logs], ids=lambda loss_fn: loss_fn.__name__)
def test_a_line_that_prints_is_said_once(engine: Engine, loss_fn: Callable[..., Any]) -> None:
    """W1: a print or a log line of constants is captured, and a message says that replays leave it out."""
    with pytest.warns(ampkit.CaptureWarning, match=r"`.*a step.*` - prints or logs something, which a replay") as said:
        _, step, _ = trained(engine, engine[1], loss_fn, on_failure="raise")
    assert (step.replays, len(said)) == (21, 1)


def test_what_the_first_call_prints_is_no_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """W1: a line that only the first call runs is not said."""
    _, step, _ = trained(("cpu", "emulate"), "emulate", prints_once, on_failure="raise")
    assert step.replays == 21
    assert capsys.readouterr().out == "set up\n"


def test_the_thread_of_tqdm_may_note_the_time() -> None:
    """Inductor starts it, and transformers keeps tqdm where its code looks for settings."""
    tqdm = pytest.importorskip("tqdm")
    bar = tqdm.tqdm([], disable=True)  # any bar starts the thread
    settings = SimpleNamespace(tqdm_lib=tqdm, level=3)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        bar.monitor.woken += 1.0  # as the thread does, at any time
        return model(x).square().mean() * settings.level

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate")
    for _ in range(8):
        step(torch.ones(2, 4))
    assert step.report().failure is None
    assert step.replays > 0
