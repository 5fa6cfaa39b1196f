"""forecast: a step on fake tensors takes what it takes on the device, and backward without the engine is backward."""

import gc
import inspect
import threading
import weakref

import pytest
import torch
from families import every
from harness import FUSED_ADAGRAD_ON_CUDA, Compiled, make_net
from test_memory import profiler_peak
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import debug
from ampkit._commands.bench.cases import CASES
from ampkit.debug._memory.allocator import CachingAllocator, cublas_workspace
from ampkit.debug._memory.backward import without_engine
from ampkit.debug._memory.categories import MemoryTracker

MIB = 2**20
AMP = "params=float32,compute=float16,output=float32"
cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch that was built with CUDA")


def mean_square(model, x):
    return model(x).float().square().mean()


class Block(nn.Module):
    """Attention and a feed-forward layer: residual connections, where gradients meet."""

    def __init__(self, width=64):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 16)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Tanh()), (128, 64)),
    "convolutions": (lambda: make_net("cpu"), (16, 3, 8, 8)),
    "transformer": (lambda: nn.Sequential(*(Block() for _ in range(3))), (8, 32, 64)),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "sgd, fused": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "adagrad, fused": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
    "adam, foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "adamw, fused": lambda params: torch.optim.AdamW(params, fused=True),
}


def case(name, optimizer="sgd"):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build()
    return model, OPTIMIZERS[optimizer](model.parameters()), torch.randn(shape)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(3)
@pytest.mark.sampled(2)
def test_equals_the_recorded_step(name, optimizer):
    """P2: on a CPU, the forecast is what the same step takes when it is recorded, category by category, at its peak.

    One difference is allowed: under a recorder autograd adds gradients that meet in a new place, so one buffer more.
    """
    model, made, x = case(name, optimizer)
    forecast = debug.forecast(mean_square, model, made, x, device="cpu")
    recorded = debug.memory(_loss_step(model, made), x, model=model, optimizer=made, steps=2)
    difference = recorded.peak - forecast.peak
    print(
        f"{name}, {optimizer}: forecast {forecast.peak}, recorded {recorded.peak}, {-difference / recorded.peak:+.3%}"
    )
    where_gradients_meet = x.numel() * 4 if name == "transformer" else 0
    assert 0 <= difference <= where_gradients_meet
    for category in ("parameter", "optimizer state", "input"):
        assert forecast.series[category][-1] == recorded.series[category][-1]
    if not where_gradients_meet and optimizer != "adam, foreach":  # whose count of steps is a tensor of 8 bytes
        assert forecast.series == recorded.series, "event by event"
        assert forecast.marks == recorded.marks
    assert forecast.forecast


def _loss_step(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("name", MODELS)
def test_against_the_allocator(name):
    """P2: within 5 % of the peak that the profiler sees in an unwatched step: it asks the allocator."""
    model, optimizer, x = case(name)
    forecast = debug.forecast(mean_square, model, optimizer, x, device="cpu")
    there = sum(tensor.untyped_storage().nbytes() for tensor in [x, *model.parameters(), *model.buffers()])
    step = _loss_step(model, optimizer)
    measured = there + profiler_peak(lambda: [step(x) for _ in range(2)])
    print(f"{name}: forecast {forecast.peak}, profiler {measured}, {forecast.peak / measured - 1:+.3%}")
    assert forecast.peak == pytest.approx(measured, rel=0.05)


class Momentum(torch.optim.Optimizer):
    """An optimizer whose code is not torch's."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            buffer = self.state[param].setdefault("buffer", torch.zeros_like(param))
            param.sub_(buffer.mul_(0.9).add_(param.grad), alpha=0.01)


class Sign(torch.optim.Optimizer):
    """Another one, without state, and with two names for its parameters."""

    def __init__(self, params):
        self.params = list(params)
        super().__init__(self.params, {})

    @torch.no_grad()
    def step(self):
        for param in self.params:
            param.sub_(param.grad.sign_(), alpha=0.01)


GUARDED = {name: OPTIMIZERS[name] for name in ("sgd", "sgd, fused", "adam, foreach")}
GUARDED |= {"own": Momentum, "own, without state": Sign}
# Tensors of a parameter's size that a step copies, on a CPU.
COPIED = {"sgd": 2, "own": 2, "own, without state": 1, "adam, foreach": 3}


@pytest.mark.filterwarnings("ignore:.*cannot be skipped on the device")
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("optimizer", GUARDED)
def test_copies_of_a_guard(optimizer, nonfinite):
    """P2: with `nonfinite=`, it is what the profiler sees in a guarded step, to a hundred bytes of counters."""
    model, x = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))), torch.randn(16, 256)
    peaks = []
    for guard in (None, nonfinite):
        made = GUARDED[optimizer](model.parameters())
        forecast = debug.forecast(mean_square, model, made, (x,), nonfinite=guard, device="cpu")
        step = ampkit.graphed_step(mean_square, model, made, nonfinite=guard, graph="off")
        for _ in range(4):
            step(x)
        state = [value for values in made.state.values() for value in values.values()]
        there = sum(tensor.untyped_storage().nbytes() for tensor in [x, *model.parameters(), *state])
        measured = there + profiler_peak(lambda step=step: [step(x) for _ in range(2)])
        print(f"{optimizer}, {guard}: forecast {forecast.peak}, profiler {measured}")
        assert forecast.peak == pytest.approx(measured, abs=100)
        peaks.append(forecast.peak)
    parameters = sum(param.nbytes for param in model.parameters())
    assert peaks[1] - peaks[0] == pytest.approx(COPIED.get(optimizer, 0) * parameters, abs=20_000)


@cuda_build
def test_copies_of_a_guard_on_cuda():
    """There, graphed_step makes Adam capturable, so that its steps are undone: with copies of its state, too."""
    model, x = nn.Linear(256, 256, bias=False), torch.randn(1, 256)
    made, size = torch.optim.Adam(model.parameters()), model.weight.nbytes
    profiles = [debug.forecast(mean_square, model, made, x, nonfinite=guard) for guard in (None, "skip")]
    plain, guarded = (max(profile.series["temporary"]) for profile in profiles)
    assert guarded - plain == pytest.approx(3 * size, abs=2 * size)
    for at in ("parameter", "optimizer state"):
        assert profiles[0].series[at][-1] == pytest.approx(profiles[1].series[at][-1], abs=1024)


# Measured on an H100, torch 2.11.0+cu130, by `python -m ampkit bench --model resnet50 -b 32`, variant "torch AMP,
# eager": torch.cuda.max_memory_allocated in steps behind the first twenty, with the next batch on its way.
MEASURED_RESNET50 = 1698
# Measured on an H200 by benchmarks/models.py (docs/benchmarks/h200-2026-11.md): the segments of the private pool of a
# graph that holds the whole step, and its input buffers. In bfloat16 and float16; without working weights.
# Not among them, for they are not explained: vit_b_16 (2564 MiB, forecast 2366) and convnext_tiny (2286, 2154). What is
# missing may be workspaces of cuDNN, which lie in a pool as anything else does, and which no fake run can know.
MEASURED_POOLS = {"resnet50": 1660, "gpt2": 3226, "bert": 1758, "llama": 1314}


@cuda_build
@pytest.mark.slow
@pytest.mark.seeds
def test_against_an_h100():
    """P2: ResNet-50, batch 32, float16 with SGD: within 5 % of the peak that an H100 showed."""
    pytest.importorskip("torchvision")
    made = CASES["resnet50"](32, count=1)
    parts = made.loss_fn, made.model, made.optimizer(made.model.parameters()), made.batches[0]
    at16, at32 = (debug.forecast(*parts, policy=policy, label=policy) for policy in (AMP, "32-true"))
    print(at16.beside(at32))
    print(
        f"forecast {at16.peak / MIB:.1f} MiB, H100 {MEASURED_RESNET50}, {at16.peak / MIB / MEASURED_RESNET50 - 1:+.2%}"
    )
    assert at16.peak / MIB == pytest.approx(MEASURED_RESNET50, rel=0.05)
    assert at16.at_peak["activation"] < 0.6 * at32.at_peak["activation"]
    assert at16.at_peak["parameter"] == at32.at_peak["parameter"]


class _Pool(CachingAllocator):
    """The private pool of a captured second step: empty before, and nothing in it that was there before."""

    captured = False

    def allocate(self, key, size):
        return super().allocate(key, size) if self.captured else size

    def workspace(self, func, in_backward):
        return 0


@pytest.fixture
def pool_of(monkeypatch):
    """Return a function that returns the pool of a captured step of a case of benchmarks/models.py, in segments that
    do not grow, and the bytes of the input."""

    def simulate(name):
        models = pytest.importorskip("models")
        pytest.importorskip(models.CASES[name].package)
        pools = []

        class Watching(MemoryTracker):
            def begin_step(self):
                self._allocator.captured = self._steps > 0
                pools.append(self._allocator)
                super().begin_step()

        monkeypatch.setattr("ampkit.debug._memory.forecast.MemoryTracker", Watching)
        monkeypatch.setattr("ampkit.debug._memory.forecast.CachingAllocator", _Pool)
        measured = models.CASES[name]
        model = measured.model("cpu")
        optimizer, batch = torch.optim.AdamW(model.parameters(), fused=True), measured.batch("cpu", 0)
        debug.forecast(models.loss_fn, model, optimizer, batch, policy=measured.policy)
        return pools[-1], sum(tensor.numel() * tensor.element_size() for tensor in batch)

    return simulate


@cuda_build
@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED_POOLS)
def test_against_pools_of_graphs(name, pool_of):
    """P2: what a whole step takes in a pool of its own, against what four such pools had on an H200."""
    pool, inputs = pool_of(name)
    mib = (pool.reserved + inputs) / MIB
    print(f"{name}: forecast {mib:.1f} MiB, H200 {MEASURED_POOLS[name]}, {mib / MEASURED_POOLS[name] - 1:+.2%}")
    assert mib == pytest.approx(MEASURED_POOLS[name], rel=0.01)


@cuda_build
@pytest.mark.slow
def test_leaves_everything_alone():
    """P2: model, optimizer and batch are as before, and may be on meta: no memory is needed."""
    model, optimizer, x = case("transformer")
    before = [param.clone() for param in model.parameters()]
    forecast = debug.forecast(mean_square, model, optimizer, x, policy=AMP)
    assert all(
        param.grad is None and torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)
    )
    assert not optimizer.state
    assert not any(module._forward_hooks for module in model.modules())
    assert optimizer.param_groups[0]["foreach"] is None
    with torch.device("meta"):
        nowhere = MODELS["transformer"][0]()
    made = OPTIMIZERS["sgd"](nowhere.parameters())
    assert debug.forecast(mean_square, nowhere, made, x.to("meta"), policy=AMP).series == forecast.series


@cuda_build
def test_categories_on_cuda():
    """P2: what the shapes say, in whole blocks; workspaces of cuBLAS for both threads; and the lines of the model."""
    model = nn.Sequential(nn.Linear(1024, 512, bias=False), nn.Linear(512, 1024, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    profile = debug.forecast(mean_square, model, optimizer, torch.zeros(2048, 1024))
    weights = 2 * 2 * MIB
    assert profile.device == "cuda:0"
    assert profile.series["parameter"][0] == weights
    assert profile.series["optimizer state"][-1] == 2 * weights + 2 * 512, "two moments, and counts of steps"
    assert profile.at_peak["temporary"] == 2 * cublas_workspace()
    assert profile.at_peak["input"] == 8 * MIB
    assert {holder.module for holder in profile.holders if holder.category == "parameter"} == {"0", "1"}
    assert any("return model(x).float()" in holder.line for holder in profile.holders)


@cuda_build
@pytest.mark.slow
def test_policies_side_by_side():
    """P2: float16 halves what is kept for backward; parameters in float16 halve the rest."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.zeros(16384, 512)
    peaks = {
        policy: debug.forecast(mean_square, model, optimizer, x, policy=policy, label=policy).at_peak
        for policy in ("32-true", AMP, "bf16-true")
    }
    assert peaks[AMP]["activation"] < 0.65 * peaks["32-true"]["activation"]
    assert peaks[AMP]["optimizer state"] == peaks["32-true"]["optimizer state"]
    assert peaks["bf16-true"]["optimizer state"] < 0.55 * peaks["32-true"]["optimizer state"]
    assert peaks["bf16-true"]["parameter"] < 0.55 * peaks["32-true"]["parameter"]
    profiles = [debug.forecast(mean_square, model, optimizer, x, policy=policy) for policy in (AMP, "32-true")]
    assert "params=float32,compu" in profiles[0].beside(profiles[1])


@cuda_build
def test_foreach_takes_more_than_fused():
    """P2: the foreach Adam that torch takes by itself needs as much again as the parameters, the fused one nothing."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    peaks = {}
    for name, options in {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        optimizer = torch.optim.Adam(model.parameters(), **options)
        peaks[name] = debug.forecast(mean_square, model, optimizer, torch.zeros(8, 1024)).peak
    assert peaks["default"] == peaks["foreach"]
    assert peaks["foreach"] - peaks["fused"] == pytest.approx(16 * 4 * MIB, rel=0.01)


def test_step_that_reads_a_value():
    """P2: it says what is missing and where."""

    def loss_fn(model, x):
        loss = mean_square(model, x)
        if loss > 0:  # the line
            loss = loss * 2
        return loss

    model, optimizer, x = case("mlp")
    with pytest.raises(ValueError, match=r"needs a value or a device.*# the line"):
        debug.forecast(loss_fn, model, optimizer, x, device="cpu")


def test_wrong_use():
    model, optimizer, x = case("mlp")
    with pytest.raises(ValueError, match="'tpu'"):
        debug.forecast(mean_square, model, optimizer, x, device="tpu")
    with pytest.raises(ValueError, match=r"steps=0"):
        debug.forecast(mean_square, model, optimizer, x, device="cpu", steps=0)
    with pytest.raises(ValueError, match=r"nonfinite='raise'\): expected one of 'skip', 'stop'"):
        debug.forecast(mean_square, model, optimizer, x, device="cpu", nonfinite="raise")
    with pytest.raises(ValueError, match=r"nonfinite='skip'\): expected None beside a loss scale, which skips"):
        debug.forecast(mean_square, model, optimizer, x, device="cpu", nonfinite="skip", policy="float16")
    with pytest.raises(ZeroDivisionError):
        debug.forecast(lambda model, x: model(x) / (1 // 0), model, optimizer, x, device="cpu")


def test_learning_rate_on_the_device_and_groups():
    """P2: options that are tensors, parameters in several groups, a parameter that is not the model's."""
    model, _, x = case("mlp")
    own = nn.Parameter(torch.ones(64))
    groups = [{"params": model[0].parameters(), "lr": torch.tensor(0.1)}, {"params": [*model[2].parameters(), own]}]
    optimizer = torch.optim.Adam(groups, fused=True)
    profile = debug.forecast(mean_square, model, optimizer, x, device="cpu")
    recorded = debug.memory(_loss_step(model, optimizer), x, model=model, optimizer=optimizer, steps=2)
    assert profile.at_peak == recorded.at_peak


OF_TORCH = sorted(
    (kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)),
    key=lambda kind: kind.__name__,
)
DEVICES = ["cpu", pytest.param("cuda", marks=cuda_build)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", every(4, OF_TORCH), ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch(kind, device):
    """P2: each can step on fake tensors, by default and with a rate that is a tensor, and makes the state it makes."""
    if kind in (torch.optim.Optimizer, torch.optim.LBFGS):
        pytest.skip("no optimizer that steps by itself")
    if kind is torch.optim.SparseAdam:
        model, x = nn.Embedding(32, 4, sparse=True), torch.arange(3)
    else:
        model, x = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)), torch.randn(16, 8)
    names = inspect.signature(kind).parameters
    choices = [{}, {"lr": torch.tensor(0.01)}, *({name: True} for name in ("foreach", "amsgrad") if name in names)]
    if "fused" in names and (FUSED_ADAGRAD_ON_CUDA or (kind, device) != (torch.optim.Adagrad, "cuda")):
        choices += [{"fused": True}, {"fused": True, "lr": torch.tensor(0.01)}]
    for options in choices:
        optimizer = kind(model.parameters(), **options)
        forecast = debug.forecast(mean_square, model, optimizer, x, device=device)
        guarded = debug.forecast(mean_square, model, optimizer, x, device=device, nonfinite="skip")
        _loss_step(model, optimizer)(x)
        state = [value for values in optimizer.state.values() for value in values.values()]
        # On CUDA a size is that of whole blocks, and a count of steps may be on the device.
        size = sum(value.nbytes for value in state if isinstance(value, torch.Tensor) and value.dim())
        found = forecast.series["optimizer state"][-1]
        assert size <= found <= size + 1024 * len(state), (kind, options)
        assert size <= guarded.series["optimizer state"][-1] <= size + 1024 * len(state), (kind, options)
        model.zero_grad()


@cuda_build
def test_adam_with_a_rate_that_is_a_tensor():
    """P2: torch steps through the parameters then, one by one, and so takes less than foreach does."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    peaks = [
        debug.forecast(mean_square, model, torch.optim.Adam(model.parameters(), lr=lr), torch.zeros(8, 256)).peak
        for lr in (0.01, torch.tensor(0.01))
    ]
    assert peaks[1] < peaks[0]


class Looking(torch.optim.Optimizer):
    """Has more than options and state: numbers, its parameters again, and an optimizer that does the work."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups
        self.mine = [param for group in self.param_groups for param in group["params"]]
        self.taken, self.slow = 0, [torch.zeros_like(param) for param in self.mine]

    @torch.no_grad()
    def step(self, closure=None):
        self.taken += 1
        self.base.step()
        for slow, param in zip(self.slow, self.mine, strict=True):
            slow.lerp_(param, 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_optimizer_with_attributes(device):
    """P2: what a subclass keeps is copied, over the copies of the parameters, and left alone itself."""
    model, _, x = case("mlp")
    optimizer = Looking(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a `step` in the instance
    before = [param.clone() for param in model.parameters()]
    forecast = debug.forecast(mean_square, model, optimizer, x, device=device)
    assert forecast.series["gradient"][-1] >= sum(param.nbytes for param in model.parameters())
    assert (optimizer.taken, len(optimizer.base.state)) == (0, 0)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    if device == "cpu":
        recorded = debug.memory(
            _loss_step(model, optimizer), x, model=model, optimizer=[optimizer, optimizer.base], steps=2
        )
        whole = recorded.peak - sum(param.nbytes for param in model.parameters())  # of `slow`, which was there before
        assert whole <= forecast.peak <= recorded.peak


def test_optimizer_that_cannot_be_forecast():
    """P2: the message says which part of it is the reason, and what to do instead."""
    model, _, x = case("mlp")
    with pytest.raises(ValueError, match=r"LBFGS\.step needs closure.*debug.memory\(train_step"):
        debug.forecast(mean_square, model, torch.optim.LBFGS(model.parameters()), x, device="cpu")
    locked = torch.optim.SGD(model.parameters(), lr=0.1)
    locked.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot copy SGD\.lock \(lock\).*an optimizer without it"):
        debug.forecast(mean_square, model, locked, x, device="cpu")


@cuda_build
def test_a_tensor_that_stays_behind():
    """P2: what a loss closes over is on no other device; the message says how to take it along, and the line."""
    model, optimizer, x = case("mlp")
    weighted, y = nn.CrossEntropyLoss(weight=torch.ones(64)), torch.zeros(128, dtype=torch.long)

    def loss_fn(model, x, y):
        return weighted(model(x), y)  # the line

    with pytest.raises(ValueError, match=r"mixes devices.*let loss_fn be an nn\.Module.*in the batch.*# the line"):
        debug.forecast(loss_fn, model, optimizer, (x, y))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_runs_on_behind_it():
    """P2: the step of a compiled model is forecast as eager code, and the model is compiled as before."""
    model, optimizer, x = case("mlp")
    compiled = Compiled(model)
    forecast = debug.forecast(mean_square, compiled.module, optimizer, x, device="cpu")
    assert forecast.at_peak == debug.forecast(mean_square, model, optimizer, x, device="cpu").at_peak
    for _ in range(3):
        compiled.module(x)
    assert (compiled.calls, compiled.compiles) == (3, 1)


def test_accumulated_with_a_closure_over_a_loss_module():
    """P2: a loss that is a module with state of its own, and outputs beside the loss."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(64))

        def forward(self, model, x, y):
            out = model(x)
            return F.cross_entropy(out, y, weight=self.weight), {"out": out}

    model, optimizer, x = case("mlp")
    profile = debug.forecast(Weighted(), model, optimizer, (x, torch.zeros(128, dtype=torch.long)), device="cpu")
    assert profile.series["gradient"][-1] == sum(param.numel() * 4 for param in model.parameters())


# ------------------------------------------------------------------------------------------ backward without the engine


class Scale(torch.autograd.Function):
    """Takes what is no tensor, returns two, and gets a gradient for one of them only."""

    @staticmethod
    def forward(ctx, x, factor, w):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * factor * w, x.exp()

    @staticmethod
    def backward(ctx, grad, unused):
        x, w = ctx.saved_tensors
        return grad * w * ctx.factor + unused, None, grad * x * ctx.factor


class Tangled(nn.Module):
    """Gradients that meet, expanded parameters, functions of the user's, checkpointing, dtypes."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.again = nn.Conv2d(16, 16, 3, padding=1)
        self.w = nn.Parameter(torch.ones(16, 1, 1))
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        x = x + self.again(x)
        x = x + self.again(x)
        x = Scale.apply(x, 2, self.w.expand_as(x))[0] + self.w
        x = x.mean((2, 3)).double().float()
        for _ in range(2):
            x = checkpoint(lambda x: self.second(torch.sigmoid(self.first(x))), x, use_reentrant=self.reentrant)
        return x


def gradients(model):
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def equal(left, right):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_engines(reentrant):
    """P2: bit by bit, over accumulation, and with hooks on leaves."""
    torch.manual_seed(0)
    model, x = Tangled(reentrant), torch.randn(4, 3, 8, 8)
    called = []
    model.w.register_hook(lambda grad: grad * 0.5)
    model.w.register_post_accumulate_grad_hook(lambda param: called.append(param.grad is not None))

    def run():
        model.zero_grad()
        for _ in range(2):
            model(x).square().sum().backward()
        return gradients(model)

    expected = run()
    with without_engine(lambda node: None):
        got = run()
    assert equal(expected, got)
    assert called == [True] * 4


def test_partial_gradients_are_the_engines():
    """P2: torch.autograd.grad, a second derivative, chosen inputs, and a graph that is kept."""
    torch.manual_seed(0)
    model, x = Tangled(False), torch.randn(4, 3, 8, 8, requires_grad=True)

    def run():
        model.zero_grad()
        loss = model(x).square().sum()
        first = torch.autograd.grad(loss, [model.w, x, model.unused.weight], create_graph=True, allow_unused=True)
        (first[0].square().sum() + first[1].square().sum()).backward(retain_graph=True)
        loss.backward(inputs=[model.conv.weight])
        return [*gradients(model), first[0].detach(), first[1].detach(), first[2], x.grad.clone()]

    expected = run()
    x.grad = None
    with without_engine(lambda node: None):
        assert equal(expected, run())


def test_hooks_on_tensors_and_queued_functions_are_called_as_by_the_engine():
    """P2: on outputs of nodes, also of the root, unless removed. Functions that they queue run after the backward."""

    def run():
        called = []
        w = torch.ones(3, requires_grad=True)
        x, y = (w * 2).split([1, 2])
        gone = y.register_hook(lambda grad: called.append("gone"))
        y.register_hook(lambda grad: grad * 3)
        y.register_hook(lambda grad: called.append(grad.tolist()))
        gone.remove()
        loss = x.sum() + y.sum()
        queue = torch.autograd.Variable._execution_engine.queue_callback
        loss.register_hook(lambda grad: queue(lambda: called.append(w.grad.tolist())))
        w.register_hook(lambda grad: called.append(grad.tolist()))
        loss.backward()
        with pytest.raises(RuntimeError, match="during backward"):
            queue(print)
        return called

    expected = run()
    with without_engine(lambda node: None):
        assert run() == expected
    assert expected == [[3.0, 3.0], [2.0, 6.0, 6.0], [2.0, 6.0, 6.0]]


def test_what_hooks_have_packed_is_dropped_with_its_node():
    """P2: checkpointing keeps the arguments of a function no longer than the engine would; hooks of the user's work."""

    def run():
        freed = []
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        for _ in range(2):
            made = x * 2
            weakref.finalize(made.untyped_storage(), freed.append, "made")
            y = made.exp()
            y.register_hook(lambda grad: freed.append("begun"))
            out = checkpoint(torch.sin, y, use_reentrant=False)
            del made, y
        with torch.autograd.graph.save_on_cpu():
            out = out.tanh().square().sum()
        out.backward()
        freed.append("over")
        return x.grad, freed

    expected = run()
    with without_engine(lambda node: None):
        got = run()
    assert torch.equal(got[0], expected[0])
    assert got[1] == expected[1]


def test_errors_are_the_engines():
    """P2: a graph that is gone, and an input that has no part in it."""
    x = torch.ones(3, requires_grad=True)
    with without_engine(lambda node: None):
        loss = x.exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(x.exp().sum(), [torch.ones(3, requires_grad=True)])


def test_memory_is_freed_as_the_engine_frees_it():
    """P2: on real tensors, the record of a model where no gradients meet is the same, event by event."""
    profiles = []
    for ours in (False, True):
        model, optimizer, x = case("mlp")
        with debug.memory(model, optimizer, inputs=x) as recorded:
            if ours:
                with without_engine(recorded._tracker.at_node):
                    _loss_step(model, optimizer)(x)
            else:
                _loss_step(model, optimizer)(x)
        profiles.append(recorded.profile)
    assert profiles[0].series == profiles[1].series
    assert profiles[0].marks == profiles[1].marks


# ------------------------------------------------------------------------------------------------------- the allocator


def test_blocks_and_segments():
    """P2: sizes that the caching allocator gives out, and the segments behind them."""
    allocator = CachingAllocator()
    assert allocator.allocate(1, 0) == 0
    assert allocator.reserved == 0
    assert allocator.allocate(2, 1) == 512
    assert allocator.reserved == 2 * MIB
    assert allocator.allocate(3, MIB) == MIB, "small still, from the same segment"
    assert allocator.reserved == 2 * MIB
    assert allocator.allocate(4, MIB + 1) == MIB + 512, "from a segment of 20 MiB"
    assert allocator.reserved == 22 * MIB
    assert allocator.allocate(5, 49 * MIB) == 50 * MIB, "its segment is 50 MiB, and what is left is not worth a block"
    assert allocator.allocate(6, 100 * MIB - 5 * MIB) == 96 * MIB
    assert allocator.reserved == (22 + 50 + 96) * MIB


def test_freed_blocks_are_joined_and_taken_again():
    """P2: neighbours become one block, the smallest that fits is taken, segments stay."""
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 4 * MIB)
    assert allocator.reserved == 20 * MIB
    for key in (0, 2, 1):
        allocator.free(key)
    assert allocator.allocate(4, 12 * MIB) == 12 * MIB, "three neighbours"
    assert allocator.reserved == 20 * MIB
    allocator.free(3)
    assert allocator.allocate(5, 15 * MIB // 2) == 8 * MIB, "half a MiB is not split off"
    allocator.free(4)
    allocator.free(5)
    assert allocator.allocate(6, 20 * MIB) == 20 * MIB
    assert allocator.reserved == 20 * MIB


def test_workspace(monkeypatch):
    """P2: as CUBLAS_WORKSPACE_CONFIG says, in KiB; for each of the two threads once."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert cublas_workspace() == (4096 * 2 + 16 * 8) * 1024
    allocator = CachingAllocator()
    mm, relu = torch.ops.aten.mm.default, torch.ops.aten.relu.default
    taken = [
        allocator.workspace(func, backward) for func, backward in ((relu, False), (mm, False), (mm, True), (mm, True))
    ]
    assert taken[0] == taken[3] == 0
    assert taken[1] == taken[2] >= cublas_workspace()
    if not torch.cuda.is_available():
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        assert cublas_workspace() == 32 * MIB


# ---------------------------------------------------------------------------------------------------------- on a device


@pytest.mark.cuda
@pytest.mark.parametrize("policy", ["32-true", AMP])
@pytest.mark.parametrize(("name", "batch"), [("resnet50", 32), ("gpt2-like", 8)])
def test_against_this_gpu(name, batch, policy):
    """P2: within 5 % of torch.cuda.max_memory_allocated, in the second step and those after it."""
    pytest.importorskip("torchvision")
    made = CASES[name](batch, count=1)
    parts = made.loss_fn, made.model, made.optimizer(made.model.parameters()), made.batches[0]
    forecast = debug.forecast(*parts, policy=policy, steps=3)
    gc.collect()
    ampkit._torch.device.allocator.clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    parsed = ampkit.Policy.parse(policy)
    model = made.model.cuda()
    optimizer = made.optimizer(model.parameters())
    moved = [tensor.cuda() for tensor in made.batches[0]]
    scale = torch.ones((), device="cuda")

    def step():
        optimizer.zero_grad()
        with parsed.autocast("cuda"):
            loss = made.loss_fn(model, *moved)
        (loss * scale).backward()
        optimizer.step()

    step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    measured = torch.cuda.max_memory_allocated() - before
    print(f"{name} b{batch} {policy}: forecast {forecast.peak / MIB:.1f} MiB, measured {measured / MIB:.1f}")
    assert forecast.peak == pytest.approx(measured, rel=0.05)


@pytest.mark.cuda
@pytest.mark.parametrize("nonfinite", [None, "skip"])
@pytest.mark.parametrize("optimizer", GUARDED)
def test_copies_of_a_guard_on_this_gpu(optimizer, nonfinite):
    """P2: within 5 % of the peak of a guarded step, with the copies of an optimizer that is not fused.

    The forecast is that of a plain loop, whose backward has a thread and so a workspace of its own.
    """
    model, x = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))), torch.randn(64, 2048)
    forecast = debug.forecast(mean_square, model, GUARDED[optimizer](model.parameters()), (x,), nonfinite=nonfinite)
    gc.collect()
    ampkit._torch.device.allocator.clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    moved, x = model.cuda(), x.cuda()
    made = GUARDED[optimizer](moved.parameters())
    step = ampkit.graphed_step(mean_square, moved, made, nonfinite=nonfinite, graph="off")
    for _ in range(4):
        step(x)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(x)
    measured = torch.cuda.max_memory_allocated() - before
    expected = forecast.peak - cublas_workspace()
    print(f"{optimizer}, {nonfinite}: forecast {expected / MIB:.1f} MiB, measured {measured / MIB:.1f}")
    assert expected == pytest.approx(measured, rel=0.05)


class Recurrent(nn.Module):
    """A recurrent layer or cell between two others, whatever it returns."""

    def __init__(self, kind, **options):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), kind(4, 8, **options)

    def forward(self, x):
        out = self.layer(self.first(x))
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.sampled(4)
@cuda_build
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (nn.LSTM, {"proj_size": 3}),
        (nn.GRU, {"bias": False}),
        (nn.RNN, {}),
        (nn.LSTMCell, {}),
        (nn.GRUCell, {}),
        (nn.GRUCell, {"bias": False}),
        (nn.RNNCell, {}),
    ],
)
def test_recurrent_layers(kind, options, policy):
    """P2: forward and backward of layers that run on cuDNN, and of cells in one kernel, without a device."""
    model = Recurrent(kind, **options)
    x = torch.randn(16, 4) if kind.__name__.endswith("Cell") else torch.randn(5, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    profile = debug.forecast(mean_square, model, optimizer, x, policy=policy)
    # The allocator's blocks are multiples of 512 bytes.
    blocks = sum(-(-param.numel() * 4 // 512) * 512 for param in model.parameters())
    assert max(profile.series["parameter"]) == blocks
    assert max(profile.series["gradient"]) == blocks
    assert max(profile.series["activation"]) > 0


def test_a_dict_is_keyword_arguments():
    """As a step takes it, `step(**batch)`; in a tuple it is one argument."""

    def by_name(model, x, y):
        return F.mse_loss(model(x), y)

    def whole(model, batch):
        return by_name(model, **batch)

    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"x": torch.ones(3, 4), "y": torch.ones(3, 2)}
    peaks = {
        debug.forecast(by_name, model, optimizer, tuple(batch.values()), device="cpu").peak,
        debug.forecast(by_name, model, optimizer, batch, device="cpu").peak,
        debug.forecast(whole, model, optimizer, (batch,), device="cpu").peak,
    }
    assert len(peaks) == 1


@pytest.mark.parametrize(
    ("rounding", "moments", "expected"),
    [
        (None, None, (4, 4, 8)),
        (None, "bfloat16", (4, 4, 4)),
        ("stochastic", None, (2, 2, 4)),
        ("kahan", None, (2, 2, 6)),
    ],
)
def test_states_in_bfloat16(rounding, moments, expected):
    """The bytes per parameter of weights, gradients and state are those of the step that is forecast."""
    model = nn.Linear(256, 255, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    policy = ampkit.Policy(params="bfloat16", rounding=rounding) if rounding else None
    x = torch.zeros(4, 256, dtype=torch.bfloat16 if rounding else torch.float32)
    profile = debug.forecast(mean_square, model, optimizer, x, policy=policy, moments=moments, device="cpu")
    held = [profile.series[name][-1] for name in ("parameter", "gradient", "optimizer state")]
    assert tuple(size // model.weight.numel() for size in held) == expected
    assert not optimizer.state
