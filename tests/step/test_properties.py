"""Whatever is passed to a public function: it works, or an error says what is wrong, and nothing is half done.

`AMPKIT_EXAMPLES=2000 pytest tests/step/test_properties.py` draws that many examples per test, other ones each time.
"""

import dataclasses
import inspect
import math
import os
import re
import traceback
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_same, bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ampkit
from ampkit import debug

pytestmark = [
    pytest.mark.filterwarnings("ignore::ampkit.AmpkitWarning"),
    pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available"),
    pytest.mark.filterwarnings("ignore:.*(quantize|sparse|Sparse|nested|Named tensors).*"),  # of torch, by odd tensors
]

AMPKIT = str(Path(ampkit.__file__).parent)
MORE = int(os.environ.get("AMPKIT_EXAMPLES", "0"))


def examples(count: int) -> Any:
    """Return hypothesis settings: the same few examples in each run, or as many as the environment says."""
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(
        max_examples=MORE or count, derandomize=not MORE, deadline=None, database=None, suppress_health_check=quiet
    )


# ----------------------------------------------------------------------------------------------------------- odd values


class Odd:
    """An object that is nothing in particular."""


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NoEq:
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


class NoHash:
    __hash__ = None  # type: ignore[assignment]  # what a list has


class OwnTensor(Tensor):
    pass


@dataclasses.dataclass
class Record:
    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class OwnDict(dict):  # type: ignore[type-arg]
    pass


class OwnList(list):  # type: ignore[type-arg]
    pass


Pair = namedtuple("Pair", "left right")


def cyclic_list() -> Any:
    made: list[Any] = [torch.ones(2)]
    made.append((made,))
    return made


def cyclic_dict() -> Any:
    made: dict[str, Any] = {}
    made["self"] = made
    return made


def cyclic_user_dict() -> Any:
    made: Any = UserDict()
    made["self"] = made
    return made


def deep_list() -> Any:
    made: list[Any] = []
    for _ in range(3000):
        made = [made]
    return made


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


# Each is made anew: some are used up, or changed.
OBJECTS: list[Callable[[], Any]] = [
    Odd,
    NoRepr,
    NoEq,
    NoHash,
    lambda: Odd,
    lambda: ...,
    lambda: math,
    lambda: 1j,
    lambda: 10**400,
    lambda: b"bytes",
    lambda: ValueError("not raised"),
    lambda: range(3),
    lambda: (i for i in range(2)),
    lambda: iter([torch.ones(1)]),
    lambda: np.float32(2),
    lambda: np.int64(2),
    lambda: np.ones(3),
    lambda: np.ones(()),
    lambda: np.array("text"),
    lambda: np.dtype("float32"),
    lambda: torch.float32,
    lambda: torch.int32,
    lambda: torch.device("cpu"),
    torch.Generator,
    lambda: nn.Linear(2, 2),
    lambda: [nn.Linear(2, 2), None],
    lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
    lambda: torch.amp.GradScaler("cpu"),
    lambda: UserDict(a=1),
    lambda: "\ud800",
    lambda: "a\0b",
    lambda: "x" * 5000,
    lambda: {"a": torch.ones(2)},
    lambda: {1: 2},
    lambda: {1, "a"},
    lambda: [("add", "float32")],
    lambda: [("add", 3), None],
    cyclic_list,
    cyclic_dict,
    cyclic_user_dict,
    deep_list,
]
TENSORS: list[Callable[[], Any]] = [
    lambda: torch.tensor(1.0),
    lambda: torch.ones(3),
    lambda: torch.tensor([True, False]),
    lambda: torch.ones(3, dtype=torch.int64),
    lambda: torch.ones(3, dtype=torch.complex64).conj(),
    lambda: torch.ones(3, device="meta"),
    lambda: torch.ones(0, 4),
    lambda: torch.ones(3, requires_grad=True) * 2,
    lambda: nn.Parameter(torch.ones(3), requires_grad=False),
    lambda: nn.UninitializedParameter(),
    lambda: torch.ones(1).expand(3),
    lambda: torch.ones(8)[::2],
    lambda: torch.ones(5).as_strided((3, 3), (1, 1)),
    lambda: torch.ones(3, 4).t(),
    lambda: torch.ones(3).as_subclass(OwnTensor),
    lambda: torch.full((3,), math.nan),
    lambda: torch.ones(3).to(torch.float8_e4m3fn),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.eye(3).to_sparse_csr(),
    lambda: torch.ones(3, 3).to_mkldnn(),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8),
    inference_tensor,
]
PLAIN: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["float32", "bf16", "cuda", "cpu", "auto", "eager", "nonsense", "mask"]),
    st.just([]),
    st.just(()),
    st.just({}),
)


def made(factories: list[Callable[[], Any]]) -> Any:
    return st.sampled_from(factories).map(lambda make: make())


ANYTHING: Any = st.one_of(PLAIN, made(OBJECTS), made(TENSORS))


# -------------------------------------------------------------------------------------------------------- what is clear


def error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return type(value).__name__


def assert_clear(error: Exception, function: str, argument: str, value: object) -> None:
    """Assert that an error is of a kind for wrong use, comes from ampkit, and names the argument and what came.

    Where a function has one argument, its name may be all.
    """
    told = "".join(traceback.format_exception(error))
    assert isinstance(error, (ValueError, TypeError, NotImplementedError, ampkit.AmpkitError)), told
    assert traceback.extract_tb(error.__traceback__)[-1].filename.startswith(AMPKIT), told
    text = str(error)
    assert len(text) < 2000, told
    parts = [*value, *value.values()] if isinstance(value, Mapping) else []
    parts = [*value] if isinstance(value, (list, tuple, set)) else parts
    quotes = {quote for part in (value, *parts) for quote in (text_of(part)[:20], type(part).__name__)}
    # Of a sequence a message may quote the wrong part; of a number or a dtype, what was read.
    assert any(quote in text for quote in quotes) or re.search(rf"\b{argument}(\[\d+\])?[=)]", text), told
    named = argument if len(arguments_of(function)) > 1 else f"{argument}|{re.escape(function)}"
    assert re.search(rf"\b({named})\b", text), told


# ----------------------------------------------------------------------------------------------------------- arguments

X, Y = torch.arange(12.0).view(3, 4) / 10, torch.ones(3, 2)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters() if isinstance(model, nn.Module) else [torch.ones(1)], lr=0.1, fused=True)


def of_a_step(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a caller by keyword of a function of a loss function, a model, an optimizer and more."""

    def call(**given: Any) -> Any:
        model = given.get("model", linear() if "model" not in given else None)
        return function(**{"loss_fn": loss_fn, "model": model, "optimizer": sgd(model), **options, **given})

    return call


def of_a_scaler(method: str) -> Callable[..., Any]:
    """Return a caller by keyword of a method of a scaler within an iteration, which a refusal leaves as it was."""

    def call(**given: Any) -> Any:
        model, scaler = linear(), ampkit.GradScaler("cpu")
        optimizer = sgd(model)
        scaler.scale(loss_fn(model, X, Y)).backward()
        if method == "update":
            scaler.step(optimizer)
        if method in ("step", "unscale_"):
            given = {"optimizer": optimizer, **given}
        before = scaler.state_dict()
        error = error_of(lambda: getattr(scaler, method)(**given))
        if error is not None:
            assert scaler.state_dict() == before
            if method in ("update", "step", "unscale_"):
                getattr(scaler, method)(*([] if method == "update" else [optimizer]))  # goes on as if nothing had been
            raise error

    return call


def with_first(function: Callable[..., Any], *rest: Any, make: Callable[[], Any], **options: Any) -> Callable[..., Any]:
    """Return a caller by keyword of a function whose first argument has no keyword, or none that matters."""

    def call(**given: Any) -> Any:
        first = given.pop(FIRST[function]) if FIRST[function] in given else make()
        return function(first, *rest, **{**options, **given})

    return call


def first_parameter(function: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(function).parameters))


FORECASTS: list[debug.MemoryProfile] = []


def forecast() -> debug.MemoryProfile:
    if not FORECASTS:
        FORECASTS.append(of_a_step(debug.forecast, batch=(X, Y), device="cpu")())
    return FORECASTS[0]


def a_loop() -> tuple[nn.Module, Callable[..., Tensor]]:
    model = nn.Linear(X.shape[-1], 1)
    return model, lambda x: model(x).sum()


def entered(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(**given: Any) -> None:
        with function(**{"folder": "unused", **given}):
            pass

    return call


FIRST = {
    function: first_parameter(function)
    for function in (
        ampkit.explain,
        ampkit.make_graphed_callables,
        ampkit.prefetch,
        debug.cycles,
        debug.find_syncs,
        debug.memory,
        debug.memory_page,
        debug.numerics,
        debug.plot_memory,
    )
}
BF16 = ampkit.Policy(params="bfloat16", compute="bfloat16")
# How each public function is called by keyword, with one argument given and good ones for the rest.
CALLERS: dict[str, Callable[..., Any]] = {
    "Buckets": lambda **given: ampkit.Buckets(**{"batch": (4, 8), **given}),
    "GradScaler": lambda **given: ampkit.GradScaler(**{"device": "cpu", **given}),
    **{
        f"GradScaler.{name}": of_a_scaler(name)
        for name in (
            "load_state_dict",
            "scale",
            "set_backoff_factor",
            "set_growth_factor",
            "set_growth_interval",
            "step",
            "unscale_",
            "update",
        )
    },
    "Policy": ampkit.Policy,
    "Policy.apply": BF16.apply,
    "Policy.autocast": BF16.autocast,
    "Policy.parse": ampkit.Policy.parse,
    "Policy.remove": BF16.remove,
    "custom_bwd": ampkit.custom_bwd,
    "custom_fwd": ampkit.custom_fwd,
    "debug.compare": lambda **given: debug.compare(**{"fn_a": list, "fn_b": list, **given}),
    "debug.compare_loops": lambda **given: debug.compare_loops(
        **{"old": a_loop, "new": a_loop, "batches": [(X,)], **given}
    ),
    "debug.cycles": with_first(debug.cycles, make=lambda: None),
    "debug.find_syncs": with_first(debug.find_syncs, make=lambda: None),
    "debug.forecast": of_a_step(debug.forecast, batch=(X, Y), device="cpu"),
    "debug.memory": with_first(debug.memory, make=lambda: linear),
    "debug.memory_page": with_first(debug.memory_page, make=forecast, path=os.devnull),
    "debug.name_kernels": lambda **given: debug.name_kernels(
        **{
            "trace": {"traceEvents": []},
            "step": of_a_step(ampkit.graphed_step, graph="emulate", annotate=True)(),
            **given,
        }
    ),
    "debug.numerics": with_first(debug.numerics, make=linear),
    "debug.on_oom": entered(debug.on_oom),
    "debug.plot_memory": with_first(debug.plot_memory, make=forecast, path=os.devnull),
    "debug.snapshot": entered(debug.snapshot),
    "debug.trace": debug.trace,
    "explain": with_first(ampkit.explain, X, make=linear, device_type="cpu"),
    "graphed": lambda **given: ampkit.graphed(**{"modules": (), "graph": "emulate", **given})(len),
    "graphed_step": of_a_step(ampkit.graphed_step, graph="emulate"),
    "make_graphed_callables": with_first(ampkit.make_graphed_callables, make=linear, sample_args=(X,), graph="emulate"),
    "op_table": ampkit.op_table,
    "prefetch": with_first(ampkit.prefetch, make=lambda: [X], device="cpu"),
}
OF_TORCH = ["device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"]
# What they return, raise and make: nobody calls these by hand.
RESULTS = {
    "AmpkitError",
    "AmpkitWarning",
    "CaptureError",
    "CaptureWarning",
    "Explanation",
    "GraphReport",
    "GraphedFunction",
    "GraphedStep",
    "HostConstant",
    "HostConstants",
    "InputMismatch",
    "NonfiniteError",
    "OpTable",
    "Report",
    "ScalerStats",
    "StepOutput",
}


def arguments_of(name: str) -> list[str]:
    function: Any = ampkit
    for part in name.split("."):
        function = getattr(function, part)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind not in variable and parameter.name != "self"]
    return [*(OF_TORCH if name == "GradScaler" else []), *named]


PAIRS = [(name, argument) for name in CALLERS for argument in arguments_of(name)]


def is_the_users(name: str, argument: str, value: Any) -> bool:
    """Return whether a value is a right one, so that what follows is between it and the other arguments."""
    if argument in ("fn", "fn_a", "fn_b", "function", "callables", "model", "loss_fn") and name != "graphed_step":
        return callable(value) and not (argument == "model" and name.startswith("Policy"))
    if (name, argument) in (("make_graphed_callables", "sample_args"), ("make_graphed_callables", "sample_kwargs")):
        return isinstance(value, (tuple, list, dict))
    if argument in ("batch", "inputs") and name.startswith("debug"):
        return True
    if argument == "path" or (name, argument) == ("debug.name_kernels", "trace"):
        return isinstance(value, str)  # where the system says what is wrong
    if name == "op_table" and isinstance(value, str):
        return value in ("cpu", "cuda")  # which takes a second
    if name == "GradScaler.scale":
        return isinstance(value, Tensor)
    return argument in ("num_warmup_iters", "steps") and isinstance(value, int) and value > 5  # and does as much


def test_every_public_function_is_called() -> None:
    """A new one needs a caller here."""
    names = set(ampkit.__all__) - RESULTS - {"debug"}
    names |= {f"debug.{name}" for name in dir(debug) if inspect.isfunction(getattr(debug, name))}
    assert {name for name in CALLERS if name[0] != "P" and "GradScaler." not in name} == names - {"Policy"}
    own = {name for name, member in vars(ampkit.Policy).items() if name[0] != "_" and not isinstance(member, property)}
    assert {f"Policy.{name}" for name in own - {"params", "compute", "output", "ops", "modules"}} <= CALLERS.keys()


@examples(500)
@given(st.sampled_from(PAIRS), ANYTHING)
@pytest.mark.slow
def test_any_argument_works_or_is_named(pair: tuple[str, str], value: Any) -> None:
    """Item 6: every argument of every public function: a ValueError that names it and says what came."""
    name, argument = pair
    if is_the_users(name, argument, value):
        return
    error = error_of(lambda: CALLERS[name](**{argument: value}))
    if error is None:
        return
    if name == "GradScaler.load_state_dict" and isinstance(value, dict) and not value:
        assert isinstance(error, RuntimeError)  # as torch's scaler raises for the state of a disabled one
        return
    if name == "GradScaler.scale":
        assert isinstance(error, ValueError)
        assert "outputs" in str(error)
    else:
        assert_clear(error, name, argument, value)


WORDS = [
    *("params", "compute", "output", "ops", "modules", "=", ",", "{", "}", ":", '"', " ", "\\", "(", "["),
    *("F16", "float32", "bfloat16", "16-mixed", "softmax", "add", "promote", "torch.nn.Linear", "x", "ops={add:half}"),
]


@examples(150)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_any_text_is_a_policy_or_refused(text: str) -> None:
    """Item 6: from the words that policies are written in: what is read is read again from what it prints."""
    error = error_of(lambda: ampkit.Policy.parse(text))
    if error is None:
        policy = ampkit.Policy.parse(text)
        assert ampkit.Policy.parse(str(policy)) == policy
    else:
        assert isinstance(error, ValueError)
        assert "Policy" in str(error)
        assert error_of(lambda: ampkit.graphed_step(loss_fn, linear(), sgd(linear()), policy=text)) is not None


KEYS = [*ampkit.GradScaler("cpu").state_dict(), "another", 3]


@examples(80)
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3), st.sets(st.sampled_from(KEYS), max_size=1))
def test_any_state_dict_loads_or_changes_nothing(changed: dict[Any, Any], missing: set[Any]) -> None:
    """Item 6: a state dict with odd entries: all of it is loaded, or the scaler is as it was and goes on."""
    model, scaler = linear(), ampkit.GradScaler("cpu", hysteresis=2, max_scale=2.0**20)
    optimizer = sgd(model)
    scaler.scale(loss_fn(model, X, Y)).backward()
    before = scaler.state_dict()
    state = {key: value for key, value in {**before, **changed}.items() if key not in missing}
    error = error_of(lambda: scaler.load_state_dict(state))
    if error is not None:
        assert isinstance(error, ValueError)
        assert any(f"{key}=" in str(error) for key in changed) or any(repr(key) in str(error) for key in missing)
        assert scaler.state_dict() == before
    scaler.step(optimizer)
    scaler.update()
    assert math.isfinite(scaler.get_scale())


# ------------------------------------------------------------------------------------------------------------- batches


def wrapped(children: Any) -> Any:
    """Return a strategy for containers of what `children` draws."""
    several = st.lists(children, max_size=3)
    named = st.dictionaries(st.sampled_from(["a", "b", "mask"]), children, max_size=2)
    kinds: list[Callable[[Any], Any]] = [UserDict, OwnDict, OrderedDict, partial(defaultdict, list)]
    return st.one_of(
        several,
        several.map(tuple),
        several.map(OwnList),
        several.map(deque),
        named,
        *(named.map(kind) for kind in kinds),
        st.builds(Pair, children, children),
        children.map(Record),
        children.map(Frozen),
    )


BATCHES: Any = st.recursive(ANYTHING, wrapped, max_leaves=4)


def ignoring(model: nn.Module, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """A loss function that no odd part of a batch can break."""
    return model(x).square().mean()


class Training:
    """A model that is trained by one of ampkit's ways to call it."""

    def __init__(self, way: str, graph: str) -> None:
        self.model = linear()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2.0**-7, fused=True)
        options: dict[str, Any] = {"graph": graph, "warmup": 2}
        self.step: Any
        if way == "graphed":

            def step(x: Tensor, *rest: Any, **named: Any) -> Tensor:
                optimizer.zero_grad()
                loss = ignoring(self.model, x)
                loss.backward()
                optimizer.step()
                return loss

            self.step = ampkit.graphed(modules=(self.model,), optimizers=(optimizer,), **options)(step)
        else:
            buckets = ampkit.Buckets(batch=(4, 8)) if way == "buckets" else None
            self.step = ampkit.graphed_step(ignoring, self.model, optimizer, buckets=buckets, **options)

    def weights(self) -> Any:
        return bits(torch.cat([param.detach().reshape(-1) for param in self.model.parameters()]))


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_any_batch_is_taken_or_refused(count: int) -> None:
    """Item 6: with and without graphs alike: a refusal says where in the batch and changes nothing, and the next batch,
    whether new or already captured, gives the bits of a step that was never given the refused one.
    """
    ways = st.sampled_from(["step", "buckets", "graphed"])
    examples(count)(given(ways, st.lists(BATCHES, min_size=1, max_size=2), st.booleans())(check_batches))()


def check_batches(way: str, odd: list[Any], by_name: bool) -> None:
    graphed, eager = Training(way, "emulate"), Training(way, "off")
    good: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((X,), {})] * 3
    strange = [((X,), {"extra": part}) if by_name else ((X, part), {}) for part in odd]
    for args, named in [*good, *strange, *good, *strange * 3]:
        before = graphed.weights()
        errors = [error_of(partial(training.step, *args, **named)) for training in (graphed, eager)]
        assert [type(error) for error in errors] == [type(errors[0])] * 2, errors
        if errors[0] is not None:
            told = "".join(traceback.format_exception(errors[0]))
            assert isinstance(errors[0], ampkit.InputMismatch), told
            assert re.search(r"\bbatch\b", str(errors[0])), told
            assert str(errors[0]) == str(errors[1])
            assert_same(graphed.weights(), before)
        assert_same(graphed.weights(), eager.weights())
    assert graphed.step.replays >= 1
    str(graphed.step.report())


@examples(8)
@given(st.integers(0, 7), st.sampled_from([KeyError, RuntimeError, AssertionError, ZeroDivisionError, StopIteration]))
@pytest.mark.slow
def test_an_error_of_the_users_own_comes_through(at: int, kind: type[Exception]) -> None:
    """Item 6: what loss_fn raises is the same object, in any call, and the step goes on with the next batch."""
    raised = kind("the user's")

    def breaks(model: nn.Module, x: Tensor, broken: bool = False) -> Tensor:
        if broken:
            raise raised
        return ignoring(model, x)

    model, reference = linear(), Training("step", "off")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-7, fused=True)
    step = ampkit.graphed_step(breaks, model, optimizer, graph="emulate", warmup=2)
    for i in range(8):
        if i == at:
            assert error_of(lambda: step(X, broken=True)) is raised
        step(X)
        reference.step(X)
    assert_same(bits(torch.cat([param.detach().reshape(-1) for param in model.parameters()])), reference.weights())


@examples(80)
@given(BATCHES)
def test_any_batch_is_prefetched_or_refused(batch: Any) -> None:
    """Item 6: a loader may yield anything; what cannot be moved is an AmpkitError that names batch and class."""
    error = error_of(lambda: list(ampkit.prefetch([batch], "cpu")))
    if error is not None:
        assert isinstance(error, ampkit.AmpkitError)
        assert "prefetch: batch 0" in str(error)


@examples(100)
@given(BATCHES, st.sampled_from([None, torch.float32]))
def test_any_argument_of_a_decorated_forward(tree: Any, cast_inputs: torch.dtype | None) -> None:
    """Item 6: `custom_fwd` hands on what it does not cast, and refuses what holds itself."""
    decorated = ampkit.custom_fwd(lambda *args: None, cast_inputs=cast_inputs)
    with torch.autocast("cpu", torch.bfloat16):
        error = error_of(lambda: decorated(X, tree))
    if error is not None:
        assert isinstance(error, ValueError)
        assert "custom_fwd" in str(error)
