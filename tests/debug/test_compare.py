"""compare: the tensor where two runs part is named, its distance is right, and nothing of a run is left behind."""

import copy
import math
import random
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import DEVICES, ENGINES, assert_same, deterministic
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.debug import Comparison, compare


class Net(nn.Module):
    """Two blocks with dropout and BatchNorm; a part of it can be disturbed in forward or backward."""

    def __init__(self, disturbed=None, factor=1.0, backward=False):
        super().__init__()
        self.stem = nn.Linear(8, 16, bias=False)  # in front of BatchNorm its gradient would be noise
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 4))
        for path, module in self.named_modules():
            if path == disturbed:
                module.register_forward_hook(partial(_disturb, factor, backward))

    def forward(self, x):
        return self.blocks(self.norm(self.stem(x)))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def _disturb(factor, backward, module, args, output):
    return _Scaled.apply(output, factor) if backward else output * factor


def loss_of(model, x, y):
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def batch(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)
    return x.to(device), y.to(device)


def pair(device="cpu", **disturbed):
    a, b = Net().to(device), Net(**disturbed).to(device)
    b.load_state_dict(a.state_dict())
    return a, b


def two_models(a, b, **options) -> Comparison:
    """Compare the two; compare calls the functions in this order."""
    x, y = batch()
    return compare(lambda: loss_of(a, x, y), lambda: loss_of(b, x, y), model=(a, b), **options)


# ------------------------------------------------------------------------------------------------------ where they part


def test_equal_runs():
    """Dropout, Python's and numpy's generator draw the same, BatchNorm starts from the same statistics."""
    model, generator = Net(), torch.Generator().manual_seed(3)

    def run():
        shift = random.random() + np.random.default_rng(np.random.randint(9)).random()
        shift = shift + torch.rand((), generator=generator)
        return {"loss": loss_of(model, *batch()), "drawn": shift}

    compared = compare(run, run, model=model, generators=[generator])
    assert compared.first is None
    assert compared.worst is None
    assert not compared.only_a
    assert not compared.only_b
    directions = [row.direction for row in compared.rows]
    assert list(dict.fromkeys(directions)) == ["forward", "backward", "gradient", "state", "result"]
    assert all(row.equal and row.ulp == 0 and row.db == math.inf for row in compared.rows)
    assert str(compared).startswith(f"{len(compared.rows)} tensors are equal bit by bit")


@pytest.mark.parametrize("path", ["stem", "norm", "blocks.3", "blocks", ""])
def test_first_forward(path):
    """The module whose output is off is named, not the modules behind it nor the block around it."""
    compared = two_models(*pair(disturbed=path, factor=1.001))
    assert compared.first is not None
    assert (compared.first.path, compared.first.direction) == (path, "forward")
    assert compared.first.db == pytest.approx(60.0, abs=0.01)  # 20 log10(1 / 0.001)
    assert (path or "(model)") + ", forward: SQNR 60.0 dB" in str(compared)


def test_first_backward():
    """A wrong backward leaves every output alone; the gradients behind it are off, in the order of the backward."""
    compared = two_models(*pair(disturbed="norm", factor=1.01, backward=True))
    assert compared.first is not None
    assert (compared.first.path, compared.first.direction) == ("stem", "backward")
    assert compared.first.db == pytest.approx(40.0, abs=0.01)
    off = {(row.path, row.direction) for row in compared.rows if not row.equal}
    assert ("stem.weight", "gradient") in off
    assert ("norm.weight", "gradient") in off
    assert not {path for path, _ in off if path.startswith("blocks")}


def test_order_is_that_of_the_calls():
    """Outputs in the order of forward, gradients in the order of backward, repeated calls apart."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    compared = compare(*[lambda: model(torch.ones(1, 4)).sum().backward()] * 2, model=model)
    order = [(row.path, row.direction, row.call) for row in compared.rows if row.direction in ("forward", "backward")]
    assert order == [
        ("0", "forward", 1),
        ("1", "forward", 1),
        ("0", "forward", 2),
        ("", "forward", 1),
        ("0", "backward", 2),
        ("", "backward", 1),
        ("1", "backward", 1),
        ("0", "backward", 1),
    ]


def test_policies():
    """Two policies on one model: bitwise they part at the first matrix multiplication, in decibels nowhere."""
    torch.manual_seed(0)
    model, (x, y) = Net(), batch()

    def run(policy):
        with ampkit.Policy.parse(policy).autocast("cpu"):
            return loss_of(model, x, y)

    runs = partial(run, "float32"), partial(run, "bfloat16")
    compared = compare(*runs, model=model)
    assert compared.first is not None
    assert (compared.first.path, compared.first.dtypes) == ("stem", (torch.float32, torch.bfloat16))
    assert "ulp of bfloat16" in str(compared.first)
    assert 30 < compared.first.db < 70
    assert compare(*runs, model=model, min_db=20).first is None
    strict = compare(*runs, model=model, min_db=100)
    assert strict.first == compared.first


def test_outputs_changed_in_place_behind_the_module():
    """What counts is what a module returned, also where the next one overwrites it."""
    a, b = pair()
    b.blocks[1].inplace = False
    assert two_models(a, b).first is None


# ------------------------------------------------------------------------------------------------------------- distance


def distance(a, b):
    row = compare(lambda: a, lambda: b).rows[0]
    return row.db, row.ulp, row.equal


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_neighbours_are_an_ulp_apart(dtype):
    """Over the whole range, subnormals included."""
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 5, math.log2(info.max) - 1
    # Mantissas below the last of a binade, so that the neighbour above lies in the same one.
    x = (2.0 ** torch.linspace(low, high, 50, dtype=torch.float64).floor() * 1.25).to(dtype)
    above = torch.nextafter(x, torch.full_like(x, math.inf))
    for left, right in zip(x, above, strict=True):
        assert distance(left, right)[1] == 1.0
        assert distance(-right, -left)[1] == 1.0


def test_ulp_is_that_of_numpy():
    """Every positive float16 against zero: its own magnitude over numpy's spacing."""
    x = torch.arange(1, 0x7BFF, dtype=torch.int16).view(torch.float16)
    spacing = torch.from_numpy(np.spacing(x.numpy()).astype(np.float64))
    expected = (x.double() / spacing).max().item()
    assert distance(x, torch.zeros_like(x))[1] == expected


def test_ulp_between_dtypes():
    """Rounding is at most half a unit of the coarser dtype, and comes close to it."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    db, ulp, equal = distance(x, x.bfloat16())
    assert 0.49 < ulp <= 0.5
    assert db == pytest.approx(20 * torch.log10(x.double().norm() / (x.double() - x.bfloat16().double()).norm()).item())
    assert not equal


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, math.inf, math.nan], [1.0, math.inf, math.nan], (math.inf, 0.0, True)),
        ([1.0, math.inf], [1.0, 1.0], (-math.inf, math.inf, False)),
        ([1.0, math.nan], [1.0, math.inf], (-math.inf, math.inf, False)),
        ([1.0, math.inf], [1.0, -math.inf], (-math.inf, math.inf, False)),
        ([0.0], [-0.0], (math.inf, 0.0, False)),
        ([0.0], [1.0], (-math.inf, 2.0**23, False)),
        ([2.0**-149], [-(2.0**-149)], (pytest.approx(-20 * math.log10(2)), 2.0, False)),
        ([], [], (math.inf, 0.0, True)),
    ],
)
def test_special_values(a, b, expected):
    """Infinities and nan at the same places are equal; elsewhere nothing could be further apart."""
    assert distance(torch.tensor(a), torch.tensor(b)) == expected


@pytest.mark.parametrize("unit", [1e200, 1e-200, 1.0, 5e-320, 1.7e308])
def test_decibels_over_the_range_of_float64(unit):
    """Squares that leave the range of float64 change nothing: half as much again is 6 dB away, and not equal."""
    a, b = torch.tensor([unit / 2, 0.0], dtype=torch.float64), torch.tensor([unit / 4, 0.0], dtype=torch.float64)
    assert distance(a, b)[0] == pytest.approx(20 * math.log10(2), abs=1e-3)
    assert distance(a * 2, -a * 2)[0] == pytest.approx(-20 * math.log10(2), abs=1e-3)
    assert compare(lambda: a, lambda: b, min_db=30).first is not None


def test_a_small_difference_beside_a_large_value():
    """Noise whose square is no float64 is noise all the same."""
    a = torch.tensor([1.0, 1e-200], dtype=torch.float64)
    b = torch.tensor([1.0, 2e-200], dtype=torch.float64)
    assert distance(a, b)[0] == pytest.approx(4000.0)


def test_other_dtypes_and_shapes():
    """Integers count by one, complex numbers by their parts; another shape is a difference."""
    assert distance(torch.tensor([5, 9]), torch.tensor([5, 6]))[1:] == (3.0, False)
    assert distance(torch.tensor([True]), torch.tensor([True]))[2]
    assert distance(torch.tensor([1 + 1j]), torch.tensor([1 + (1 + 2**-23) * 1j]))[1] == 1.0
    sparse = torch.eye(3).to_sparse()
    assert distance(sparse, sparse.clone())[2]
    compared = compare(lambda: torch.zeros(2), lambda: torch.zeros(3))
    assert compared.first is not None
    assert compared.first.distance == "shape (2,) in run a, (3,) in run b"


# --------------------------------------------------------------------------------------------------- nothing is left


def everything(model, optimizer, scaler, scheduler):
    """Return copies of all that a step changes."""
    parts = (model, optimizer, scaler, scheduler)
    grads = {name: param.grad for name, param in model.named_parameters()}
    return copy.deepcopy([part.state_dict() for part in parts]), copy.deepcopy(grads), torch.get_rng_state()


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_state_is_put_back(device, trained):
    """Between the runs and after them, also when a run raises, from the first step and from a later one."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device=device), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    scaler = ampkit.GradScaler(device, init_scale=8.0, growth_interval=1)
    x, y = batch(device)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        return loss

    for _ in range(trained):
        step()
    state = [model, optimizer, scaler, scheduler]
    before = everything(*state)
    with deterministic():
        compared = compare(step, step, model=model, state=[optimizer, scaler, scheduler])
        assert compared.first is None
        assert any(row.path.startswith("optimizer[0].model.stem.weight") for row in compared.rows)
        assert_same(before, everything(*state))

        def fails():
            step()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            compare(step, fails, state=state)
        assert_same(before, everything(*state))
        assert not any(module._forward_hooks for module in model.modules())


def _sparse_adam():
    model = nn.Embedding(6, 3, sparse=True)
    return model, torch.optim.SparseAdam(model.parameters(), lr=0.1), lambda: model(torch.tensor([1, 4])).square().sum()


def _lbfgs():
    model, x = nn.Linear(3, 1), torch.arange(12.0).view(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
    return model, optimizer, lambda: (model(x) - 1.0).square().mean()


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize("build", [_sparse_adam, _lbfgs])
def test_optimizer_state_that_is_no_tensor_is_put_back(build, trained):
    """Counts of the host and lists, too: of the values before, in the objects before; equal steps are equal."""
    torch.manual_seed(0)
    model, optimizer, loss_fn = build()

    def closure():
        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        return loss

    for _ in range(trained):
        optimizer.step(closure)
    before = copy.deepcopy(optimizer.state_dict())
    held = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, list)]
    weights = copy.deepcopy(model.state_dict())
    compared = compare(
        partial(optimizer.step, closure), partial(optimizer.step, closure), model=model, state=[optimizer]
    )
    assert compared.first is None
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()
    assert_same(before["state"], optimizer.state_dict()["state"])
    assert_same(weights, model.state_dict())
    now = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, list)]
    assert all(a is b for a, b in zip(held, now, strict=True))
    optimizer.step(closure)  # it goes on


def test_optimizer_state_that_a_run_clears_is_put_back():
    """What a run took away is there again, also without the model that names the parameters."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    compare(optimizer.state.clear, optimizer.step, state=[optimizer])
    assert_same(before, optimizer.state_dict())


def test_without_state_it_leaks():
    """What is not given is not put back: the second run sees what the first one did."""
    counter = torch.zeros(())
    compared = compare(lambda: counter.add_(1).clone(), lambda: counter.add_(1).clone())
    assert compared.first is not None
    assert compared.first.path == "result"


def test_a_state_that_cannot_be_put_back():
    """The message names what came."""
    with pytest.raises(ValueError, match=r"compare\(state=\[int\]\): expected modules, optimizers"):
        compare(int, int, state=[3])


# ------------------------------------------------------------------------------------------------------ eager and graph


def training(device):
    torch.manual_seed(0)
    model = Net().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def graphed(model, optimizer, graph):
    def loss_fn(model, x, y):
        return F.cross_entropy(model(x), y)

    return ampkit.graphed_step(loss_fn, model, optimizer, graph=graph, warmup=1, on_failure="raise")


@pytest.mark.parametrize("engine", ENGINES)
def test_eager_and_graph(engine):
    """Compared by what they leave and return; the graph goes on and is as exact as before."""
    device, graph = engine
    model, optimizer = training(device)
    step, (x, y) = graphed(model, optimizer, graph), batch(device)
    with deterministic():  # a setting of each graph
        for _ in range(3):
            step(x, y)
    replays = step.replays

    def eager(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with deterministic():
        compared = compare(eager, lambda *batch: step(*batch).loss, x, y, state=[model, optimizer])
    assert step.replays == replays + 1
    assert compared.first is None
    assert {row.direction for row in compared.rows} == {"state", "result"}

    def wrong(x, y):
        with torch.no_grad():
            model.blocks[3].bias.add_(1e-3)
        return step(x, y).loss

    with deterministic():
        compared = compare(eager, wrong, x, y, state=[model, optimizer])
    assert compared.first is not None
    assert compared.first.direction == "state"
    step.close()


@pytest.mark.filterwarnings("ignore:graphed_step. the optimizer's state was replaced:ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_graph_captured_within(engine):
    """Its optimizer state is taken away with the run: the step notices, and trains on bit by bit as if never run."""
    device, graph = engine
    model, optimizer = training(device)
    step, (x, y) = graphed(model, optimizer, graph), batch(device)

    def four(step):
        return [step(x, y).loss for _ in range(4)]

    with deterministic():
        compared = compare(partial(four, step), partial(four, step), model=model, state=[optimizer])
        assert step.captures >= 1
        assert compared.first is None
        torch.manual_seed(5)
        after = four(step)
        fresh = training(device)
        with graphed(*fresh, "off") as plain:
            torch.manual_seed(5)
            expected = four(plain)
    assert_same(expected, after)
    assert_same(fresh[0].state_dict(), model.state_dict())
    step.close()


def test_what_one_run_has_alone():
    """A module that one run does not call is no difference, but the text says so."""
    model = Net()
    compared = compare(lambda: loss_of(model, *batch()), lambda: None, model=model)
    assert compared.first is not None  # the statistics of BatchNorm
    assert "norm, forward" in compared.only_a
    assert not compared.only_b
    assert "only in run a (replayed graphs and compiled code call no hooks): stem, forward; norm, forward;" in str(
        compared
    )


# ------------------------------------------------------------------------------------------ compiled, wrapped, no graph


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.quick(2)
def test_compiled_code_calls_no_hooks(warm, fresh_dynamo):
    """A model that is first compiled in the run: the hooks are not part of its code; what it leaves is compared."""
    model, (x, y) = Net(), batch()
    model.blocks[2].p = 0.0
    compiled = torch.compile(model, backend="eager")
    if warm:
        with torch.no_grad():
            compiled(x)
    compared = compare(lambda: loss_of(model, x, y), lambda: loss_of(compiled, x, y), model=model)
    assert compared.first is None
    assert {row.direction for row in compared.rows} == {"gradient", "state", "result"}
    assert "stem, forward" in compared.only_a
    assert not compared.only_b


def test_a_compiled_copy(fresh_dynamo):
    """Names are those without torch.compile's: outputs of the whole, gradients and state are compared."""
    a, b = pair()
    compared = compare_copies(a, torch.compile(b, backend="eager"))
    assert compared.first is None
    assert {("", "forward"), ("", "backward"), ("stem.weight", "gradient"), ("model.norm.running_mean", "state")} <= {
        (row.path, row.direction) for row in compared.rows
    }
    assert {name.rpartition(", ")[2] for name in compared.only_a} == {"forward", "backward"}
    assert not compared.only_b


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own look
def test_a_compiled_part(fresh_dynamo):
    """A module of torch.compile is watched from outside, under its own name, once a call."""
    a, b = pair()
    b.blocks = torch.compile(b.blocks, backend="eager")
    compared = compare_copies(a, b)
    assert compared.first is None
    assert [row.call for row in compared.rows if (row.path, row.direction) == ("blocks", "forward")] == [1]
    assert ("blocks.0.weight", "gradient") in {(row.path, row.direction) for row in compared.rows}
    assert compared.only_a[0] == "blocks.0, forward"
    assert not compared.only_b


def test_under_ddp():
    """DistributedDataParallel's `module.` is in no name, and a module called so keeps it."""
    if dist.is_initialized():
        pytest.skip("a process group of somebody else")
    a, b = (nn.ModuleDict({"module": net}) for net in pair())
    for net in (a, b):
        net.forward = net["module"].forward
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compared = compare_copies(a, nn.parallel.DistributedDataParallel(b))
    finally:
        dist.destroy_process_group()
    assert compared.first is None
    assert not compared.only_a
    assert not compared.only_b
    paths = {row.path for row in compared.rows}
    assert {"", "module.stem", "module.stem.weight", "model.module.norm.running_mean"} <= paths


def compare_copies(a, b):
    """Compare two models of equal weights in the bits of what they compute, without dropout."""
    for net in (*a.modules(), *b.modules()):
        if isinstance(net, nn.Dropout):
            net.p = 0.0
    return two_models(a, b)


def test_what_hooks_do_not_see_is_not_blamed_on_them():
    """A gradient that one run alone has is named, and not explained by graphs or compiled code."""
    model = nn.Linear(2, 2)

    def backward():
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()

    text = str(compare(backward, model.zero_grad, model=model))
    assert "2 tensors only in run a: weight, gradient; bias, gradient" in text
    assert "call no hooks): (model), forward; (model), backward" in text


@pytest.mark.parametrize("around", [False, True])
def test_inference_mode(around):
    """Inference tensors count no changes: each output is copied, one that a module changed in place too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.linspace(-1.0, 1.0, 8).view(2, 4)
    twin = nn.Sequential(copy.deepcopy(model[0]), nn.ReLU(), copy.deepcopy(model[2]))  # changes nothing in place

    def run():
        with torch.inference_mode():
            return model(x)

    with torch.inference_mode(around):
        compared = compare(run, partial(twin, x), model=(model, twin))
    assert compared.first is None
    assert [row.path for row in compared.rows if row.direction == "forward"] == ["0", "1", "2", ""]


# ---------------------------------------------------------------------------------------------------------------- table


def test_table(monkeypatch):
    """The first difference is marked, the worst are shown, all on demand, within the terminal's width."""
    monkeypatch.setenv("COLUMNS", "90")
    deep = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))) for _ in range(2)]
    for net in deep:
        for layer in net:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)
    nn.init.constant_(deep[1][3].bias, 1e-4)
    runs = [lambda net=net: net(torch.ones(2, 4)).sum() for net in deep]
    compared = compare(*runs, model=(deep[0], deep[1]))
    text = str(compared)
    assert "The first is 3, forward: SQNR" in text
    marked = [line for line in text.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert marked[0].split()[:5] == [">", "3", "forward", "2x4", "float32"]
    assert f"... {len(compared.rows) - 20} more rows; .table(all=True) shows all" in text
    assert len(compared.table(all=True).splitlines()) == len(compared.rows) + 3
    assert max(map(len, text.splitlines()[1:])) <= 90
    assert compared.worst is not None
    assert compared.worst.db == min(row.db for row in compared.rows)


def test_needs_no_numpy(monkeypatch):
    """numpy's generator counts only where numpy is loaded."""
    monkeypatch.delitem(sys.modules, "numpy")
    assert compare(lambda: torch.ones(1), lambda: torch.ones(1)).first is None
