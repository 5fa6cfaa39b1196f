"""Moments and weights in bfloat16: unbiased rounding, float32 arithmetic, bits of eager, resumed and skipped steps."""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ENGINES, assert_same, deterministic, training_state
from tape import taped
from torch import Tensor, nn

import ampkit
from ampkit import Policy
from ampkit._optimizer.update import state_form
from ampkit._optimizer.update.state_form import StateForm, narrowed, round_stochastically, set_state_form, step_of

Engine = tuple[str, str]
BETAS = (0.9, 0.95)
LARGEST = torch.finfo(torch.bfloat16).max
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=2**-6, betas=BETAS, weight_decay=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=2**-6, betas=BETAS, weight_decay=0.1, amsgrad=True, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
}
FORMS = {
    "moments": (None, "bfloat16"),
    "stochastic": ("stochastic", None),
    "kahan": ("kahan", "bfloat16"),
}


# ------------------------------------------------------------------------------------------------------------- rounding


def neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of bfloat16 next to float32 values, the nearer to 0 first, as float64."""
    lower = value.view(torch.int32) & -(2**16)
    upper = torch.where(lower == value.view(torch.int32), lower, lower + 2**16)
    return lower.view(torch.float32).double(), upper.view(torch.float32).double()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [-127, -126, -1, 0, 126])  # -127: subnormal numbers
def test_every_mantissa_is_rounded_without_bias(exponent: int, sign: int) -> None:
    """Each becomes one of its neighbours, and the mean error is within five standard errors of 0."""
    value = (torch.arange(2**23, dtype=torch.int32) + (exponent + 127) * 2**23).view(torch.float32) * sign
    lower, upper = neighbours(value)
    rounded = round_stochastically(value).double()
    assert bool(((rounded == lower) | (rounded == upper)).all())
    gap = (upper - lower).abs().clamp_min(2.0**-150)
    share = (value.double() - lower).abs() / gap  # how probable the upper one is
    error = (rounded - value.double()) * sign / gap
    variance = share * (1 - share)
    for part in (
        slice(None),
        *(
            torch.arange(i, 2**23, 2**16).add(torch.arange(2**10)[:, None]).ravel()
            for i in (0, 2**14, 2**15, 2**16 - 2**10)
        ),
    ):
        assert abs(float(error[part].sum())) < 5 * math.sqrt(float(variance[part].sum()))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_rounding_has_no_bias() -> None:
    """Inductor draws the bits: others for each tensor and each call, and the mean is within five standard errors."""
    rounded = torch.compile(lambda left, right: (round_stochastically(left), round_stochastically(right)))
    value = 1 + torch.arange(2**16).repeat(16) * 2.0**-23
    roundings = [each.double() for _ in range(2) for each in rounded(value, value.clone())]
    share = (value.double() - 1) * 2**7
    for i, each in enumerate(roundings):
        assert bool(((each == 1) | (each == 1 + 2**-7)).all())
        error = (each - value.double()) * 2**7
        assert abs(float(error.sum())) < 5 * math.sqrt(float((share * (1 - share)).sum()))
        for other in roundings[:i]:  # errors that have nothing to do with each other
            product = error * (other - value.double()) * 2**7
            assert abs(float(product.sum())) < 5 * math.sqrt(float((share * (1 - share)).square().sum()))


def test_single_values_are_rounded_without_bias() -> None:
    """The mean of 2**14 roundings of a value is the value, within five standard errors, up to the largest value."""
    values = torch.tensor([1.001, -1.001, 3e-39, -1e-40, 6.5e-5, math.pi, -1e30, LARGEST * (1 - 2**-9), 1 + 2**-8])
    rounded = round_stochastically(values.expand(2**14, -1)).double()
    lower, upper = neighbours(values)
    share = (values - lower) / (upper - lower)
    error = (upper - lower).abs() * (share * (1 - share) / 2**14).sqrt()
    assert bool(((rounded.mean(0) - values).abs() < 5 * error).all())
    assert bool((error > 0).all())


def test_what_bfloat16_holds_stays_as_it_is() -> None:
    """All numbers of bfloat16, inf among them, are rounded to themselves; nan stays nan, whatever its bits."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lower in (0, 1, 2**16 - 1):  # the largest makes a nan of which a carry would make -0.0
        value = (bits | lower).view(torch.float32)
        rounded = round_stochastically(value)
        assert torch.equal(rounded.isnan(), value.isnan())
        if lower == 0:
            numbers = ~value.isnan()
            assert_same(rounded[numbers], value.bfloat16()[numbers])
    beyond = torch.tensor([LARGEST * (1 + 2**-12), torch.finfo(torch.float32).max, -LARGEST, math.inf, -math.inf])
    assert_same(round_stochastically(beyond), beyond.bfloat16())


def test_kahan_rounds_to_nearest_and_keeps_the_rest() -> None:
    """The weight is what `bfloat16()` makes, ties included, and with the compensation it has 16 bits at least."""
    value = torch.cat([torch.randn(2**16), torch.arange(-(2**15), 2**15) * 2.0**-7 + 2.0**-8, torch.zeros(1)])
    low, compensation = narrowed([value], compensated=True, stochastic=False)
    assert_same(low, value.bfloat16())
    assert bool((compensation != 0).any())
    assert bool(((low.float() + compensation.float() - value).abs() <= value.abs() * 2**-16).all())


# ------------------------------------------------------------------------------------------------------- one optimizer


def parameters_of(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters of several layouts and sizes, an empty one among them."""
    made = torch.Generator().manual_seed(3)
    like = [torch.randn(shape, generator=made) for shape in [(7, 5), (33,), (4, 3, 2, 2), (), (0, 3)]]
    like[2] = like[2].to(memory_format=torch.channels_last)
    return [nn.Parameter(tensor.to(dtype)) for tensor in like]


def stepped(form: StateForm, name: str, steps: int = 5) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return parameters and optimizer after some steps in a form."""
    params = parameters_of(torch.float32 if form.rounding is None else torch.bfloat16)
    optimizer = OPTIMIZERS[name](params)
    set_state_form(optimizer, form)
    made = torch.Generator().manual_seed(4)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
        step_of(optimizer)()
    return params, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rounding", [None, "kahan"])
def test_arithmetic_is_float32(rounding: str | None, name: str) -> None:
    """torch's own step of float32 tensors, rounded behind each step, leaves the same bits."""
    params, optimizer = stepped(StateForm(True, rounding), name)
    weights = [param.detach().float() for param in parameters_of(torch.bfloat16 if rounding else torch.float32)]
    kept = [torch.zeros_like(weight) for weight in weights]
    reference = OPTIMIZERS[name](weights)
    made = torch.Generator().manual_seed(4)
    for _ in range(5):
        for weight, rest in zip(weights, kept, strict=True):
            weight += rest
            gradient = torch.randn(weight.shape, generator=made).to(params[0].dtype)
            weight.grad = torch.empty_like(weight).copy_(gradient)
        reference.step()
        for weight, rest in zip(weights, kept, strict=True):
            if rounding:
                rest.copy_((weight - weight.bfloat16()).bfloat16())
                weight.copy_(weight.bfloat16())
            for key, value in reference.state[weight].items():
                value.copy_(value if key == "step" else value.bfloat16())
    for param, weight, rest in zip(params, weights, kept, strict=True):
        assert_same(param.detach().float(), weight)
        state = {key: value.float() for key, value in optimizer.state[param].items()}
        assert_same(state, {**reference.state[weight], **({"compensation": rest} if rounding else {})})


@pytest.mark.parametrize("rounding", [None, "kahan"])
def test_parts_of_parameters_make_no_difference(rounding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a few elements at a time leaves the bits of one of all, and counts once."""
    whole = stepped(StateForm(True, rounding), "AdamW")
    monkeypatch.setattr(state_form, "_MOST_ELEMENTS", 8)
    parts = stepped(StateForm(True, rounding), "AdamW")
    for left, right in zip(whole[0], parts[0], strict=True):
        assert_same(left.detach(), right.detach())
        assert_same({**whole[1].state[left]}, {**parts[1].state[right]})
        assert float(parts[1].state[right]["step"]) == 5


def test_small_updates_are_not_lost() -> None:
    """A thousand steps of 2**-12 move a weight of 1 to 0.75; rounded to nearest, it would stay where it is."""
    for rounding in ("stochastic", "kahan"):
        param = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([param], lr=2.0**-12, fused=True)
        set_state_form(optimizer, StateForm(False, rounding))
        for _ in range(1024):
            param.grad = torch.ones_like(param)
            step_of(optimizer)()
        assert abs(float(param.detach().double().mean()) - 0.75) < 2e-3
        assert rounding == "stochastic" or bool((param == 0.75).all())


def test_a_checkpoint_in_float32_is_cast() -> None:
    """`load_state_dict` casts moments as torch casts them to the dtype of a weight, and keeps the step count."""
    plain = OPTIMIZERS["AdamW"](parameters_of(torch.float32))
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 0.3)
    plain.step()
    params, optimizer = stepped(StateForm(True), "AdamW")
    optimizer.load_state_dict(plain.state_dict())
    for param, other in zip(params, plain.param_groups[0]["params"], strict=True):
        state = plain.state[other]
        rounded = {key: state[key].bfloat16() for key in ("exp_avg", "exp_avg_sq")}
        assert_same({**optimizer.state[param]}, {"step": state["step"], **rounded})
    set_state_form(optimizer, None)
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32
    step_of(optimizer)()


# ---------------------------------------------------------------------------------------------------------- whole steps


class Run:
    """A training that can be saved to disk and go on in other objects."""

    def __init__(self, engine: Engine, name: str, form: str, accumulate: int = 1, compile: str | None = None) -> None:
        self.device, graph = engine
        rounding, moments = FORMS[form]
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))
        self.model = net.to(self.device)
        policy = None
        if rounding is not None:
            policy = Policy(params="bfloat16", rounding=rounding, modules={nn.LayerNorm: "float32"})
            policy.apply(self.model)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = ampkit.GradScaler(self.device, init_scale=1024.0, growth_interval=4)
        self.low = rounding is not None
        self.step = ampkit.graphed_step(
            self.loss,
            self.model,
            self.optimizer,
            policy=policy,
            moments=moments,
            scaler=self.scaler,
            scheduler=self.schedule,
            max_norm=0.5,
            accumulate=accumulate,
            compile=compile,
            graph=graph,
            on_failure="raise",
        )
        self.parts = (self.model, self.optimizer, self.schedule, self.scaler)

    def loss(self, model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
        return model(x).float().square().mean() * boost

    def train(self, first: int, last: int) -> list[Any]:
        """Do some calls; return the state after each. Every seventh overflows."""
        history = []
        for i in range(first, last):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i)).to(self.device)
            boost = torch.tensor(math.inf if i % 7 == 2 else 1.0).to(self.device)
            self.step(x.bfloat16() if self.low else x, boost)
            history.append(training_state(self.model, self.optimizer, self.scaler))
        return history

    def save(self, path: Path) -> None:
        rng = torch.get_rng_state(), torch.cuda.get_rng_state() if self.device == "cuda" else None
        torch.save(([part.state_dict() for part in self.parts], rng), path)

    def load(self, path: Path) -> None:
        states, (cpu, cuda) = torch.load(path, weights_only=True)
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_graphs_have_the_bits_of_eager(engine: Engine, name: str, form: str, accumulate: int, tmp_path: Path) -> None:
    """30 calls, and 30 calls that were interrupted and resumed in new objects, leave the same state after each."""
    with deterministic(), taped() if engine[0] == "cpu" else nullcontext():
        eager = Run((engine[0], "off"), name, form, accumulate).train(0, 30)
        graphed = Run(engine, name, form, accumulate)
        assert_same(graphed.train(0, 30), eager)
        assert graphed.step.replays >= 15
        assert graphed.step.skipped > 0
        first = Run(engine, name, form, accumulate)
        history = first.train(0, 15)
        first.save(tmp_path / "checkpoint")
        resumed = Run(engine, name, form, accumulate)
        resumed.load(tmp_path / "checkpoint")
        assert_same(history + resumed.train(15, 30), eager)
        assert resumed.step.replays > 0
    dtypes = {value.dtype for state in graphed.optimizer.state_dict()["state"].values() for value in state.values()}
    assert torch.bfloat16 in dtypes
    for run in (graphed, first, resumed):
        run.step.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(name: str, form: str) -> None:
    """Weights, moments, compensation and step counts keep their bits, nan included, where a gradient is not finite."""
    run = Run(("cpu", "emulate"), name, form)
    run.train(3, 9)
    with torch.no_grad():
        run.model[0].bias.view(torch.int16 if run.low else torch.int32)[0] = 0x7FC1  # a nan of bfloat16
    before = training_state(run.model, run.optimizer, run.scaler)
    after = run.train(9, 10)[0]
    assert float(after["scaler"]["scale"]) == 0.5 * float(before["scaler"]["scale"])
    for name_of, value in before.items():
        if name_of not in ("scaler", "learning rates", "cpu rng", "cuda rng"):
            assert_same(after[name_of], value, name_of)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("name", "form"), [("AdamW", "moments"), ("SGD", "stochastic"), ("Adam", "kahan")])
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_updates(engine: Engine, name: str, form: str) -> None:
    """Graphs have the bits of eager compiled updates, which skip, and keep what rounding takes off."""
    with deterministic():
        eager = Run((engine[0], "off"), name, form, compile="default").train(0, 12)
        graphed = Run(engine, name, form, compile="default")
        assert_same(graphed.train(0, 12), eager)
    assert any("compiled: update" in line for line in graphed.step.report().compiled)
    assert graphed.step.replays > 0
    weights = [key for key in eager[9] if "rng" not in key and key not in ("scaler", "learning rates")]
    assert_same({key: eager[9][key] for key in weights}, {key: eager[8][key] for key in weights})  # skipped
    for state in graphed.optimizer.state_dict()["state"].values():
        assert all(value.dtype is torch.bfloat16 for key, value in state.items() if key == "compensation")
        assert "compensation" not in state or bool((state["compensation"] != 0).any())
    graphed.step.close()


# ----------------------------------------------------------------------------------------------------------- wrong use


def make(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> ampkit.GraphedStep:
    return ampkit.graphed_step(lambda model, x: model(x).sum(), model, optimizer, graph="off", **options)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("AdamW", {"moments": "float16"}, "moments='float16'"),
        ("AdamW", {"moments": "bfloat16", "arithmetic": "torch"}, "with moments= or rounding="),
        ("AdamW unfused", {"moments": "bfloat16"}, "fused=True"),
        ("RMSprop", {"moments": "bfloat16"}, "RMSprop is not Adam, AdamW or SGD"),
        ("SGD dampening", {"moments": "bfloat16"}, "dampening=0"),
        ("AdamW tensor", {"moments": "bfloat16"}, "betas that are tensors"),
        ("AdamW hooks", {"moments": "bfloat16"}, "step hooks"),
    ],
)
def test_wrong_use(kind: str, options: dict[str, Any], says: str) -> None:
    """Each message names the argument, and what to write."""
    model = nn.Linear(3, 2)
    params = list(model.parameters())
    hooked = OPTIMIZERS["AdamW"](params)
    hooked.register_step_post_hook(lambda optimizer, args, kwargs: None)
    optimizer = {
        "AdamW": OPTIMIZERS["AdamW"](params),
        "AdamW unfused": torch.optim.AdamW(params, betas=BETAS),
        "RMSprop": torch.optim.RMSprop(params),
        "SGD dampening": torch.optim.SGD(params, momentum=0.9, dampening=0.1, fused=True),
        "AdamW tensor": torch.optim.AdamW(params, betas=(torch.tensor(0.9), torch.tensor(0.95)), fused=True),
        "AdamW hooks": hooked,
    }[kind]
    with pytest.raises((ValueError, NotImplementedError), match="graphed_step") as raised:
        make(model, optimizer, **options)
    assert says in str(raised.value)


def test_weights_in_bfloat16_need_a_rounding() -> None:
    """`moments=` alone over bfloat16 weights names the policy to pass."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"Policy\(params='bfloat16', rounding='stochastic'\)"):
        make(model, OPTIMIZERS["AdamW"](model.parameters()), moments="bfloat16")


def test_an_average_that_never_falls_is_warned_of() -> None:
    """With the default beta2 of 0.999, rounding to nearest keeps `exp_avg_sq` from falling: shown, and said."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.warns(ampkit.AmpkitWarning, match=r"never falls.*betas=\(0.9, 0.95\)"):
        step = make(model, optimizer, moments="bfloat16")
    step(torch.ones(1, 3))
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    for _ in range(50):
        step(torch.zeros(1, 3))
    assert_same(optimizer.state[model.weight]["exp_avg_sq"], before["exp_avg_sq"])


def test_copies_on_other_ranks_are_not_rounded_at_random(process_group: None) -> None:
    """Each rank of DistributedDataParallel would draw other bits."""
    model = Policy.parse("bf16-true").apply(nn.Linear(3, 2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with pytest.raises(NotImplementedError, match=r"DistributedDataParallel.*rounding='kahan'"):
        make(wrapped, optimizer, policy=Policy(params="bfloat16", rounding="stochastic"))


def test_state_can_be_pickled_with_its_optimizer() -> None:
    """The form stays with the step: a copy of the optimizer is torch's."""
    params, optimizer = stepped(StateForm(True), "AdamW")
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    plain = OPTIMIZERS["AdamW"](parameters_of(torch.float32))
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert plain.state[plain.param_groups[0]["params"][0]]["exp_avg"].dtype is torch.float32
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.bfloat16
