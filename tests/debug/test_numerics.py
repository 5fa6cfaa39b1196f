"""debug.numerics: statistics to the last value, overflow and underflow named by layer and direction, no bit changed."""

import copy
import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    DEVICES,
    ENGINES,
    OPTIMIZERS,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    no_sync,
    training_state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
import ampkit.debug
from ampkit.debug import Numerics, NumericsReport
from ampkit.debug._numerics.measurements import BIAS, BINS, NONFINITE, AsyncCopies, measure
from ampkit.debug._numerics.report import F16_MAX, safe_scale

Engine = tuple[str, str]

# ---------------------------------------------------------------------------------------------------------- statistics

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "sliced": lambda x: x[:, :, 1:, ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "scalar": lambda x: x[0, 0, 0, 0],
}


def expected(tensor: Tensor) -> tuple[list[int], float]:
    """Return what `measure` must find, value by value."""
    counts, largest = [0] * BINS, 0.0
    for value in tensor.float().flatten().tolist():
        largest = math.nan if math.isnan(value) or math.isnan(largest) else max(largest, abs(value))
        if not math.isfinite(value):
            counts[NONFINITE] += 1
            continue
        tiny = abs(value) < 2.0**-126
        counts[0 if tiny else math.frexp(value)[1] - 1 + BIAS] += 1
    return counts, largest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_measure_counts_every_value(device: str, layout: str, dtype: torch.dtype) -> None:
    """Exponents, zeros, subnormals, inf and nan of both signs, in every layout, against a loop over the values."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 6, generator=made) * torch.exp2(torch.randint(-24, 15, (2, 3, 4, 6), generator=made))
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-24, -(2.0**-14), 1.0, -2.0, 65504.0, -65504.0, 2.0**-25]
    x.view(-1)[: len(special)] = torch.tensor(special)
    x = LAYOUTS[layout](x.to(dtype).to(device))
    with deterministic():
        counts, largest = measure(x)
    counts, largest_expected = expected(x.cpu())[0], expected(x.cpu())[1]
    found = measure(x)[0].cpu().view(-1, BINS).sum(0).tolist()
    assert found == counts
    assert float(largest) == largest_expected or (math.isnan(largest) and math.isnan(largest_expected))
    assert sum(found) == x.numel()


def test_bins_of_histc_are_exponents() -> None:
    """What CUDA's histc computes for integers, in the integers of its source, is the exponent of each value."""
    low, high, bins = -(2**31), 2**31 - 1, 2 * BINS
    for exponent in range(BINS):
        for mantissa in (0, 1, 2**22, 2**23 - 1):
            for sign in (0, 1):
                pattern = sign << 31 | exponent << 23 | mantissa
                value = pattern - 2**32 if sign else pattern  # as int32
                found = min((value - low) * bins // (high - low), bins - 1)
                assert found % BINS == exponent


@pytest.mark.parametrize("largest", [1.0, 65504.0, 65505.0, 0.9995, 2.0**-24, 3e38, 65504.0 / 3, 1.9990234375])
def test_safe_scale_is_the_largest(largest: float) -> None:
    """The power of two keeps the gradient finite in float16, the next one does not."""
    assert largest * safe_scale(largest) <= F16_MAX < largest * safe_scale(largest) * 2
    assert safe_scale(0.0) == math.inf


# -------------------------------------------------------------------------------------------------------- exactness


def trajectory(
    engine: Engine, every: int | None, policy: str, accumulate: int, verify: int = 0, batches: int = 16
) -> tuple[list[Any], Any, Numerics | None]:
    """Return the state after each call, with an overflow before and after capture; the step; what watched it."""
    device, graph = engine
    model = make_net(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    watch = None if every is None else ampkit.debug.numerics(model, every=every)
    step = ampkit.graphed_step(
        boosted_loss,
        model,
        optimizer,
        policy=policy,
        scaler=ampkit.GradScaler(device, init_scale=1024.0, growth_interval=3, enabled=policy == "float16"),
        max_norm=0.5,
        accumulate=accumulate,
        verify=verify,
        numerics=watch,
        graph=graph,
        on_failure="raise",
    )
    history = []
    torch.manual_seed(5)
    for batch in make_batches(device, [8] * batches, (3, 11) if policy == "float16" else ()):
        out = step(*batch)
        history.append((training_state(model, optimizer, step.scaler), out._asdict()))
    step.flush()
    return history, step, watch


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("policy", "accumulate"), [("float16", 1), ("bfloat16", 1), ("float32", 1), ("float16", 3)])
@pytest.mark.sampled(4)
def test_observed_steps_leave_the_same_bits(engine: Engine, policy: str, accumulate: int) -> None:
    """G5: with statistics in every second step, or in every step, all state and outputs are those without."""
    with deterministic():
        plain = trajectory((engine[0], "off"), None, policy, accumulate)[0]
        for graph, every in ((engine[1], 2), ("off", 1), (engine[1], 1)):
            history, _, watch = trajectory((engine[0], graph), every, policy, accumulate)
            assert watch is not None
            assert_same(plain, history, f"{graph}, every={every}")
            report = watch.report()
            assert report.steps == -(-16 // accumulate)
            if every == 1:
                assert report.observed == report.steps


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_observed_steps_are_graphs_of_their_own(engine: Engine) -> None:
    """G1: each kind of step warms up and is captured once; no hook stays behind; weights are working ones."""
    with deterministic():
        _, step, watch = trajectory(engine, 2, "bfloat16", 1)
    assert watch is not None
    assert (step.captures, step.replays) == (2, 16 - 6)
    assert watch.report().observed == 8
    assert len(step._window._step._working) == 4
    ordinary = [hooks for module in step._window._step._model.modules() for hooks in module._forward_hooks.values()]
    assert ordinary == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_verify_compares_statistics_too(engine: Engine) -> None:
    """The buffer is declared state: replays are verified against eager, and count nothing twice."""
    with deterministic():
        verified, step, watch = trajectory(engine, 1, "float16", 1, verify=3)
        plain, _, other = trajectory(engine, 1, "float16", 1)
    assert_same(plain, verified)
    assert (step.captures, step.report().failure) == (1, None)
    assert watch is not None
    assert other is not None
    assert watch.report() == other.report()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replayed_step_has_the_statistics_of_an_eager_one(engine: Engine) -> None:
    """The same numbers whether the step ran in Python, in a graph, or in a loop of the user's own."""
    with deterministic():
        graphed = trajectory(engine, 1, "float16", 1)[2]
        eager = trajectory((engine[0], "off"), 1, "float16", 1)[2]
    assert graphed is not None
    assert eager is not None
    assert graphed.report().rows == eager.report().rows


# ------------------------------------------------------------------------------------------------- planted faults


class Residual(nn.Module):
    """Two blocks with a branch that is added to its input, so that gradients of several consumers meet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tiny_resnet() -> nn.Module:
    """Return torchvision's ResNet without its last stage: float16 convolutions take their time on a CPU."""
    resnet = pytest.importorskip("torchvision").models.resnet
    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, 10)
    return model  # type: ignore[no-any-return]


def resnet50() -> nn.Module:
    return pytest.importorskip("torchvision").models.resnet50(num_classes=10)  # type: ignore[no-any-return]


IMAGES = {tiny_resnet: (4, 3, 32, 32), resnet50: (8, 3, 64, 64)}  # by builder


def classify(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def train(
    engine: Engine, model: nn.Module, shape: tuple[int, ...], scale: float, steps: int, **options: Any
) -> NumericsReport:
    """Train a model on noise in float16, and return what was found."""
    device, graph = engine
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    every, change = options.pop("every", 1), options.pop("change", {})
    watch = ampkit.debug.numerics(model, every=every)
    step = ampkit.graphed_step(
        classify,
        model,
        optimizer,
        policy="float16",
        scaler=ampkit.GradScaler(device, init_scale=scale),
        numerics=watch,
        graph=graph,
        on_failure="raise",
        **options,
    )
    made = torch.Generator().manual_seed(1)
    for i in range(steps):
        if i in change:
            with torch.no_grad():
                change[i](model)
        step(torch.randn(shape, generator=made).to(device), torch.randint(4, shape[:1], generator=made).to(device))
    assert (step.replays > 0) == (graph != "off")
    return watch.report()


KINDS = ["eager", "captured"]
MORE_KINDS = ["eager", pytest.param("captured", marks=pytest.mark.seeds)]  # of what a smaller model shows captured
FAULTY = {"eager": 0, "captured": 3}  # the step that goes wrong; step 3 is a replay


def kind_of(engine: Engine, kind: str) -> Engine:
    return engine if kind == "captured" else (engine[0], "off")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", MORE_KINDS)
@pytest.mark.parametrize("build", [tiny_resnet, pytest.param(resnet50, marks=[pytest.mark.cuda, pytest.mark.slow])])
def test_planted_overflow_of_a_resnet(engine: Engine, kind: str, build: Callable[[], nn.Module]) -> None:
    """One layer's weight times 1e4 overflows float16 in its forward: named, eagerly and in a replay."""

    def plant(model: Any) -> None:
        model.layer1[0].conv1.weight.mul_(1e4)

    with deterministic():
        report = train(
            kind_of(engine, kind), build(), IMAGES[build], 1024.0, FAULTY[kind] + 1, change={FAULTY[kind]: plant}
        )
    found = report.first_overflow
    assert found is not None
    assert (found.name, found.direction, found.what) == ("layer1.0.conv1", "forward", "output")
    assert str(found).startswith(f"first overflow: layer1.0.conv1, forward, step {FAULTY[kind]} (its output: ")
    assert str(found) in str(report)
    policy = ampkit.Policy.parse(report.advice[0].split("Policy.parse('")[1].split("')")[0])
    assert dict(policy.modules) == {"layer1.0.conv1": torch.float32}
    assert (report.safe_scale is None) == (kind == "eager")  # where there was no step but this one


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", MORE_KINDS)
@pytest.mark.parametrize("build", [tiny_resnet, pytest.param(resnet50, marks=[pytest.mark.cuda, pytest.mark.slow])])
@pytest.mark.slow
def test_planted_underflow_of_a_resnet(engine: Engine, kind: str, build: Callable[[], nn.Module]) -> None:
    """A BatchNorm with a weight of 1e-7 hands on nothing that float16 can hold: named, and a larger scale advised."""

    def plant(model: Any) -> None:
        model.layer3[0].bn2.weight.fill_(1e-7)

    with deterministic():
        report = train(
            kind_of(engine, kind), build(), IMAGES[build], 16.0, FAULTY[kind] + 1, change={FAULTY[kind]: plant}
        )
    found = report.first_underflow
    assert found is not None
    assert (found.name, found.direction, found.what) == ("layer3.0.bn2", "backward", "grad_input")
    assert (found.step, report.first_overflow) == (FAULTY[kind], None)
    assert report.safe_scale is not None
    assert report.safe_scale > 16.0
    assert report.advice == (
        f"A larger loss scale brings gradients back: GradScaler(init_scale={report.safe_scale:g}).",
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_overflow_in_backward_is_told_from_where_gradients_meet(engine: Engine, kind: str) -> None:
    """The module whose own share overflows is named, not the sum of shares that comes to the block before."""
    torch.manual_seed(0)
    model = Residual()
    with torch.no_grad():
        # Large weights behind small inputs: the forward stays small, the gradient grows by 1e6.
        model.blocks[1][0].weight.mul_(2e5)
        model.stem.weight.mul_(1e-4)
        model.stem.bias.mul_(1e-4)
        model.blocks[0][3].weight.mul_(1e-4)
        model.blocks[0][3].bias.mul_(1e-4)
        model.blocks[1][1].register_forward_pre_hook(lambda module, args: (args[0] + 0 * args[0].detach(),))
    report = train(kind_of(engine, kind), model, (8, 8), 2.0**15, steps=5)
    found = report.first_overflow
    assert found is not None
    assert (found.name, found.direction, found.what) == ("blocks.1.0", "backward", "grad_input")


@pytest.mark.parametrize("engine", ENGINES)
def test_overflow_of_a_weight_gradient_is_its_modules(engine: Engine) -> None:
    """A weight's gradient is a sum over the batch, which may overflow alone: the parameter is named too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    report = train(engine, model, (64, 8), 2.0**13, steps=5)
    found = report.first_overflow
    assert found is not None
    assert (found.name, found.direction, found.what) == ("1", "backward", "1.weight")


@pytest.mark.parametrize("engine", ENGINES)
def test_overflow_of_the_loss_is_nobodys(engine: Engine) -> None:
    """A loss scale that is too large by itself: the gradient is infinite before any module's backward."""
    torch.manual_seed(0)
    report = train(engine, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (4, 8), 2.0**24, steps=12)
    found = report.first_overflow
    assert found is not None
    assert (found.name, found.direction, found.what, found.step) == ("1", "backward", "grad_output", 0)
    assert report.safe_scale is not None
    assert 2.0**14 <= report.safe_scale < 2.0**24
    assert report.advice == (
        f"Start with a smaller loss scale: GradScaler(init_scale={report.safe_scale:g}).",
    ) or report.advice == ("The loss scale has backed off, and later steps are finite: nothing to do.",)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_skipped_step_makes_the_next_one_observed(engine: Engine) -> None:
    """With every=1000, an overflow that comes in step 9 and persists is named a step later; then it is observed no more
    than it is skipped."""
    torch.manual_seed(0)

    def plant(model: Any) -> None:
        model[0].weight.mul_(1e6)

    def settle(model: Any) -> None:
        model[0].weight.div_(1e6)

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    report = train(engine, model, (4, 8), 64.0, steps=20, every=1000, change={9: plant, 12: settle})
    found = report.first_overflow
    assert found is not None
    if engine[0] == "cpu":  # where nothing arrives late
        assert (found.step, report.observed) == (10, 1 + 3)
    assert (found.name, found.direction) == ("0", "forward")
    assert found.step > 9


class Tied(nn.Module):
    """A language model whose head has the weight of the embedding, and beside it a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.body, self.h = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.h.weight = self.emb.weight
        nn.init.zeros_(self.h.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.body(self.emb(x)))


def test_tied_weights_are_each_owners() -> None:
    """A head that overflows by a weight that broke before says so, by the head's name for it."""
    model = Tied()

    def run() -> None:
        # Looked up are the rows that did not break.
        model(torch.tensor([0, 1])).sum().backward()

    with torch.no_grad():
        model.emb.weight[5] = torch.inf
    with ampkit.debug.numerics(model, every=1) as watch:
        run()
        watch.step()
    found = watch.report().first_overflow
    assert found is not None
    assert (found.name, found.what) == ("h", "output")
    assert found.detail.endswith("; h.weight is not finite itself: it broke in an earlier step")


@pytest.mark.parametrize("zero", [False, True])
def test_a_tied_head_that_hands_on_nothing(zero: bool) -> None:
    """Gradients in float16 are gone behind a head with a tied weight: an underflow, unless that weight is zero."""
    torch.manual_seed(0)
    model = Tied()
    with torch.no_grad():
        model.emb.weight.fill_(0.0 if zero else 2.0**-14)  # what it hands on is below 2**-25
    with ampkit.debug.numerics(model, every=1) as watch:
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.tensor([0, 1])).float().sum() * 2.0**-14
        loss.backward()
        watch.step()
    found = watch.report().first_underflow
    assert (found is None) == zero
    if found is not None:
        assert (found.name, found.what) == ("h", "grad_input")


def test_a_mask_is_no_overflow() -> None:
    """Values that are -inf in good steps are not taken for the beginning of an overflow."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.score, self.head = nn.Identity(), nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.mask(self.score(x).masked_fill(torch.eye(4, dtype=torch.bool, device=x.device), -torch.inf))
            return self.head(scores.softmax(-1).half())

    def plant(model: Any) -> None:
        model.head.weight.fill_(7e4)  # its cast is inf

    torch.manual_seed(0)
    report = train(("cpu", "emulate"), Masked(), (4, 8), 16.0, steps=8, change={6: plant})
    assert report.first_overflow is not None
    assert report.first_overflow.step == 6
    assert report.first_overflow.name == "head"


# ------------------------------------------------------------------------------------------- loops of the user's own


def loop(scaler: torch.amp.GradScaler, device: str, *, late: bool = False, accumulate: int = 1) -> NumericsReport:
    """Train with torch's own loop, with an overflow, and an evaluation between two steps."""
    model = make_net(device, dropout=0.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    batches = iter(make_batches(device, [8] * 6 * accumulate, overflow_at=(4 * accumulate,)))
    with ampkit.debug.numerics(model, every=1, scaler=None if late else scaler) as watch:
        for _ in range(6):
            for _ in range(accumulate):
                with torch.autocast(device, torch.float16):
                    loss = boosted_loss(model, *next(batches))[0]
                scaler.scale(loss / accumulate).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step(scaler if late else None)
            model.eval()
            with torch.no_grad():
                model(torch.full((2, 3, 8, 8), torch.nan, device=device))
            model.train()
    assert all(not module._forward_hooks for module in model.modules())
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    return watch.report()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ampkit.GradScaler])
@pytest.mark.quick(2)
def test_a_loop_of_ones_own(device: str, late: bool, kind: type[torch.amp.GradScaler]) -> None:
    """Every step observed, gradients as they are before unscale_, the scale of the step, eval mode left out."""
    report = loop(kind(device, init_scale=256.0), device, late=late)
    assert (report.steps, report.observed, report.step) == (6, 6, 5)
    assert report.scale == 128.0
    assert report.first_overflow is not None
    assert (report.first_overflow.step, report.first_overflow.direction) == (4, "backward")
    largest = max(row.largest for row in report.rows if row.what == "gradient")
    assert 128 * 0.01 < largest < 128 * 10
    assert sum(row.nonfinite for row in report.rows) == 0


def test_fine_tuning_in_eval_mode_is_measured() -> None:
    """A model that trains in eval mode, its BatchNorm frozen: all is measured but what runs without gradients."""
    model = make_net("cpu").eval()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with ampkit.debug.numerics(model, every=1) as watch:
        for batch in make_batches("cpu", [8] * 2):
            boosted_loss(model, *batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    model(torch.full((2, 3, 8, 8), torch.nan))
            watch.step()
    report = watch.report()
    rows = {row[:2]: row for row in report.rows}
    assert report.never_called == ()
    assert rows["conv", "input"].count == 8 * 3 * 8 * 8
    assert {("conv", "output"), ("head", "grad_output"), ("head", "grad_input")} <= rows.keys()
    assert sum(row.nonfinite for row in report.rows) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_loop_counts_once(reentrant: bool) -> None:
    """A reentrant one runs its forward without gradients: in train mode it is measured all the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    rows = observed(
        model, lambda: checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()
    )
    assert (rows["0", "input"].count, rows["0", "output"].count, rows["0", "grad_output"].count) == (8, 8, 8)


def test_accumulated_gradients_are_those_of_the_window() -> None:
    """Forward statistics add up over micro-batches; a parameter's gradient is that of the window, counted once."""
    single = {row[:2]: row for row in loop(ampkit.GradScaler("cpu", 256.0), "cpu").rows}
    double = {row[:2]: row for row in loop(ampkit.GradScaler("cpu", 256.0), "cpu", accumulate=2).rows}
    assert double["conv", "output"].count == 2 * single["conv", "output"].count
    assert double["conv", "grad_output"].count == 2 * single["conv", "grad_output"].count
    assert double["conv.weight", "gradient"].count == single["conv.weight", "gradient"].count


def test_a_loop_has_the_statistics_of_a_graphed_step() -> None:
    """The same training, by hand and by graphed_step: the same rows."""

    def batches() -> Any:
        return make_batches("cpu", [8] * 3)

    def make() -> tuple[Any, Any, Any]:
        model = make_net("cpu", dropout=0.0)
        return model, OPTIMIZERS["sgd"](model.parameters()), ampkit.GradScaler("cpu", 256.0)

    model, optimizer, scaler = make()
    watch = ampkit.debug.numerics(model, every=1)
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy="float16", scaler=scaler, numerics=watch, graph="off"
    )
    for batch in batches():
        step(*batch)
    model, optimizer, scaler = make()
    with ampkit.debug.numerics(model, every=1, scaler=scaler) as by_hand:
        for batch in batches():
            with ampkit.Policy.parse("float16").autocast("cpu"):
                loss = boosted_loss(model, *batch)[0]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            by_hand.step()
    assert {row[:2]: row for row in by_hand.report().rows} == {row[:2]: row for row in watch.report().rows}


def test_an_exception_leaves_no_hooks() -> None:
    """A loop that raises in mid-step: the hooks are gone, what was found is there, and it can be entered again."""
    model = nn.Linear(4, 4)
    watch = ampkit.debug.numerics(model, every=1)

    def run() -> None:
        with watch:
            model(torch.ones(2, 4)).sum().backward()
            watch.step()
            model(torch.full((2, 4), torch.nan))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert not model._forward_hooks
    assert watch.report().observed == 1
    with watch:
        model(torch.ones(2, 4)).sum().backward()
        watch.step()
    assert watch.report().observed == 2
    assert all(row.nonfinite == 0 for row in watch.report().rows)


# ------------------------------------------------------------------------------------------------- kinds of modules


def observed(model: nn.Module, run: Callable[[], Any]) -> dict[tuple[str, str], Any]:
    """Return the statistics of one step of a loop, by name and kind."""
    with ampkit.debug.numerics(model, every=1) as watch:
        run()
        watch.step()
    return {(row.name, row.what): row for row in watch.report().rows}


def test_reused_modules_add_up() -> None:
    """A module that is called three times, once without grad: forward thrice, backward twice."""
    model = nn.ModuleDict({"layer": nn.Linear(4, 4), "act": nn.ReLU(inplace=True)})

    def run() -> None:
        x = model["act"](model["layer"](torch.ones(2, 4)))
        model["act"](model["layer"](x * 4)).sum().backward()
        with torch.no_grad():
            model["layer"](torch.full((5, 4), 100.0))

    rows = observed(model, run)
    assert rows["layer", "output"].count == (2 + 2 + 5) * 4
    assert rows["layer", "input"].largest == 100.0
    assert rows["layer", "grad_output"].count == 2 * 2 * 4
    assert rows["layer", "grad_input"].count == 2 * 4  # the batch has no gradient
    assert rows["act", "grad_input"].count == 2 * 2 * 4


@pytest.mark.parametrize(
    ("values", "largest"), [([1.5, math.inf, -3.0], 2.0), ([math.nan, 65504.0], 2.0**15), ([math.inf, 0.0], 0.0)]
)
def test_the_largest_value_beside_infinity(values: list[float], largest: float) -> None:
    """Where some values are not finite, the largest of the others is told to within a factor of two."""
    model = nn.Sequential(nn.Linear(len(values), 1))
    rows = observed(model, lambda: model(torch.tensor(values)))
    assert (rows["0", "input"].largest, rows["0", "input"].nonfinite) == (largest, 1)


def test_outputs_of_any_kind() -> None:
    """Tuples, dicts, integers and strings as outputs, keywords as inputs, a module that is never called."""

    class Odd(nn.Module):
        def forward(self, *, x: Tensor, flag: str) -> Any:
            return {"pair": (x * 2, x.argmax()), "flag": flag, "complex": torch.complex(x, x), "none": None}

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.unused, self.own = Odd(), nn.Linear(2, 2), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Any:
            return self.odd(x=x * self.own, flag="yes")

    model = Holder()

    def run() -> None:
        out = model(torch.ones(2, 4))
        (out["pair"][0].sum() + out["complex"].abs().sum()).backward()

    rows = observed(model, run)
    assert rows["odd", "output"].count == 8 + 2 * 8
    assert rows["odd", "grad_output"].count == 8 + 2 * 8
    assert rows["odd", "grad_input"].count == 3 * 8  # x is used in three places
    assert rows["Holder", "output"].count == 24
    assert ("own", "gradient") in rows
    assert not any(name == "unused" for name, _ in rows)
    watch = ampkit.debug.numerics(model, every=1)
    with watch:
        run()
        watch.step()
    assert watch.report().never_called == ("unused",)
    assert "never called, or inside compiled code: unused" in str(watch.report())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_counts_once(reentrant: bool) -> None:
    """What a checkpoint computes again in backward is no second forward; gradients are measured all the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def run() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        checkpoint(model, x * 2, use_reentrant=reentrant).sum().backward()

    rows = observed(model, run)
    for name in "012":
        assert rows[name, "output"].count == 8
        assert rows[name, "grad_output"].count == 8
        assert rows[name, "grad_input"].count == 8


def test_names_under_ddp() -> None:
    """DistributedDataParallel gives the names of the module in it; skips are then not reacted to."""
    if dist.is_initialized():
        pytest.skip("a process group of somebody else")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model = nn.parallel.DistributedDataParallel(inner)
        rows = observed(model, lambda: model(torch.ones(2, 4)).sum().backward())
    finally:
        dist.destroy_process_group()
    assert {("0", "output"), ("1.weight", "gradient"), ("1", "grad_input")} <= rows.keys()


def test_compiled_modules_are_measured_from_outside() -> None:
    """A torch.compile of a part is one module; of what is in it the parameters remain. In place it is refused."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    model[0] = torch.compile(model[0], backend="eager")
    watch = ampkit.debug.numerics(model, every=1)
    with watch:
        model(torch.ones(2, 4)).sum().backward()
        watch.step()
    report = watch.report()
    names = {(row.name, row.what) for row in report.rows}
    assert {("0", "output"), ("0", "grad_output"), ("0.0.weight", "gradient"), ("1", "output")} <= names
    assert ("0.0", "output") not in names
    assert report.compiled == ("0",)
    assert "compiled, measured from outside: 0" in str(report)
    model[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"numerics\(model\): 1 was compiled in place"):
        ampkit.debug.numerics(model)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_functions_hold_nothing_that_is_measured() -> None:
    """A compiled loss, first compiled in an observed step: modules never called, parameters seen."""
    torch.compiler.reset()
    model, compiled = make_net("cpu", dropout=0.0), []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    loss_fn = torch.compile(boosted_loss, backend=backend)
    watch = ampkit.debug.numerics(model, every=2)
    step = ampkit.graphed_step(
        loss_fn, model, OPTIMIZERS["sgd"](model.parameters()), numerics=watch, graph="emulate", on_failure="raise"
    )
    for batch in make_batches("cpu", [8] * 10):
        step(*batch)
    assert compiled == [compiled[0]] * 2  # with hooks and without: the same operations
    assert (step.captures, step.replays) == (2, 4)
    report = watch.report()
    assert {row.what for row in report.rows} == {"gradient"}
    assert report.never_called == ("conv", "norm", "dropout", "head")
    torch.compiler.reset()


# -------------------------------------------------------------------------------------------------- report, arguments


def test_flushed_is_counted_by_exponents() -> None:
    """Of float32 gradients, the share that float16 would round to zero at the current scale, value by value."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    scaler = ampkit.GradScaler("cpu", init_scale=4.0)
    x = torch.exp2(torch.linspace(-40.0, 4.0, 64)).expand(3, 64)
    with ampkit.debug.numerics(model, every=1, scaler=scaler) as watch:
        scaler.scale(model(x).sum()).backward()
        watch.step()
    (row,) = [row for row in watch.report().rows if row.name == "weight"]
    grad = model.weight.grad
    assert grad is not None
    lost = int((grad.half() == 0).sum())
    assert 0 < lost < grad.numel()
    assert (row.flushed, row.count) == (lost, grad.numel())
    assert row.fraction_flushed == lost / grad.numel()
    assert sum(row.exponents.values()) == row.count
    assert (min(row.exponents), row.dtype) == (-32, "float32")


def test_report_and_figures() -> None:
    """The text has one line per fact; to_dict is JSON; figures are floats; before the first step they say so."""
    watch = ampkit.debug.numerics(make_net("cpu"))
    assert str(watch.report()) == "numerics: 0 steps, none of them observed."
    assert watch.figures() == {}
    _, _, trained = trajectory(("cpu", "emulate"), 3, "float16", 1)
    assert trained is not None
    report = trained.report()
    text = str(report)
    # Steps 3 and 11 are skipped: 4 and 12 are observed for that, 12 is so anyway.
    assert text.startswith("numerics: 7 of 16 steps observed, the last one step 15; loss scale ")
    assert "first overflow: head, backward, step 3 (its grad_output: 80 of 80 values are not finite already" in text
    assert "conv.weight" in report.table()
    assert len(report.table().splitlines()) == len(report.rows) + 1
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["name"] == "conv"
    figures = trained.figures()
    assert figures["step"] == 15.0
    assert figures["safe_scale"] == report.safe_scale
    assert set(figures) == {
        "step",
        "scale",
        "largest_gradient",
        "nonfinite_gradients",
        "flushed_in_float16",
        "safe_scale",
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("every", "lasts"), [(1, False), (100, True), (100, False)])
def test_a_stop_names_the_first_layer(engine: Engine, every: int, lasts: bool) -> None:
    """E3: within 16 calls `nonfinite="stop"` names the layer, if the step or a later such one was observed.

    With a large `every` a single bad batch is not observed, and the error says what to write.
    """
    device, graph = engine
    model = make_net(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    watch = ampkit.debug.numerics(model, every=every)
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy="bfloat16", nonfinite="stop", numerics=watch, graph=graph
    )
    for batch in make_batches(device, [16] * 10):
        step(*batch)
    bad, *others = make_batches(device, [16] * 16)
    images = bad[0] * math.nan
    named = r"has found the first overflow: conv, forward, step (\d+) \(its input: "
    replays = device == "cuda" and every == 1  # another observed step would be a first one, which is captured
    feed = [(images, *bad[1:]), *((images if lasts else other[0], *other[1:]) for other in others)]
    with no_sync() if replays else nullcontext(), pytest.raises(ampkit.NonfiniteError) as raised:
        [step(*batch) for batch in feed]
    assert "in call 11, counted from 1" in str(raised.value)
    found = re.search(named, str(raised.value))
    if every == 1:
        assert found is not None
        assert int(found[1]) == 10
    elif lasts:
        assert found is not None
        assert 10 < int(found[1]) < 26
    else:
        assert "numerics=ampkit.debug.numerics(model, every=1) names the first layer" in str(raised.value)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
@pytest.mark.parametrize("before", range(4))
@pytest.mark.quick(5)
def test_a_stop_on_a_late_device(engine: Engine, accumulate: int, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """E3: whatever copies have arrived, a bad step is observed before `nonfinite="stop"` raises, within 16 calls.

    With `accumulate=4` another window would go beyond them, so there the error says what to write.
    """
    device, graph = engine
    take = AsyncCopies.take
    monkeypatch.setattr(AsyncCopies, "take", lambda self, *, wait=False: take(self, wait=True) if wait else [])
    model = make_net(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = ampkit.graphed_step(
        boosted_loss,
        model,
        optimizer,
        policy="bfloat16",
        nonfinite="stop",
        numerics=ampkit.debug.numerics(model, every=100),
        accumulate=accumulate,
        graph=graph,
    )
    windows = 5 + before  # so that the copies of counters begin elsewhere
    good = windows * accumulate
    for batch in make_batches(device, [16] * good):
        step(*batch)
    made: list[Any] = []
    bad = make_batches(device, [16] * (accumulate + 16))
    with pytest.raises(ampkit.NonfiniteError) as raised:
        made += (step(images * math.nan, *others) for images, *others in bad)
    assert len(made) - accumulate < 16
    assert f"{windows + 1}, counted from 1" in str(raised.value).replace(f" (accumulate={accumulate})", "")
    found = re.search(r"has found the first overflow: conv, forward, step (\d+) ", str(raised.value))
    assert (found is not None) == (accumulate < 4)
    assert found is None or int(found[1]) >= windows


def test_a_report_of_zeros_is_json() -> None:
    """Where all gradients are zero no scale is too large: inf in the report, None in JSON, which has no inf."""
    model = nn.Linear(2, 2)
    with ampkit.debug.numerics(model, every=1) as watch:
        (model(torch.ones(1, 2)) * 0.0).sum().backward()
        watch.step()
    report = watch.report()
    assert report.safe_scale == math.inf
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["safe_scale"] is None
    assert "safe_scale" not in watch.figures()
    json.dumps(watch.figures(), allow_nan=False)


def test_wrong_use() -> None:
    """Each mistake is told with what to write instead."""
    model = make_net("cpu")
    with pytest.raises(ValueError, match=r"numerics\(model=str\): expected a torch.nn.Module"):
        ampkit.debug.numerics("model")  # type: ignore[arg-type]
    for every in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"numerics\(every=.*\): expected an int of at least 1"):
            ampkit.debug.numerics(model, every=every)  # type: ignore[arg-type]
    watch = ampkit.debug.numerics(model)
    with pytest.raises(ValueError, match=r"it ends a step within `with numerics"):
        watch.step()

    def step_of(other: nn.Module) -> Any:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        return ampkit.graphed_step(boosted_loss, other, optimizer, numerics=watch, graph="off")

    with pytest.raises(ValueError, match="it was made for another model"):
        step_of(copy.deepcopy(model))
    step_of(model)
    with pytest.raises(ValueError, match="it is in use already"):
        step_of(model)
    with pytest.raises(ValueError, match="a captured step measures with it"):
        watch.__enter__()


@pytest.mark.cuda
def test_observed_replays_never_wait() -> None:
    """No host read in observed and other replays, the copies to the host included; all of them arrive."""
    model = make_net("cuda")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    watch = ampkit.debug.numerics(model, every=2)
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy="float16", max_norm=1.0, numerics=watch, on_failure="raise"
    )
    batches = make_batches("cuda", [16] * 24, overflow_at=(14,))
    for batch in batches[:10]:
        step(*batch)
    with no_sync():
        for batch in batches[10:]:
            step(*batch)
            watch.figures()
    report = watch.report()
    assert step.captures == 2
    assert report.steps == 24
    assert report.step in (22, 23)  # behind a skipped step the next one is observed, whenever the host learns of it
    assert report.observed >= 12
    assert report.first_overflow is not None
    assert report.first_overflow.step >= 14
