"""What the tools of debug say of layers in float8: numerics, value by value, and compare beside bfloat16."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DEVICES, ENGINES, assert_same, deterministic
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import Policy, debug
from ampkit._precision import float8
from ampkit.debug import NumericsRow
from ampkit.debug._numerics.measurements import Measurements

pytest.importorskip("torchao.float8", reason="needs torchao: pip install 'ampkit[float8]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*torchao emulates them")

cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch that was built with CUDA")

RECIPES = list(float8.RECIPES)
TENSORWISE, ROWWISE, GW_HP = RECIPES
# By recipe and tensor: over which dimension of (rows, features) there is one scale, in each of the two products; both
# for one scale over all. Weights are (outputs, inputs).
SCALES: dict[str, dict[str, list[int | None]]] = {
    TENSORWISE: {"input": [None], "weight": [None], "grad_output": [None]},
    ROWWISE: {"input": [1, 0], "weight": [1, 0], "grad_output": [1, 0]},
    GW_HP: {"input": [1], "weight": [1, None], "grad_output": [1]},
}


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Values from 2**-40 to 2**4, and zeros."""
    made = torch.Generator().manual_seed(seed)
    powers = torch.randint(-44, 4, shape, generator=made).float()
    return torch.randn(shape, generator=made) * torch.where(powers < -40, 0.0, powers.exp2())


def flushed(recipe: str, what: str, tensor: Tensor) -> int:
    """Return how many values float8 makes zero, by the formula of the recipe, value by value."""
    e5m2 = recipe == TENSORWISE and what == "grad_output"
    largest, half_of_smallest = (57344.0, 2.0**-17) if e5m2 else (448.0, 2.0**-10)
    rows = tensor.double().reshape(-1, tensor.shape[-1])
    lost = torch.zeros(rows.shape, dtype=torch.bool)
    for dim in SCALES[recipe][what]:
        largest_of = rows.abs().amax() if dim is None else rows.abs().amax(dim, keepdim=True)
        scale = (largest / largest_of.clamp(min=1e-12)).float()
        if recipe != TENSORWISE:
            scale = torch.tensor([2.0 ** math.floor(math.log2(each)) for each in scale.flatten()]).view(scale.shape)
        lost |= (rows != 0) & ((rows.float() * scale).abs() <= half_of_smallest)
    return int(lost.sum())


def rows_of(report: Any, name: str = "0") -> dict[str, NumericsRow]:
    return {row.what: row for row in report.rows if row.name == name and row.in_float8}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_by_hand(recipe: str, device: str) -> None:
    """E1: of input, weight and gradient of the output: what becomes zero in float8. Nothing saturates."""
    policy = Policy(compute="bfloat16", modules={"0": recipe})
    model: Any = policy.apply(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))).to(device)
    with torch.no_grad():
        model[0].weight.copy_(wide(64, 32))
    x, gradient = wide(4, 16, 32, seed=1).to(device), wide(4, 16, 64, seed=2).to(device, torch.bfloat16)
    with debug.numerics(model, every=1) as watch, policy.autocast(device):
        model[0](x).backward(gradient)
        watch.step()
    rows = rows_of(watch.report())
    cast = {"input": x.bfloat16(), "weight": model[0].weight.detach(), "grad_output": gradient}
    assert list(rows) == ["input", "weight", "grad_output"]
    for what, tensor in cast.items():
        found = rows[what]
        expected = flushed(recipe, what, tensor.cpu())
        assert (found.in_float8, found.flushed_in_float8) == (tensor.numel(), expected), what
        assert found.saturated_in_float8 == 0
        assert found.fraction_flushed_in_float8 == expected / tensor.numel()
        assert expected
    table = watch.report().table()
    assert table.splitlines()[0].endswith("flushed in fp16  flushed in fp8  saturated")
    line = next(line for line in table.splitlines() if "weight" in line)
    assert line.split()[-2:] == [f"{rows['weight'].fraction_flushed_in_float8:.1%}", "0.0%"]


def test_what_is_beyond_the_range_is_counted() -> None:
    """No recipe of today makes such a scale, so it is asked with one that is too large."""
    torchao_utils = pytest.importorskip("torchao.float8.float8_utils")
    x, scale = torch.tensor([[1.0, -2.0, 3.0, 0.0]] * 16), torch.tensor(200.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchao_utils, "tensor_to_scale", lambda *_, **__: scale)
        assert float8.count_float8(TENSORWISE, "input", x).tolist() == [64, 0, 16]  # 600; 400 is within
        scale = torch.tensor(231.9)
        assert float8.count_float8(TENSORWISE, "input", x).tolist() == [64, 0, 16]  # 463.8 is rounded to 448
        scale = torch.tensor(2.0**-10)
        assert float8.count_float8(TENSORWISE, "input", x).tolist() == [64, 16, 0]  # half of the smallest; ties to even


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_values_that_are_not_finite(wrong: float) -> None:
    """An inf makes a scale of 0, so all else becomes zero; a nan makes all of it nan."""
    x = torch.ones(16, 16)
    x[3, 5] = wrong
    assert float8.count_float8(TENSORWISE, "input", x).tolist() == [256, 255 if wrong == math.inf else 0, 0]
    assert float8.count_float8(GW_HP, "input", x).tolist() == [256, 15 if wrong == math.inf else 0, 0]


class Net(nn.Module):
    """A stem, two layers in float8, one of them in a checkpoint, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.head = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.up(x).relu(), self.stem(x), use_reentrant=False)
        return self.head(self.down(x))


def loss_fn(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def batches(device: str = "cpu") -> Iterator[Tensor]:
    seed = 0
    while True:
        yield wide(16, 32, seed=(seed := seed + 1)).to(device)


POLICIES = {
    "named": Policy(compute="bfloat16", modules={"up|down": ROWWISE}),
    "chosen": Policy(compute="float8"),
    "scaled": Policy(compute="float16", modules={"up|down": "float8"}),
}


def trained(
    policy: Policy, graph: str, every: int | None, device: str = "cpu", **options: Any
) -> tuple[Any, Any, Any, Tensor]:
    """Return the state after twelve calls, the step, what has watched it, and the weight in the last optimizer step."""
    torch.manual_seed(0)
    model = policy.apply(Net()).to(device)
    with torch.no_grad():
        model.down.weight.copy_(wide(32, 32))
    watch = None if every is None else debug.numerics(model, every=every)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)
    step = ampkit.graphed_step(
        loss_fn, model, optimizer, policy=policy, graph=graph, numerics=watch, on_failure="raise", **options
    )
    feed, losses, weight = batches(device), [], model.down.weight.detach().clone()
    for call in range(12):
        if call % options.get("accumulate", 1) == 0:
            weight.copy_(model.down.weight.detach())
        losses.append(step(next(feed)).loss)
    return (losses, model.state_dict(), optimizer.state_dict()), step, watch, weight


@pytest.mark.quick(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["plain", "accumulate"])
@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_captured_step(policy: str, how: str, engine: tuple[str, str]) -> None:
    """E1: it changes no bit, and a replay counts what an eager step counts, over all micro-batches."""
    device, graph = engine
    rules = POLICIES[policy]
    if policy == "chosen" and device == "cuda":  # such small layers gain nothing there
        rules = Policy(compute="bfloat16", modules={"up|down": "float8"})
    options: dict[str, Any] = {"accumulate": 2} if how == "accumulate" else {}
    with deterministic():
        expected, *_ = trained(rules, "off", None, device, **options)
        found, _, eager, _ = trained(rules, "off", 1, device, **options)
        replayed, step, watch, weight = trained(rules, graph, 1, device, **options)
    assert_same(found, expected)
    assert_same(replayed, expected)
    assert step.replays >= 4
    report = watch.report()
    assert report.rows == eager.report().rows
    calls = options.get("accumulate", 1)
    for name in ("up", "down"):
        rows = rows_of(report, name)
        assert list(rows) == ["input", "weight", "grad_output"]
        assert {row.in_float8 for row in rows.values()} == {calls * 16 * 32, calls * 32 * 32}
    lost = flushed(ROWWISE if policy == "named" else TENSORWISE, "weight", weight.cpu())
    assert rows["weight"].flushed_in_float8 == calls * lost > 0
    cast = [row for row in report.rows if row.in_float8]
    share = sum(row.flushed_in_float8 for row in cast) / sum(row.in_float8 for row in cast)
    assert watch.figures()["flushed_in_float8"] == share
    assert not rows_of(report, "stem")
    assert not report.never_called


@pytest.mark.slow
def test_wrapped_models(tmp_path: Path) -> None:
    """Under DDP and fully_shard the layers inside are counted, with the numbers of the model alone."""
    policy, found = POLICIES["named"], []
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for wrap in (lambda model: model, nn.parallel.DistributedDataParallel, fully_shard):
            torch.manual_seed(0)
            model = policy.apply(Net())
            with torch.no_grad():
                model.down.weight.copy_(wide(32, 32))
            wrapped = wrap(model)
            watch = debug.numerics(wrapped, every=1)
            optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-6)
            step = ampkit.graphed_step(loss_fn, wrapped, optimizer, policy=policy, graph="emulate", numerics=watch)
            feed = batches()
            for _ in range(8):
                step(next(feed))
            rows = watch.report().rows
            found.append({(row.name, row.what): row[-3:] for row in rows if row.in_float8})
            step.close()
            del wrapped, step, optimizer
        assert found[0] == found[1] == found[2]
        assert found[0]["down", "weight"][1]
        assert len(found[0]) == 6
    finally:
        dist.destroy_process_group()


def test_what_is_not_cast_is_not_counted() -> None:
    """Layers in evaluation mode, batches that are no multiple of 16, and everything without a float8 rule."""
    policy = Policy(compute="bfloat16", modules={"0": "float8", "1": "float8"})
    model: Any = policy.apply(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    model[1].eval()
    with debug.numerics(model, every=1) as watch:
        model(wide(16, 32)).sum().backward()
        with pytest.warns(ampkit._errors.AmpkitWarning, match="got 8 rows"):
            model(wide(8, 32)).sum().backward()
        watch.step()
    rows = {(row.name, row.what): (row.count, row.in_float8) for row in watch.report().rows}
    assert rows["0", "input"] == (24 * 32, 16 * 32)
    assert {in_float8 for (name, _), (_, in_float8) in rows.items() if name != "0"} == {0}
    assert {name for name, what in rows if what == "weight"} == {"0"}


def test_layers_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not watched is not measured while another one is."""
    policy = Policy(compute="bfloat16", modules={"0": "float8"})
    model, other = (policy.apply(nn.Sequential(nn.Linear(32, 32))) for _ in range(2))
    counted: list[str] = []
    add = Measurements.add_float8
    monkeypatch.setattr(Measurements, "add_float8", lambda *args: counted.append(args[3]) or add(*args))
    with debug.numerics(model, every=1) as watch:
        other(wide(16, 32)).sum().backward()
        assert not counted
        model(wide(16, 32)).sum().backward()
        watch.step()
    assert counted == ["weight", "input", "grad_output"]
    assert not float8._WATCHES


def test_an_overflow_names_the_weight() -> None:
    """A weight in float8 that is not finite is what had broken before."""
    policy = Policy(compute="bfloat16", modules={"1": "float8"})
    model: Any = policy.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    with torch.no_grad():
        model[1].weight[0, 0] = math.inf
    with debug.numerics(model, every=1) as watch:
        model(wide(16, 32)).sum().backward()
        watch.step()
    found = watch.report().first_overflow
    assert found is not None
    assert (found.name, found.direction, found.what) == ("1", "forward", "weight")
    assert "1.weight is not finite itself" in found.detail


@pytest.mark.parametrize("recipe", RECIPES)
def test_compare_with_bfloat16(recipe: str) -> None:
    """E1: two models, one under a float8 rule: layers before the first in float8 are equal bit by bit."""
    plain = Net()
    low, f8 = Policy(compute="bfloat16"), Policy(compute="bfloat16", modules={"up|down": recipe})
    models = plain, f8.apply(copy.deepcopy(plain))
    x = torch.randn(16, 32)

    def run(model: nn.Module, policy: Policy) -> Tensor:
        with policy.autocast("cpu"):
            loss = loss_fn(model, x)
        loss.backward()
        return loss

    before = copy.deepcopy([model.state_dict() for model in models])
    compared = debug.compare(lambda: run(models[0], low), lambda: run(models[1], f8), model=models, min_db=10)
    assert not compared.only_a
    assert not compared.only_b
    by_name = {(row.path, row.direction): row for row in compared.rows}
    assert by_name["stem", "forward"].equal
    assert compared.first is None
    for layer in ("up", "down"):
        assert 20 < by_name[layer, "forward"].db < 40
        assert not by_name[f"{layer}.weight", "gradient"].equal
    assert_same([model.state_dict() for model in models], before)
    bitwise = debug.compare(lambda: run(models[0], low), lambda: run(models[1], f8), model=models)
    assert bitwise.first is not None
    assert bitwise.first.path == "up"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda_build)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_forecast(recipe: str, device: str) -> None:
    """P2: a tensor that torchao makes of others has no memory of its own, and the step's input is the batch alone."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    optimizer, x = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(512, 256)
    peaks = []
    for modules in ({}, {"1": recipe}):
        policy = Policy(compute="bfloat16", modules=modules)
        profile = debug.forecast(loss_fn, model, optimizer, (x,), policy=policy, device=device)
        assert set(profile.series["input"]) == {x.nbytes}
        peaks.append(profile.at_peak["activation"])
    assert peaks[0] - peaks[1] == 256 * 256 * 2  # the weight is kept as it is, and not as its cast to bfloat16
