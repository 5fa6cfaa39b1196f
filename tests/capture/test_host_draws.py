"""Draws of the host that only feed comparisons: each outcome is a graph of its own, or an eager step."""

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from harness import ENGINES, assert_same, marked_line, training_state
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
Decide = Callable[[float], bool]

DECISIONS: dict[str, Decide] = {
    "rand([]) < p": lambda p: bool(torch.rand([]) < p),
    "p > rand(1)": lambda p: bool(p > torch.rand(1)),
    "not rand(()) >= p": lambda p: not torch.rand(()) >= p,
    "bernoulli": lambda p: bool(torch.bernoulli(torch.tensor(p))),
    "bernoulli of full": lambda p: bool(torch.bernoulli(torch.full((), p)) == 1),
    "uniform_": lambda p: bool(torch.empty([]).uniform_(0, 1) < p),
    "randint": lambda p: torch.randint(0, 3, ()).item() == 0,
    "randn": lambda p: bool(torch.randn(2).abs().sum() < p),
    "item() < p": lambda p: torch.rand(1).item() < p,
    "1 - p < item()": lambda p: 1 - p <= torch.rand(()).item(),
    "item() > 1 - p": lambda p: torch.rand(1).double().item() > 1 - p,
    "any": lambda p: (torch.rand(2) < p / 2).any().item(),
    "item() < nan": lambda p: torch.rand(()).item() < math.nan or torch.rand(()).item() < p,
    "nan": lambda p: bool(torch.where(torch.rand(1) < p, float("nan"), torch.tensor([math.nan, 1.0])).isnan().all()),
}


class Layers(nn.Module):
    """A stack of layers of which each may be skipped, as transformers does it."""

    def __init__(self, rate: float, layers: int = 4, decide: Decide | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, 3)
        self.rate = rate
        self.decide = decide or DECISIONS["rand([]) < p"]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.decide(self.rate):
                continue
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.last(x)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(x)
    return F.cross_entropy(logits, y), {"mean": logits.mean()}


class Twins:
    """The same training with graphs and without, each with its own state of the CPU generator."""

    def __init__(self, engine: Engine, make: Callable[[], nn.Module], loss: Any = loss_fn, **options: Any) -> None:
        device, graph = engine
        self.device = device
        self.sides = []
        torch.manual_seed(11)
        model = make().to(device)
        for kind in (graph, "off"):
            mine = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2, fused=True)
            step = ampkit.graphed_step(loss, mine, optimizer, graph=kind, **options)
            self.sides.append((mine, optimizer, step))
        self.random = [random_state(device), random_state(device)]

    @property
    def step(self) -> ampkit.GraphedStep:
        return self.sides[0][2]

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(number)
        x, y = torch.randn(5, 6, generator=made), torch.randint(3, (5,), generator=made)
        return x.to(self.device), y.to(self.device)

    def call(self, number: int, between: Callable[[], object] = lambda: None, **named: Any) -> None:
        """Do one step on each side, and compare all that there is."""
        outs, states = [], []
        for side, (model, optimizer, step) in enumerate(self.sides):
            set_random_state(self.random[side])
            between()
            outs.append(step(*self.batch(number), **named))
            states.append(training_state(model, optimizer, step.scaler))
            self.random[side] = random_state(self.device)
        where = f"call {number}"
        for name in ("loss", "aux", "skipped", "grad_norm"):
            assert_same(getattr(outs[0], name), getattr(outs[1], name), f"{where}: {name}")
        assert_same(states[0], states[1], where)


def random_state(device: str) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@pytest.mark.parametrize("engine", ENGINES)
def test_one_graph_serves_all_calls_if_no_layer_is_ever_dropped(engine: Engine) -> None:
    """R3: `rand < 0.0` is never true. The CPU generator moves on in each replay as in an eager step."""
    twins = Twins(engine, lambda: Layers(0.0), on_failure="raise")
    for number in range(10):
        twins.call(number)
    report = twins.step.report()
    assert (report.graphs, report.captures, report.replays) == (1, 1, 7)
    assert report.eager == {"warm-up": 3}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("rate", "layers"), [(0.3, 4), *(pytest.param(*case, marks=pytest.mark.seeds) for case in ((0.1, 4), (0.5, 3)))]
)
@pytest.mark.slow
def test_each_outcome_is_a_graph_or_an_eager_step(engine: Engine, rate: float, layers: int) -> None:
    """R3: losses, state and generators are those of the eager step in each of 60 calls."""
    twins = Twins(engine, lambda: Layers(rate, layers), max_graphs=5)
    for number in range(60):
        twins.call(number)
    report = twins.step.report()
    assert 1 < report.graphs <= 5
    assert report.replays > 10
    print(report)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decide", DECISIONS)
@pytest.mark.sampled(4)
def test_ways_to_draw_and_to_compare(engine: Engine, decide: str) -> None:
    """R3: draws of any kind and their comparisons on the CPU, as long as the host learns a truth or a whole number."""
    twins = Twins(engine, lambda: Layers(0.2, 2, DECISIONS[decide]))
    for number in range(24):
        twins.call(number)
    assert twins.step.report().replays > 3


class Stops(Layers):
    """Leaves the loop at the first layer whose draw says so: later layers do not draw."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < self.rate:
                break
            x = torch.tanh(layer(x))
        return self.last(x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_the_number_of_draws_depends_on_earlier_ones(engine: Engine) -> None:
    """R3: a `break` behind a draw. Each depth has a graph, and the generator stands where an eager step leaves it."""
    twins = Twins(engine, lambda: Stops(0.4, 3))
    for number in range(40):
        twins.call(number)
    report = twins.step.report()
    assert report.graphs == 4
    assert report.eager == {"warm-up": 12}
    assert "draws on the host: 0 of 3 comparisons true" in str(report)


class Scaled(Layers):
    """Uses the number that it has compared on the device, too."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([])  # HERE scaled
            if drawn < self.rate:  # HERE scaled on a cpu
                continue
            x = layer(x) * drawn
        return self.last(x)


class Read(Layers):
    """Computes in Python with the number that it has drawn."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(torch.rand(()))  # HERE read
        return self.last(x * scale)


class Item(Layers):
    """Has the number in a variable, where any code may read it."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(1).item()
        return self.last(x if drawn < self.rate else -x)


class Listed(Layers):
    """Reads a draw where no operation is seen."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(2)  # HERE listed
        if drawn[0] < self.rate:  # HERE listed on a cpu
            x = x + 1
        return self.last(x * (1 + drawn.tolist()[1]))


class Returned(Layers):
    """Keeps what it has drawn."""

    def forward(self, x: Tensor) -> Tensor:
        self.drawn = torch.rand(())  # HERE returned
        if self.drawn < self.rate:  # HERE returned on a cpu
            return self.last(x)
        return self.last(-x)


class PythonRandom(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < self.rate:  # HERE python
            x = x + 1
        return self.last(x)  # HERE behind python


class NumpyRandom(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if np.random.rand() < self.rate:
            x = x + 1
        return self.last(x)


class OwnGenerator(Layers):
    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.seed = 5

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if torch.rand((), generator=generator) < self.rate:
            x = x + 1
        return self.last(x)


class PutBack(Layers):
    """Draws in a part whose generator state is put back, as checkpointing does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            skips = bool(torch.rand(()) < self.rate)
        return self.last(x if skips else -x)


class ComparedByAnother(Layers):
    """Has a fraction compare itself with the number, which asks for the number itself."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if Fraction(1, 2) < torch.rand([]).item():
                continue
            x = layer(x)
        return self.last(x)


REFUSED: dict[type[Layers], str] = {
    ComparedByAnother: r"waits for the device to read a value|draws random numbers on the host",
    Scaled: r"(waits for the device to read a value|draws random numbers on the host).*may only be compared",
    Read: r"waits for the device to read a value|draws random numbers on the host",
    Item: r"waits for the device to read a value|draws random numbers on the host",
    Listed: r"tolist|may only be compared",
    Returned: r"(waits for the device to read a value|draws random numbers on the host).*may only be compared",
    PythonRandom: "draws from Python's random",
    NumpyRandom: r"draws from numpy\.random",
    OwnGenerator: r"waits for the device to read a value|draws random numbers on the host",
    PutBack: "in a way that cannot be repeated ahead of the step",
}


@pytest.fixture
def random_numbers() -> Iterator[None]:
    """The generators of Python and numpy are left as they were."""
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


@pytest.mark.usefixtures("random_numbers")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.quick(4)
def test_other_draws_stay_refused(engine: Engine, kind: type[Layers]) -> None:
    """R3: a draw that reaches the device, a return value or Python, and draws of others: eager, and named."""
    device, graph = engine
    model = kind(0.5).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph, cuts=False)
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 6, generator=made).to(device), torch.randint(3, (5,), generator=made).to(device)
    with pytest.warns(ampkit.CaptureWarning, match=REFUSED[kind]) as caught:
        [step(x, y) for _ in range(6)]
    assert step.report().graphs == 0
    name = kind.__name__.lower()
    line = {"Scaled": name, "Listed": name, "Returned": name}.get(kind.__name__)
    if line is not None:
        marked = marked_line(__file__, line + " on a cpu" * (device == "cpu"))
        assert any(marked in str(warning.message) for warning in caught)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"policy": "float16"}, {"verify": 3}, {"warmup": 5}], ids=str)
@pytest.mark.slow
def test_with_options(engine: Engine, options: dict[str, Any]) -> None:
    """R3: micro-batches, a loss scale, dropout between the draws, verified replays, a longer warm-up."""
    twins = Twins(engine, lambda: Layers(0.2, 2, dropout=0.3), max_norm=1.0, **options)
    for number in range(32):
        twins.call(number)
    report = twins.step.report()
    assert report.replays > 5
    assert report.failure is None


def overflowing(model: nn.Module, x: Tensor, y: Tensor, boost: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * boost


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_overflows(engine: Engine) -> None:
    """R3: steps that the loss scale skips draw like others."""
    twins = Twins(engine, lambda: Layers(0.2, 2), overflowing, policy="float16")
    for number in range(32):
        boost = torch.tensor(float("inf") if number % 5 == 4 else 1.0, device=twins.device)
        twins.call(number, boost=boost)
    report = twins.step.report()
    assert report.replays > 8
    assert report.skipped >= 6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_loader_draws_between_the_steps(engine: Engine) -> None:
    """R3: a DataLoader that shuffles draws from the same generator, and a seed may be set between two calls."""
    twins = Twins(engine, lambda: Layers(0.2, 2))
    data = torch.utils.data.TensorDataset(torch.arange(6))

    def draw() -> None:
        orders.append([batch[0].tolist() for batch in torch.utils.data.DataLoader(data, 2, shuffle=True)])

    for number in range(30):
        orders: list[Any] = []
        twins.call(number, between=(lambda: torch.manual_seed(4)) if number == 20 else draw)
        assert orders[:1] == orders[1:]
    assert twins.step.report().replays > 8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_resume(engine: Engine) -> None:
    """R3: state and generator of an earlier call are loaded; the calls behind it are repeated bit by bit."""
    twins = Twins(engine, lambda: Layers(0.3, 2))
    for number in range(24):
        twins.call(number)
    model, optimizer, step = twins.sides[0]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())), twins.random[0]

    def losses() -> list[Tensor]:
        set_random_state(saved[1])
        return [step(*twins.batch(number)).loss for number in range(24, 34)]

    first = losses()
    model.load_state_dict(saved[0][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)  # memory of the optimizer's state is replaced
        optimizer.load_state_dict(saved[0][1])
        assert_same(losses(), first)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_scan_makes_its_steps_one_by_one(engine: Engine) -> None:
    """R3: which graphs serve the steps of a scan is known only when they draw."""
    twins = Twins(engine, lambda: Layers(0.2, 2))
    batches = [twins.batch(number) for number in range(30)]
    stacked = [torch.stack(each) for each in zip(*batches, strict=True)]
    set_random_state(twins.random[0])
    out = twins.step.scan(*stacked)
    ended = random_state(twins.device)
    set_random_state(twins.random[1])
    model, optimizer, step = twins.sides[1]
    assert_same(list(out.loss), [step(*batch).loss for batch in batches])
    assert_same(ended, random_state(twins.device))
    mine = training_state(*twins.sides[0][:2], twins.step.scaler)
    assert_same(mine, training_state(model, optimizer, step.scaler))
    report = twins.step.report()
    assert (report.launches, report.scanned) == (0, 0)
    assert report.replays > 8


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_input_draws_nothing(engine: Engine) -> None:
    """R3: a call that is refused leaves the generator as it was."""
    twins = Twins(engine, lambda: Layers(0.0, 2))
    for number in range(6):
        twins.call(number)
    before = torch.get_rng_state()
    shared = twins.sides[0][0].layers[0].weight.detach()[:5]
    with pytest.raises(ampkit.InputMismatch):
        twins.step(shared, twins.batch(0)[1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_too_many_outcomes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """R3: outcomes beyond those that are learned are eager steps, without a slow check of each, and one warning."""
    monkeypatch.setattr("ampkit._capture.engine.host_draws.MOST_PATHS", 6)
    twins = Twins(engine, lambda: Layers(0.3, 5))
    with pytest.warns(ampkit.CaptureWarning, match="more than 6 different outcomes"):
        [twins.call(number) for number in range(50)]
    report = twins.step.report()
    assert any("more than 6 different outcomes" in reason for reason in report.eager)
    assert report.replays > 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decide", ["rand([]) < p", "bernoulli", "1 - p < item()"])
@pytest.mark.slow
def test_a_rate_that_changes(engine: Engine, decide: str) -> None:
    """R3: the rate of a schedule, kept as an attribute, is another number for some calls: never a frozen comparison."""
    twins = Twins(engine, lambda: Layers(0.1, 2, DECISIONS[decide]))
    for number in range(25):
        twins.call(number)
    for model, _, _ in twins.sides:
        model.rate = 0.6
    with pytest.warns(ampkit.CaptureWarning, match="attribute model.rate changed from 0.1 to 0.6"):
        [twins.call(number) for number in range(25, 50)]
    assert twins.step.report().replays > 15


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_rate_that_changes_all_the_time(engine: Engine) -> None:
    """R3: such a step stays eager, the report says why, and the step stays right."""
    twins = Twins(engine, lambda: Layers(0.5, 2))
    for number in range(40):
        for model, _, _ in twins.sides:
            model.rate *= 0.97
        twins.call(number)
    report = twins.step.report()
    assert (report.graphs, report.replays) == (0, 0)
    assert report.failure is not None
    assert "the attribute model.rate kept changing" in report.failure
