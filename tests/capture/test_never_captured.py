"""A step that is never captured says so within 32 calls: what keeps changing, with examples, and what to write."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ddp_train
import pytest
import torch
from harness import ENGINES, OPTIMIZERS
from lightning_harness import QUIET, Batches, Net, _silent, fit  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

# Tens of calls in each case, most of them under the preflight.
pytestmark = [*(pytest.mark.filterwarnings(text) for text in QUIET), pytest.mark.slow]

Engine = tuple[str, str]
Call = Callable[[int], object]  # does the call of this number, counted from 0
CPU = ("cpu", "emulate")
CALLS = 40


def loss_fn(model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return model(x).square().mean()


def make(engine: Engine, optimizer: str = "adamw", **options: Any) -> tuple[ampkit.GraphedStep, Any, Any]:
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Linear(4, 4).to(engine[0])
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = options.pop("scheduler", None)
    options = {"graph": engine[1], "scheduler": scheduler and scheduler(made), **options}
    return ampkit.graphed_step(options.pop("loss_fn", loss_fn), model, made, **options), model, made


def told(call: Call, calls: int = CALLS) -> list[tuple[int, str]]:
    """Return the warnings of this many calls, each with the number of its call, beginning with 1."""
    found = []
    for i in range(calls):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(i)
        found += [(i + 1, str(w.message)) for w in caught if issubclass(w.category, ampkit.CaptureWarning)]
    return found


# ------------------------------------------------------------------------------------------------------ what is varied


class Averaging(nn.Module):
    """Replaces a buffer in each call by one of another shape, which drops all graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, 4) if self.mean.ndim == 1 else (4,)
        self.mean = (0.9 * self.mean + 0.1 * x.detach().mean(0)).reshape(shape)
        return self.linear(x) - self.mean


class Meta:
    """An object that a batch may contain beside tensors."""


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=1000)


def argument_of_a_function(engine: Engine, **options: Any) -> tuple[Any, Call]:
    model = nn.Linear(4, 4).to(engine[0])
    function = ampkit.graphed(modules=(model,), graph=engine[1], **options)(lambda x, power: model(x) ** 2)
    x = torch.ones(2, 4, device=engine[0])
    return function, lambda i: function(x, i)


def weight_decay(engine: Engine, **options: Any) -> tuple[Any, Call]:
    step, _, optimizer = make(engine, **options)
    x = torch.ones(2, 4, device=engine[0])

    def call(i: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 1e-4 * i
        step(x)

    return step, call


def momentum_of_the_second_optimizer(engine: Engine, **options: Any) -> tuple[Any, Call]:
    modules = nn.Linear(4, 4).to(engine[0]), nn.Linear(4, 4).to(engine[0])
    optimizers = [OPTIMIZERS["sgd"](module.parameters()) for module in modules]

    @ampkit.graphed(modules=modules, optimizers=optimizers, graph=engine[1], **options)
    def train(x: Tensor) -> Tensor:
        loss = modules[1](modules[0](x)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    x = torch.ones(2, 4, device=engine[0])

    def call(i: int) -> None:
        optimizers[1].param_groups[0]["momentum"] = 0.9 - 0.001 * i
        train(x)

    return train, call


def calling(call: Callable[[Any, Tensor, int], object], **made: Any) -> Callable[..., tuple[Any, Call]]:
    """Return what makes a step, and what calls it with a tensor and the number of the call."""

    def case(engine: Engine, **options: Any) -> tuple[Any, Call]:
        model = {"model": made["model"]().to(engine[0])} if "model" in made else {}
        step, _, _ = make(engine, **{**made, **model}, **options)
        x = torch.ones(2, 4, device=engine[0])
        return step, lambda i: call(step, x, i)

    return case


class Case(NamedTuple):
    """A step for which something varies from call to call.

    Attributes:
        make: makes the step with its options, and what calls it.
        words: of the error.
        named: what the report calls it.
        warning: words of the warning, where they are not those of the error.
    """

    make: Callable[..., tuple[Any, Call]]
    words: list[str]
    named: str
    warning: tuple[str, ...] = ()


NUMBER = "Pass a number that varies as a tensor, torch.tensor(x{where}), or take it out of the batch"
KEPT = "Each of these 32 variants takes 3 eager calls and a graph of its own, and at most 16 are kept. "
CYCLED = "OneCycleLR and CyclicLR change it in every step, unless they get cycle_momentum=False."
IN_PLACE = "Graphs stay valid if memory is written to in place instead (copy_, add_)."
MOMENTUM, BETAS = "param_groups[0]['momentum']", "param_groups[0]['betas']"
DECAY, SECOND = "param_groups[0]['weight_decay']", "optimizers[1].param_groups[0]['momentum']"
CASES: dict[str, Case] = {
    "number": Case(
        calling(lambda step, x, i: step(x, step=i)),
        ["batch['step'] kept changing (it was 29, then 30, then 31). ", KEPT, NUMBER],
        "batch['step']",
    ),
    "number by position": Case(
        calling(lambda step, x, i: step(x, 0.5 * i)),
        ["batch[1] kept changing (it was 14.5, then 15.0, then 15.5). ", NUMBER],
        "batch[1]",
    ),
    "number of a window": Case(
        calling(lambda step, x, i: step(x, step=i // 2), accumulate=2),
        ["batch['step'] kept changing (it was 13, then 14, then 15). ", NUMBER],
        "batch['step']",
    ),
    "number that stays for two calls": Case(
        calling(lambda step, x, i: step(x, step=i // 2)),
        ["batch['step'] kept changing (it was 13, then 14, then 15). Each of these 16 variants takes 3 eager calls "],
        "batch['step']",
    ),
    "argument of a function": Case(
        argument_of_a_function, ["batch[1] kept changing (it was 29, then 30, then 31). ", NUMBER], "batch[1]"
    ),
    "text": Case(
        calling(lambda step, x, i: step(x, name=f"image{i}.png")),
        [
            "batch['name'] kept changing (it was 'image29.png', then 'image30.png', then 'image31.png'). ",
            "Take batch['name'] out of the batch that you pass to the step",
        ],
        "batch['name']",
    ),
    "nested text": Case(
        calling(
            lambda step, x, i: step({"x": x, "meta": [{"id": f"a{i}"}, 3]}),
            loss_fn=lambda model, batch: loss_fn(model, batch["x"]),
        ),
        ["batch[0]['meta'][0]['id'] kept changing (it was 'a29', then "],
        "batch[0]['meta'][0]['id']",
    ),
    "object of the user's": Case(
        calling(lambda step, x, i: step(x, meta=Meta())),
        [
            "batch['meta'] kept changing (it was a Meta, then a Meta",
            "Pass the tensors that the step reads from batch['meta'], and not the Meta itself.",
        ],
        "batch['meta']",
    ),
    "structure": Case(
        calling(lambda step, x, i: step(x, boxes=[x] * i)),
        [
            "the structure of the batch kept changing (it was one of 30 leaves, then one of 31 leaves, then ",
            "stack or pad a list of tensors to one tensor",
        ],
        "the structure of the batch",
    ),
    "shapes": Case(
        calling(lambda step, x, i: step(x[:1].expand(i + 1, 4).contiguous())),
        [
            "batch[0] kept changing (it was (30, 4) float32 on {device}, then (31, 4) float32 on {device}, then ",
            KEPT,
            "Pad to a few shapes with ampkit.Buckets, leave out a short last batch (DataLoader(..., drop_last=True)), "
            "or keep more graphs (max_graphs, memory_budget).",
        ],
        "batch[0]",
    ),
    "more shapes than graphs are kept": Case(
        calling(lambda step, x, i: step(x[:1].expand(i % 12 + 1, 4).contiguous()), max_graphs=4),
        ["batch[0] kept changing", "Each of these 12 variants", "and at most 4 are kept", "max_graphs"],
        "batch[0]",
    ),
    "shapes that are captured and dropped": Case(
        calling(lambda step, x, i: step(x[:1].expand(i // 4 + 1, 4).contiguous()), max_graphs=2),
        ["batch[0] kept changing", "Each of these 8 variants", "and at most 2 are kept", "max_graphs"],
        "batch[0]",
    ),
    "momentum of OneCycleLR": Case(
        calling(lambda step, x, i: step(x), optimizer="sgd", scheduler=one_cycle),
        [f"{MOMENTUM} kept changing (it was 0.9", CYCLED],
        MOMENTUM,
        (f"{MOMENTUM} changed from 0.95 to 0.94", "Each new value takes 3 eager steps and a new capture; ", CYCLED),
    ),
    "betas of OneCycleLR": Case(
        calling(lambda step, x, i: step(x), scheduler=one_cycle),
        [f"{BETAS} kept changing (it was (0.9", CYCLED],
        BETAS,
        (f"{BETAS} changed from (0.95, 0.999) to (0.94", CYCLED),
    ),
    "momentum of the second optimizer": Case(
        momentum_of_the_second_optimizer,
        [f"{SECOND} kept changing (it was 0.87", CYCLED],
        SECOND,
        (f"{SECOND} changed from 0.9 to 0.899", CYCLED),
    ),
    "weight decay": Case(
        weight_decay,
        [f"{DECAY} kept changing (it was 0.0029", "Of a param group, only lr may change without a new graph."],
        DECAY,
        (f"{DECAY} changed from 0.0 to 0.0001.", "Of a param group, only lr may change without a new graph."),
    ),
    "replaced buffer": Case(
        calling(lambda step, x, i: step(x), model=Averaging),
        ["because model.mean was replaced again and again. ", IN_PLACE],
        "model.mean was replaced",
        ("model.mean was replaced. Each such change", IN_PLACE),
    ),
}


def filled(words: list[str], engine: Engine) -> list[str]:
    device = "cpu" if engine[0] == "cpu" else "cuda:0"
    where = "" if engine[0] == "cpu" else ", device='cuda:0'"
    return [word.replace("{where}", where).replace("{device}", device) for word in words]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_what_varies_is_named_once(engine: Engine, case: str) -> None:
    """R9: one warning within 32 calls says what keeps changing, with values, and what to write; so does the report."""
    varying, words, named, warning = CASES[case]
    step, call = varying(engine)
    found = told(call, 50)
    assert len(found) == 1, found
    ((when, message),) = found
    assert when <= 32
    for word in filled([*(warning or words)], engine):
        assert word in message
    report = step.report()
    for word in filled(words, engine)[:1]:
        assert word in str(report.failure)
    assert str(report.failure).startswith("no graph was replayed in the last 32 calls, because ")
    assert report.replays == report.captures
    because = [count for reason, count in report.eager.items() if reason.startswith("warm-up: ") and named in reason]
    assert sum(because) + report.replays >= 50 - 31
    assert len([reason for reason in report.eager if named in reason]) <= 1
    assert f"not captured: {report.failure}" in str(report)


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(6)
def test_what_varies_is_an_error(engine: Engine, case: str) -> None:
    """R9: with on_failure="raise" it is a CaptureError at the 32nd call, which has not done its step."""
    varying, words, _, _ = CASES[case]
    _, call = varying(engine, on_failure="raise")
    for i in range(31):
        call(i)
    with pytest.raises(ampkit.CaptureError) as raised:
        call(31)
    for word in filled(words, engine):
        assert word in str(raised.value)


LOOKS = {
    "number": 1,
    "number by position": 1,
    "argument of a function": 1,
    "text": 1,
    "structure": 1,
    "shapes": 1,
    "momentum of OneCycleLR": 1,
    "weight decay": 1,
    "replaced buffer": 2,
}


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", LOOKS)
@pytest.mark.sampled(3)
def test_what_varies_is_hardly_looked_at(engine: Engine, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W8: a call is looked at by a dispatch mode: the first one, and another one if the step changes what varies."""
    looked = []
    forward = nn.Linear.forward

    def noted(self: nn.Linear, x: Tensor) -> Tensor:
        looked.append(bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", noted)
    _, call = CASES[case].make(engine, host_writes="ignore")
    for i in range(100):
        call(i)
    assert len(looked) == 100
    assert sum(looked) == LOOKS[case]
    assert looked[0]


def test_an_error_ends_where_the_batch_does_not_vary_any_more() -> None:
    """R9: the step of the call that raises is not done; calls after it that do not vary are captured."""
    step, model, _ = make(CPU, on_failure="raise")
    x = torch.ones(2, 4)
    for i in range(31):
        step(x, step=i)
    before = model.weight.detach().clone()
    with pytest.raises(ampkit.CaptureError):
        step(x, step=31)
    assert torch.equal(model.weight, before)
    for _ in range(8):
        step(x)
    assert (step.captures, step.replays) == (1, 5)
    assert step.report().failure is None


def test_a_replay_ends_it() -> None:
    """R9: once calls are replayed, the report has no failure any more. The reason of the warm-up stays.

    Calls are looked at less and less often while each look finds something new, up to one in 64.
    """
    step, _, _ = make(CPU)
    x = torch.ones(2, 4)
    assert len(told(lambda i: step(x, step=i))) == 1
    for _ in range(26):
        step(x)
    report = step.report()
    assert (report.captures, report.replays, report.failure) == (1, 3, None)
    assert report.eager == {"warm-up": 31, "warm-up: batch['step'] kept changing": 40 + 26 - 31 - 3}


def test_a_growth_interval_that_varies() -> None:
    """R9: a setting of the loss scale belongs to the key of a graph. The first message says nothing of replays."""
    step, _, _ = make(CPU, policy="float16")
    x = torch.ones(2, 4)

    def call(i: int) -> None:
        step.scaler.set_growth_interval(1000 + i)
        step(x)

    found = told(call, 80)
    assert [when for when, _ in found] == [2, 32]
    assert "the scaler's growth_interval changed from 1000 to 1001" in found[0][1]
    assert "the scaler's growth_interval kept changing (it was 1029, then 1030, then 1031)" in found[1][1]
    assert step.report().replays == 0


def test_two_things_that_vary() -> None:
    """R9: the message names what has many values, not what has few: three leaves, and the number of the others."""
    step, _, _ = make(CPU)

    def call(i: int) -> None:
        names = [f"{i}-{k}.png" for k in range(6)]
        step(torch.ones(i + 1, 4), names=names, scale=i % 2)

    ((_, message),) = told(call)
    assert "batch[0] kept changing (it was (30, 4)" in message
    assert "batch['names'][0] kept changing (it was '29-0.png', then '30-0.png', then '31-0.png')" in message
    assert "and batch['names'][1] kept changing (it was '29-1.png'" in message
    assert ", and 4 more. Each of these 32 variants" in message
    assert "scale" not in message
    assert "ampkit.Buckets" in message
    assert "Take batch['names'][0] out of the batch" in message


def test_hundreds_of_inputs_between_replays() -> None:
    """R9: if every second call is a replay, a warning comes after 256 inputs, once, and no error."""
    step, _, _ = make(CPU, on_failure="raise")
    x = torch.ones(2, 4)
    found = told(lambda i: step(x, step=0 if i % 2 else i), 560)
    assert len(found) == 1
    ((when, message),) = found
    assert 512 < when < 520
    assert "there were 256 different inputs so far, because batch['step'] kept changing (it was 5" in message
    assert NUMBER.format(where="") in message
    assert step.report().failure is None


def test_few_replays_among_many_calls() -> None:
    """R9: one replay in 50 calls does not hide that the others never come to one."""
    step, _, _ = make(CPU, max_graphs=2)
    x = torch.ones(2, 4)
    for _ in range(5):
        step(x)
    found = told(lambda i: step(x) if i % 50 == 49 else step(torch.ones(i % 50 + 3, 4)), 101)
    assert len(found) == 1
    assert found[0][0] == 32
    assert "batch[0] kept changing" in found[0][1]
    assert (step.captures, step.replays) == (1, 4)


# ------------------------------------------------------------------------------------------------------ what is silent


def calls_of(step: Any, inputs: Iterator[tuple[tuple[Any, ...], dict[str, Any]]]) -> Call:
    def call(i: int) -> None:
        args, kwargs = next(inputs)
        step(*args, **kwargs)

    return call


def sized(sizes: Iterator[int]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    return (((torch.ones(size, 4),), {}) for size in sizes)


def named(names: Iterator[Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    return (((torch.ones(2, 4),), {"name": name}) for name in names)


def drawn(weights: list[int], seed: int = 0) -> Iterator[int]:
    """Yield indices at random, by their weights."""
    made = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.multinomial(torch.tensor(weights, dtype=torch.float), 1, generator=made))


def blocks(values: list[Any], length: int) -> Iterator[Any]:
    return itertools.cycle(value for value in values for _ in range(length))


SLOW: dict[str, tuple[dict[str, Any], Callable[[], Any], int]] = {
    "a long warm-up": ({"warmup": 50}, lambda: sized(itertools.repeat(2)), 60),
    "a long warm-up of three shapes": ({"warmup": 50}, lambda: sized(itertools.cycle([2, 3, 4])), 160),
    "a long warm-up of seven, for one graph": (
        {"warmup": 20, "max_graphs": 1},
        lambda: sized(blocks([*range(1, 8)], 15)),
        120,
    ),
    "a long warm-up with rare other shapes": (
        {"warmup": 50},
        lambda: sized(index + 2 for index in drawn([600] + [10] * 40)),
        90,
    ),
    "as many shapes as are kept, in turn": ({}, lambda: sized(itertools.cycle(range(1, 17))), 100),
    "as many shapes as are kept, sorted": ({}, lambda: sized(blocks([*range(1, 17)], 2)), 140),
    "as many shapes as are kept, at random": ({}, lambda: sized(i + 1 for i in drawn([1] * 16)), 120),
    "many shapes where more are kept": ({"max_graphs": 64}, lambda: sized(itertools.cycle(range(1, 35))), 145),
    "names that come back": ({}, lambda: named(itertools.cycle("abcdefghij")), 60),
    "names in blocks": ({}, lambda: named(blocks([*"abcdefghij"], 4)), 90),
    "shapes in a window": ({"accumulate": 4, "warmup": 11}, lambda: sized(i + 1 for i in drawn([1] * 3)), 150),
    "shapes of a curriculum": ({}, lambda: sized(i // 6 + 1 for i in itertools.count()), 150),
}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.sampled(6)
def test_a_slow_warm_up_is_silent(slow: str) -> None:
    """R9: inputs that come back are captured in the end, so there is neither warning nor error."""
    options, inputs, calls = SLOW[slow]
    step, _, _ = make(CPU, on_failure="raise", **options)
    assert told(calls_of(step, inputs()), calls) == []
    report = step.report()
    assert report.replays > report.captures
    assert report.failure is None
    assert set(report.eager) == {"warm-up"}


def test_a_setting_that_goes_back_and_forth_is_no_error() -> None:
    """R9: a setting that alternates from call to call has two graphs. One warning says what the first change costs."""
    step, _, _ = make(CPU, on_failure="raise")
    before = torch.backends.cudnn.benchmark

    def call(i: int) -> None:
        torch.backends.cudnn.benchmark = bool(i % 2)
        step(torch.ones(2, 4))

    try:
        ((when, message),) = told(call, 100)
    finally:
        torch.backends.cudnn.benchmark = before
    assert when == 2
    assert "torch.backends.cudnn.benchmark changed from False to True. Each new value takes 3 eager" in message
    assert (step.captures, step.replays) == (2, 94)


def test_a_change_that_was_said_long_ago_does_not_silence_the_next() -> None:
    """R9: a hyperparameter that changed once was named then; when it changes in each call, it is named again."""
    step, _, optimizer = make(CPU)
    x = torch.ones(2, 4)

    def call(i: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.0 if i < 10 else 0.1 if i < 50 else 0.1 + 0.001 * i
        step(x)

    found = told(call, 120)
    assert [when for when, _ in found] == [11, 50 + 32]
    assert "weight_decay'] changed from 0.0 to 0.1. Each new value" in found[0][1]
    assert "weight_decay'] kept changing (it was 0.179, then 0.18, then 0.181)" in found[1][1]


def test_a_replay_begins_a_new_count() -> None:
    """R9: there is no warning after 31 calls that vary, a replay, and 31 more, for 32 in a row are needed."""
    step, _, _ = make(CPU, on_failure="raise")
    x, numbers = torch.ones(2, 4), itertools.count(1)
    for _ in range(5):
        step(x, step=0)
    for _ in range(3):
        assert told(lambda i: step(x, step=next(numbers)), 31) == []
        step(x, step=0)
    assert told(lambda i: step(x, step=next(numbers)), 31) == []
    with pytest.raises(ampkit.CaptureError, match=r"batch\['step'\] kept changing"):
        step(x, step=next(numbers))


@pytest.mark.parametrize(
    ("graph", "on_failure", "said"),
    [("off", "parts", []), ("emulate", "eager", [".item()"]), ("emulate", "parts", [".item()", "kept changing"])],
)
def test_where_nothing_is_to_be_captured(graph: str, on_failure: str, said: list[str]) -> None:
    """R9: with graph="off", and where capture was given up for another reason, a batch may vary.

    The graph of an update alone would be captured for each variant, so there the user learns of them.
    """
    reads = graph == "emulate"

    def reading(model: nn.Module, x: Tensor, **_: Any) -> Tensor:
        loss = model(x).square().mean()
        return loss * 1.0 if not reads or float(loss.detach()) >= 0 else loss

    step, _, _ = make(("cpu", graph), loss_fn=reading, on_failure=on_failure)
    x = torch.ones(2, 4)
    found = told(lambda i: step(x, step=max(0, i - 4)), 80)
    assert len(found) == len(said)
    assert all(text in message for text, (_, message) in zip(said, found, strict=True))


def test_replays_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9: a replayed call does not call `Variation`."""
    step, _, _ = make(CPU)
    x = torch.ones(2, 4)
    for _ in range(5):
        step(x)

    def unexpected(*_: Any) -> None:
        raise AssertionError("a replay told of itself")

    for name in ("note", "follow", "explain", "restart"):
        monkeypatch.setattr(f"ampkit._capture.engine.variation.Variation.{name}", unexpected)
    for _ in range(50):
        step(x)
    assert step.replays == 52


def test_closing_begins_a_new_count() -> None:
    """R9: a step that is closed again and again warms up each time, which the caller asked for."""
    step, _, _ = make(CPU, on_failure="raise")
    for i in range(100):
        step(torch.ones(2, 4), step=i)
        if i % 20 == 19:
            step.close()
    assert step.captures == 0


# ------------------------------------------------------------------------------------------------------------ Lightning


class OfDicts(Net):
    """Takes its batches as dicts, of which it reads x and y."""

    weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class Weighted(OfDicts):
    """Reads a number that is another one in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 + batch_idx // 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * F.cross_entropy(self.net(batch["x"]), batch["y"])


def dicts(**more: Callable[[int], Any]) -> Batches:
    made = torch.Generator().manual_seed(0)
    return Batches(
        {
            "x": torch.randn(8, 8, generator=made),
            "y": torch.randint(4, (8,), generator=made),
            **{name: value(i) for name, value in more.items()},
        }
        for i in range(60)
    )


def cycled() -> Net:
    return OfDicts(scheduler=lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.01, 200), interval="step")


IN_A_TRAINER: dict[str, tuple[Any, Any, str, str]] = {
    "number": (OfDicts, lambda: dicts(id=lambda i: i), "batch['id'] kept changing (it was 29, then 30, ", NUMBER),
    "text": (
        OfDicts,
        lambda: dicts(meta=lambda i: [{"file": f"{i}.png"}]),
        "batch['meta'][0]['file'] kept changing (it was '29.png', then ",
        "Take batch['meta'][0]['file'] out of the batch",
    ),
    "number of the module": (
        Weighted,
        dicts,
        "the attribute model.weight kept changing (it was 14.0, then 15.0, then 16.0)",
        "Graphs read a number that changes if it is in a buffer and is changed there in place (fill_).",
    ),
    "betas": (cycled, dicts, "param_groups[0]['betas'] kept changing (it was (0.9", CYCLED),
}


@pytest.mark.parametrize("what", IN_A_TRAINER)
@pytest.mark.sampled(2)
def test_a_trainer(what: str, tmp_path: Path) -> None:
    """R9: in a Trainer, messages call the whole batch `batch`. One warning and the report name what varies."""
    make_module, data, changing, advice = IN_A_TRAINER[what]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(
            tmp_path, "cpu", "emulate", make=make_module, data=data(), max_epochs=1, options={"on_failure": "eager"}
        )
    messages = [str(w.message) for w in caught if issubclass(w.category, ampkit.CaptureWarning)]
    if what == "number of the module":  # of which a first change is told, too
        assert "the attribute model.weight changed from 1.0 to 2.0" in messages.pop(0)
    (message,) = messages
    assert message.startswith("AmpkitCallback: ")
    assert advice.format(where="") in message
    assert changing.partition(" kept")[0] in message
    assert run.report.replays == 0
    assert changing in run.report.failure


@pytest.mark.filterwarnings(
    "ignore:Trying to infer the .batch_size:UserWarning"
)  # Lightning's, of the batch with a number
@pytest.mark.filterwarnings("ignore:AmpkitCallback. param_groups.0...betas..")
@pytest.mark.filterwarnings("ignore:AmpkitCallback. the attribute model.weight changed")
@pytest.mark.parametrize("what", IN_A_TRAINER)
@pytest.mark.sampled(2)
def test_a_trainer_that_is_to_fail(what: str, tmp_path: Path) -> None:
    """R9: with on_failure="raise" the fit ends in the 32nd batch."""
    make_module, data, changing, advice = IN_A_TRAINER[what]
    batches = data()
    with pytest.raises(ampkit.CaptureError) as raised:
        fit(tmp_path, "cpu", "emulate", make=make_module, data=batches, max_epochs=1)
    assert changing in str(raised.value)
    assert advice.format(where="") in str(raised.value)
    assert batches.state_dict() == {"at": 32}


# ------------------------------------------------------------------------------------------------------------ two ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(0, id="from the start", marks=pytest.mark.ranks),
        pytest.param(10, id="after the capture"),
        pytest.param(50, id="after the last vote", marks=pytest.mark.ranks),
    ],
)
def test_two_ranks_end_together(first: int) -> None:
    """R9: a number that varies on rank 1 alone raises on both ranks in the same call, and neither waits for ever."""
    options = ["--device", "cpu", "--model", "mlp", "--graph", "emulate", "--calls", "150", "--on-failure", "raise"]
    rows = [row["emulate"] for row in ddp_train.launch(*options, "--varies-from", str(first), timeout=60, forked=True)]
    assert [len(row["losses"]) for row in rows] == [first + 31] * 2
    assert rows[0]["parameters"] == rows[1]["parameters"]
    assert "another rank found that its step cannot be captured" in rows[0]["raised"]
    assert "no graph was replayed in the last 32 calls, because batch[3] kept changing" in rows[1]["raised"]


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_go_on() -> None:
    """R9: without on_failure="raise" rank 1 warns, and both train on with equal weights."""
    options = ["--device", "cpu", "--model", "mlp", "--graph", "emulate", "--calls", "60"]
    rows = [row["emulate"] for row in ddp_train.launch(*options, "--varies-from", "10", timeout=60, forked=True)]
    assert rows[0]["parameters"] == rows[1]["parameters"]
    assert rows[0]["messages"] == []
    assert [re.findall(r"batch\[\d\] kept changing", message) for message in rows[1]["messages"]] == [
        ["batch[3] kept changing"]
    ]
