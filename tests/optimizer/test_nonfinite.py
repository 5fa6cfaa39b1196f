"""`nonfinite="skip"` and `"stop"`: a gradient that is not finite changes nothing, other steps keep their bits."""

import math
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic, leave_out_inductor, no_sync
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampkit

Engine = tuple[str, str]
PLACES = 100
NOT_FINITE = (math.nan, math.inf, -math.inf)
NAMED = "in call {}, counted from 1"


class _AddToGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad + ctx.saved_tensors[0], None


class Net(nn.Module):
    """Two layers, to whose gradients and activations the batch adds something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, hidden: Tensor, added: Tensor) -> Tensor:
        params = list(self.parameters())
        parts = added.to(params[0].dtype).split([param.numel() for param in params])
        pairs = zip(params, parts, strict=True)
        w1, b1, w2, b2 = (_AddToGradient.apply(param, part.view_as(param)) for param, part in pairs)
        return F.linear(torch.tanh(F.linear(x.to(w1.dtype), w1, b1)) + hidden.to(w1.dtype), w2, b2)


SIZE = sum(param.numel() for param in Net().parameters())


class Batch(NamedTuple):
    """What a call gets.

    Attributes:
        x: the inputs.
        hidden: what is added to the activations behind the first layer.
        added: what is added to the gradients of all parameters, in their order.
        to_loss: what is added to the loss, and has no gradient.
    """

    x: Tensor
    hidden: Tensor
    added: Tensor
    to_loss: Tensor

    def spoilt(self, drawn: random.Random) -> "Batch":
        """Return the batch with one number that is not finite, at a random place that some gradient depends on."""
        place = drawn.choice(("x", "hidden", "added", "added"))
        spoilt: Tensor = getattr(self, place).clone()
        spoilt.view(-1)[drawn.randrange(spoilt.numel())] = drawn.choice(NOT_FINITE)
        # tanh of inf is finite, and so may be all gradients: nothing to skip
        return self._replace(**{place: spoilt.nan_to_num(math.nan, math.nan, math.nan) if place == "x" else spoilt})


def batches(device: str, count: int) -> list[Batch]:
    made = torch.Generator().manual_seed(5)
    zeros = torch.zeros(5, 8), torch.zeros(SIZE), torch.zeros(())
    xs = torch.randn(count, 5, 6, generator=made)
    return [Batch(*(tensor.to(device) for tensor in (x, *zeros))) for x in xs]


def loss_fn(model: nn.Module, x: Tensor, hidden: Tensor, added: Tensor, to_loss: Tensor) -> Tensor:
    return model(x, hidden, added).float().square().mean() + to_loss


class Plain(torch.optim.Optimizer):
    """An optimizer of the user's own: gradient descent with a state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            sums = self.state[param].setdefault("sum", torch.zeros_like(param))
            sums.mul_(0.9).add_(param.grad)
            param.sub_(sums, alpha=self.param_groups[0]["lr"])


def muon_and_adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in net.parameters() if param.dim() == 2]
    others = [param for param in net.parameters() if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01, fused=True)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "fused AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True, fused=True),
    "fused SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
    "Muon and AdamW": muon_and_adamw,
    "behind the graph": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01),
    "of the user's own": lambda net: Plain(net.parameters()),
}


class Job:
    """A model, its optimizers and an average, and a step of them."""

    def __init__(
        self, engine: Engine, optimizer: str = "fused AdamW", *, average: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(3)
        device, graph = engine
        self.model = Net().to(device, options.pop("dtype", torch.float32))
        made = OPTIMIZERS[optimizer](self.model)
        self.optimizers: list[torch.optim.Optimizer] = made if isinstance(made, list) else [made]
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        options = {"after_step": self.average.update_parameters, **options} if average else options
        self.step = ampkit.graphed_step(loss_fn, self.model, made, **{"graph": graph, **options})

    def state(self) -> dict[str, Any]:
        """Return all that a step changes, on the host."""
        named = {name: bits(tensor) for name, tensor in self.model.state_dict().items()}
        named.update({f"average {name}": bits(tensor) for name, tensor in self.average.state_dict().items()})
        for number, optimizer in enumerate(self.optimizers):
            for i, kept in enumerate(optimizer.state.values()):
                named.update({f"{number} {i} {key}": bits(torch.as_tensor(value)) for key, value in kept.items()})
        return named

    def train(self, given: Sequence[Batch]) -> list[Any]:
        """Do a call with each batch, and return the outputs."""
        return [self.step(*batch) for batch in given]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    reads = getattr(request.node, "callspec", None) and request.node.callspec.params.get("optimizer") == "Adam"
    # Without fused=True, Adam reads its step count on the host of a CPU, which a tape would freeze.
    with deterministic(), taped() if request.param[0] == "cpu" and not reads else nullcontext():
        yield request.param


@pytest.mark.filterwarnings("ignore:.*steps eagerly:ampkit.CaptureWarning", "ignore::ampkit.CaptureWarning")
@pytest.mark.filterwarnings("ignore:.*every step waits:ampkit.AmpkitWarning")
@pytest.mark.quick(4)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_steps_were_never_made(engine: Engine, optimizer: str, max_norm: float | None) -> None:
    """E3: behind 100 random places that are not finite, all has the bits of a run that leaves these calls out."""
    drawn = random.Random(f"{optimizer} {max_norm}")
    given = batches(engine[0], 2 * PLACES + 4)
    # The first call of Muon and of the user's own has been seen: a step that makes state is not undone but waited for.
    bad = set(drawn.sample(range(len(given)), PLACES))
    guarded = Job(engine, optimizer, average=True, max_norm=max_norm, nonfinite="skip")
    outs = guarded.train([batch.spoilt(drawn) if i in bad else batch for i, batch in enumerate(given)])
    plain = Job((engine[0], "off"), optimizer, average=True, max_norm=max_norm)
    plain.train([batch for i, batch in enumerate(given) if i not in bad])
    assert {i for i, out in enumerate(outs) if out.skipped} == bad
    assert_same(guarded.state(), plain.state())
    report = guarded.step.report()
    assert report.skipped == PLACES
    assert report.replays + report.in_parts > len(given) - 30  # Muon joins the graph behind a few steps


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.quick(4)
@pytest.mark.parametrize("optimizer", ["fused AdamW", "fused SGD", "Adam", "Muon and AdamW"])
def test_stops(engine: Engine, optimizer: str) -> None:
    """E3: 100 random places: the weights are those before it, and an error comes within 16 calls."""
    drawn = random.Random(optimizer)
    given = batches(engine[0], 40)
    guarded = Job(engine, optimizer, average=True, nonfinite="stop")
    plain = Job((engine[0], "off"), optimizer, average=True)
    made = 0
    for _ in range(PLACES):
        good = [drawn.choice(given) for _ in range(drawn.randrange(1 if made else 5, 8))]
        made += len(good)
        guarded.train(good)
        plain.train(good)
        late = [guarded.step(*drawn.choice(given).spoilt(drawn)).skipped]
        with pytest.raises(ampkit.NonfiniteError, match=NAMED.format(made + 1)):
            late += (guarded.step(*drawn.choice(given)).skipped for _ in range(16))
        made += len(late)
        assert all(late)
        assert_same(guarded.state(), plain.state())
        guarded.step.load_state_dict({})
    assert guarded.step.report().skipped == 0
    assert guarded.step.report().replays > made // 2


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.5},
    "norm measured": {"max_norm": math.inf},
    "accumulated": {"accumulate": 3, "max_norm": 0.5},
    "as torch": {"arithmetic": "torch", "max_norm": 0.5},
    "bfloat16 weights": {"policy": "params=bfloat16,compute=bfloat16,output=float32", "dtype": torch.bfloat16},
    "autocast": {"policy": "bfloat16", "max_norm": 0.5},
    "float64": {"dtype": torch.float64, "max_norm": 0.5},
}


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.filterwarnings("ignore:.*every step waits:ampkit.AmpkitWarning")
@pytest.mark.quick(9)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_good_steps_keep_their_bits(engine: Engine, optimizer: str, options: str) -> None:
    """A guard changes no bit, whatever the optimizer and the arithmetic are."""
    if options == "bfloat16 weights" and optimizer == "fused SGD" and engine[0] == "cpu":
        pytest.skip("this torch does not update bfloat16 parameters with fused SGD on the CPU")
    if options == "as torch" and optimizer == "Muon and AdamW":
        pytest.skip("arithmetic='torch' takes one optimizer")
    given = batches(engine[0], 15)
    kinds: list[dict[str, Any]] = [{}, {"nonfinite": "skip"}, {"nonfinite": "stop"}]
    found = []
    for kind in kinds:
        job = Job(engine, optimizer, average=True, **OPTIONS[options], **kind)
        outs = [(out.loss, out.grad_norm, out.skipped) for out in job.train(given)]
        found.append((job.state(), outs))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_only_what_is_not_finite_is_skipped(engine: Engine) -> None:
    """A loss of nan without a gradient, and gradients whose squares overflow, are steps as without a guard."""
    given = batches(engine[0], 8)
    given[5] = given[5]._replace(to_loss=torch.full_like(given[5].to_loss, math.nan))
    given[6] = given[6]._replace(added=torch.full_like(given[6].added, 1e30))
    jobs = [Job(engine, nonfinite=nonfinite) for nonfinite in (None, "skip", "stop")]
    outs = [[out.skipped.item() for out in job.train(given[:7])] for job in jobs]
    assert outs == [[False] * 7] * 3  # behind it the weights are too large for another step
    assert_same(jobs[0].state(), jobs[1].state())
    assert_same(jobs[0].state(), jobs[2].state())
    clipped = Job(engine, nonfinite="skip", max_norm=1.0)  # by a norm of inf, all gradients would be 0
    assert [out.skipped.item() for out in clipped.train(given)] == [*[False] * 6, True, False]


class Weight(nn.Module):
    """A weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("fused", [True, False])
def test_zeros_keep_their_sign(engine: Engine, fused: bool) -> None:
    """Momentum that begins with a gradient of -0.0 is -0.0, under a guard and a loss scale as without."""
    found = []
    for options in ({}, {"nonfinite": "skip"}, {"scaler": ampkit.GradScaler(engine[0], init_scale=1.0)}):
        model = Weight().to(engine[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, fused=fused)
        kinds: Any = {"graph": engine[1], **options}
        step = ampkit.graphed_step(lambda model, x: model(x), model, optimizer, **kinds)
        for _ in range(6):
            step(torch.tensor([-0.0, -0.0, 0.0], device=engine[0]))
        found.append((bits(model.weight), bits(optimizer.state[model.weight]["momentum_buffer"])))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def divides(net: nn.Module) -> None:
    """Divide a gradient by its magnitude, which makes nan of zeros, and count in a buffer."""
    net.get_buffer("seen").add_(1.0)
    weight = net.get_parameter("first.weight")
    assert weight.grad is not None
    weight.grad.div_(weight.grad.abs().sum())


@pytest.mark.parametrize("at", ["in front", "behind"])
def test_before_step(engine: Engine, at: str) -> None:
    """What `before_step` makes of the gradients is looked at, too, and what it writes is put back in a skipped step."""
    given = batches(engine[0], 12)
    bad = {5, 8}
    spoilt = {i: given[i].spoilt(random.Random(i)) for i in bad}
    if at == "behind":  # the gradient is exactly 0
        spoilt = {i: given[i]._replace(x=torch.zeros_like(given[i].x)) for i in bad}
    guarded = Job(engine, nonfinite="skip", before_step=divides, max_norm=1.0)
    plain = Job(engine, before_step=divides, max_norm=1.0)
    outs = guarded.train([spoilt.get(i, batch) for i, batch in enumerate(given)])
    plain.train([batch for i, batch in enumerate(given) if i not in bad])
    assert {i for i, out in enumerate(outs) if out.skipped} == bad
    assert_same(guarded.state(), plain.state())
    assert guarded.model.seen.item() == len(given) - len(bad)


def calls_one_by_one(job: Job, given: list[Batch]) -> None:
    job.train(given)


def by_window(job: Job, given: list[Batch]) -> None:
    for i in range(0, len(given), 3):
        job.step.window(*map(torch.stack, zip(*given[i : i + 3], strict=True)))


def by_scan(job: Job, given: list[Batch]) -> None:
    for _ in range(3):  # the first ones are made one by one
        job.step.scan(*map(torch.stack, zip(*given[:12], strict=True)))
    job.step.scan(*map(torch.stack, zip(*given, strict=True)))


@pytest.mark.parametrize("train", [calls_one_by_one, by_window, by_scan])
def test_windows(engine: Engine, train: Callable[[Job, list[Batch]], None]) -> None:
    """One micro-batch that is not finite skips its window, also in one launch, and a short one at the end."""
    given = batches(engine[0], 30)
    guarded = Job(engine, average=True, accumulate=3, nonfinite="skip")
    plain = Job((engine[0], "off"), average=True, accumulate=3)
    bad = [given[i].spoilt(random.Random(2)) if i == 16 else batch for i, batch in enumerate(given)]
    train(guarded, bad)
    if train is by_scan:
        plain.train(given[:12] * 3)
    plain.train([batch for i, batch in enumerate(given) if i not in range(15, 18)])
    assert_same(guarded.state(), plain.state())
    guarded.step(*given[0].spoilt(random.Random(3)))
    guarded.step.flush()
    assert_same(guarded.state(), plain.state())
    assert guarded.step.report().skipped == 2


def test_a_window_stops_before_it_begins() -> None:
    """With graphs and without, no micro-batch of the window that raises is done."""
    found = []
    for graph in ("off", "emulate"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        step = ampkit.graphed_step(
            lambda m, x: m(x).square().mean(), net, optimizer, accumulate=4, nonfinite="stop", graph=graph
        )
        x = torch.randn(20, 4, 6, 8, generator=torch.Generator().manual_seed(0))
        x[6, 1] = math.nan
        with pytest.raises(ampkit.NonfiniteError):
            list(map(step.window, x))
        found.append(int(net[1].num_batches_tracked))
    assert found[0] == found[1]
    assert found[0] % 4 == 0


def stopped(engine: Engine, **options: Any) -> Job:
    """Return a job that was stopped in its sixth call, of which no error has told yet."""
    job = Job(engine, nonfinite="stop", **options)
    given = batches(engine[0], 6)
    job.train([*given[:5], given[5]._replace(added=given[5].added + math.nan)])
    return job


def test_tells_at_once() -> None:
    """flush, close and state_dict raise what no call has told yet, and the report says it."""
    engine = ("cpu", "emulate")
    job = stopped(engine)
    assert job.step.report().stopped == "a gradient was inf or nan in call 6"
    assert "stopped: a gradient was inf or nan in call 6" in str(job.step.report())
    for tell in (job.step.state_dict, job.step.flush):
        with pytest.raises(ampkit.NonfiniteError, match=NAMED.format(6)):
            tell()
    assert job.step.state_dict() == {}  # it was told
    with pytest.raises(ampkit.NonfiniteError, match=NAMED.format(6)):
        job.step(*batches("cpu", 1)[0])
    job.step.close()
    with pytest.raises(ampkit.NonfiniteError), stopped(engine).step:
        pass
    with pytest.raises(ZeroDivisionError), stopped(engine).step as step:
        raise ZeroDivisionError
    with pytest.raises(ampkit.NonfiniteError, match=NAMED.format(6)):
        step.flush()
    with pytest.raises(ampkit.NonfiniteError, match=r"in optimizer step 3 \(accumulate=2\)"):
        stopped(engine, accumulate=2).step.close()


def test_warns_where_nothing_has_told() -> None:
    """A step that ends, or whose process does, without a call that would raise."""
    text = r"no error has said that a gradient was inf or nan in optimizer step 3 \(accumulate=2\)"
    with pytest.warns(ampkit.AmpkitWarning, match=text):
        stopped(("cpu", "emulate"), accumulate=2)
    script = """
        import torch, ampkit
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        loss_fn = lambda model, x: model(x).sum()
        step = ampkit.graphed_step(loss_fn, model, optimizer, nonfinite="stop", graph="off")
        step(torch.tensor([float("inf"), 1.0]))
        {}
    """
    for last, said in (("", 1), ("step.close()", 0)):
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script).format(last)], capture_output=True, text=True
        )
        assert ended.stderr.count("no error has said that a gradient was inf or nan in call 1") == said, ended.stderr


@pytest.mark.filterwarnings("ignore:.*state was replaced:ampkit.CaptureWarning")
def test_goes_on_from_a_checkpoint(engine: Engine) -> None:
    """After the error the state before it is loaded, with graphs that go on, and an open window is dropped."""
    given = batches(engine[0], 20)
    guarded, plain = Job(engine, accumulate=2, nonfinite="stop"), Job(engine, accumulate=2)
    guarded.train(given[:8])
    plain.train(given[:8])
    saved = [part.state_dict() for part in (guarded.model, guarded.optimizers[0])]
    with pytest.raises(ampkit.NonfiniteError):
        guarded.train([given[8]._replace(added=given[8].added + math.inf), *given])
    for part, state in zip((guarded.model, guarded.optimizers[0]), saved, strict=True):
        part.load_state_dict(state)
    guarded.step.load_state_dict(guarded.step.state_dict())
    guarded.train(given)
    plain.train(given)
    assert_same(guarded.state(), plain.state())


def test_scan_stops(engine: Engine) -> None:
    """In launches of 16 calls, the error comes within three launches."""
    job, given = Job(engine, nonfinite="stop"), batches(engine[0], 16)
    stack = list(map(torch.stack, zip(*given, strict=True)))
    for _ in range(3):
        job.step.scan(*stack)
    before = job.state()
    stack[2][0, 0] = math.nan
    assert job.step.scan(*stack).skipped.all()
    stack[2].zero_()
    with pytest.raises(ampkit.NonfiniteError, match=NAMED.format(49)):
        [job.step.scan(*stack) for _ in range(3)]
    assert_same(job.state(), before)


def test_names_the_first_layer() -> None:
    """With numerics the error says where the value was first not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = ampkit.debug.numerics(model, every=1)

    def loss(model: Any, x: Tensor, bad: Tensor) -> Tensor:
        return model[2](model[1](model[0](x)) * bad).square().mean()

    step = ampkit.graphed_step(loss, model, optimizer, nonfinite="stop", numerics=watch, graph="emulate")
    for end in (6, 12):  # the second time, it is the second such step that is named
        for i in range(6):
            step(torch.ones(2, 4), torch.tensor(math.nan if i == 5 else 1.0))
        found = rf"in call {end}, counted from 1.*has found the first overflow: 2, forward, step {end - 1} "
        with pytest.raises(ampkit.NonfiniteError, match=found):
            step.flush()
        step.load_state_dict({})


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With compile=, the update is not compiled, and skipped steps were never made."""
    leave_out_inductor(monkeypatch)

    def trained(boosts: Sequence[float], nonfinite: str | None) -> tuple[list[Tensor], ampkit.Report]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        options: Any = {"compile": "default", "graph": "emulate", "nonfinite": nonfinite}
        step = ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, max_norm=0.1, **options)
        for boost in boosts:
            step(torch.ones(2, 4) * boost)
        return [bits(param) for param in model.parameters()], step.report()

    weights, report = trained([1.0, 0.5, 2.0, 1.0, 0.5, math.nan, 1.0, math.inf, 2.0, 1.0], "skip")
    assert_same(weights, trained([1.0, 0.5, 2.0, 1.0, 0.5, 1.0, 2.0, 1.0], "stop")[0])
    assert report.skipped == 2
    assert "not compiled: update, since nonfinite= looks at the gradients in front of it" in report.compiled


def test_verified_and_warned(engine: Engine) -> None:
    """`verify` compares the guard's state, too; 50 skipped steps in a row are warned of."""
    given = batches(engine[0], 10)
    job = Job(engine, nonfinite="skip", verify=6, max_norm=1.0)
    job.train([batch.spoilt(random.Random(i)) if i in (4, 6) else batch for i, batch in enumerate(given)])
    assert job.step.report().skipped == 2
    with pytest.warns(ampkit.AmpkitWarning, match=r"graphed_step\(nonfinite='skip'\): the last \d+ optimizer steps"):
        job.train([given[0]._replace(added=given[0].added + math.inf)] * 110)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"nonfinite": "warn"}, ValueError, "expected one of 'skip', 'stop'"),
    ({"nonfinite": "skip", "policy": "float16"}, ValueError, "the loss scale skips such steps already"),
    ({"nonfinite": "stop", "scaler": ampkit.GradScaler("cpu")}, ValueError, "compute in bfloat16 without a scaler"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED)
def test_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Job(("cpu", "off"), **options)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with pytest.raises(NotImplementedError, match="it does not look into sparse gradients"):
        ampkit.graphed_step(lambda model, x: model(x).sum(), model, optimizer, nonfinite="skip", graph="off")


@pytest.mark.cuda
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_waits_for_nothing(nonfinite: str) -> None:
    """No call waits for the device."""
    given = batches("cuda", 4)
    job = Job(("cuda", "auto"), nonfinite=nonfinite, on_failure="raise")
    job.train(given)
    with no_sync():
        job.train(given * 8)
    assert job.step.report().replays == 33
