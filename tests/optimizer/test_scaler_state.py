"""The state of a loss scale: impossible arguments and state dicts, its floor, a warning if every step is skipped."""

import copy
import json
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from harness import DEVICES, ENGINES, make_batches, no_sync
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
OWN = ("hysteresis", "min_scale", "max_scale", "dynamic", "steps", "skipped", "_patience")


def used_scaler(device: str = "cpu", **rule: Any) -> ampkit.GradScaler:
    """Return a scaler that was used, so that its tensors exist."""
    scaler = ampkit.GradScaler(device, init_scale=64.0, growth_interval=3, **rule)
    weight = torch.zeros(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    for bad in (1.0, math.inf, 1.0):
        scaler.scale(torch.zeros((), device=device))
        weight.grad = torch.full_like(weight, bad)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def whole(scaler: ampkit.GradScaler) -> Any:
    """Return everything that loading may change."""
    tensors = {name: tensor.item() for name, tensor in scaler.tensors().items()}
    return copy.deepcopy((scaler.state_dict(), tensors, scaler.rule(), scaler._init_counts, scaler._init_patience))


BAD: dict[str, list[Any]] = {
    "scale": [math.nan, 0, 0.0, -1.0, math.inf, "64", None, 1e39, 1e-40, [1.0], True, torch.ones(2)],
    "growth_factor": [math.nan, 0, -2.0, math.inf, "2", None, 0.5],
    "backoff_factor": [math.nan, 0, -0.5, math.inf, "0.5", None, 1.5],
    "growth_interval": [math.nan, 0, -1, math.inf, "3", None, 2.5, True],
    "_growth_tracker": [math.nan, -1, math.inf, "0", None, 0.5, 2**31],
    "hysteresis": [0, -1, math.nan, "1", None, 1.5, True],
    "min_scale": [0.0, -1.0, math.nan, math.inf, "1", 1e9],
    "max_scale": [0.0, -1.0, math.nan, "1", 1e-60],
    "dynamic": [None, "yes", 1, math.nan],
    "steps": [-1, math.nan, math.inf, "3", None, 0.5],
    "skipped": [-1, math.nan, math.inf, "3", None, 0.5],
    "_patience": [math.nan, math.inf, "3", None, 0.5],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
@pytest.mark.quick(4)
def test_an_impossible_entry_changes_nothing(device: str, key: str, value: Any) -> None:
    """S6: the error names the key and its value, and the scaler, used or new, is unchanged."""
    bad = {**used_scaler(device, max_scale=1e6).state_dict(), key: value}
    for scaler in (used_scaler(device), ampkit.GradScaler(device)):
        before = whole(scaler)
        with pytest.raises(ValueError, match=r"GradScaler.load_state_dict\(") as caught:
            scaler.load_state_dict(bad)
        assert f"{key}={value!r}" in str(caught.value)
        assert whole(scaler) == before


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_entry_changes_nothing(key: str) -> None:
    """S6: an entry that torch's state has must not be missing."""
    state = used_scaler().state_dict()
    del state[key]
    scaler = used_scaler()
    before = whole(scaler)
    with pytest.raises(ValueError, match=f"the key '{key}' is missing"):
        scaler.load_state_dict(state)
    assert whole(scaler) == before


def test_what_is_no_state_dict() -> None:
    """S6: an empty dict raises torch's error, and an object that is no dict a ValueError."""
    with pytest.raises(RuntimeError, match="empty"):
        ampkit.GradScaler("cpu").load_state_dict({})
    with pytest.raises(ValueError, match="expected the dict that state_dict"):
        ampkit.GradScaler("cpu").load_state_dict([1.0])  # type: ignore[arg-type]
    ampkit.GradScaler("cpu", enabled=False).load_state_dict({})


def test_what_torch_accepts_is_accepted() -> None:
    """S6: entries may come from torch or JSON, and may be tensors, fractions, or a factor of 1."""
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    theirs.set_growth_factor(1.0)
    for scaler in (used_scaler(min_scale=16.0), ampkit.GradScaler("cpu")):
        scaler.load_state_dict(theirs.state_dict())
        assert theirs.state_dict().items() <= scaler.state_dict().items()
        scaler.load_state_dict(json.loads(json.dumps(used_scaler().state_dict())))
        assert scaler.state_dict() == used_scaler().state_dict()
        loose = {"scale": torch.tensor(4.0), "growth_factor": Fraction(3), "_growth_tracker": 2.0}
        scaler.load_state_dict({**theirs.state_dict(), **loose})
        assert (scaler.get_scale(), scaler.get_growth_factor()) == (4.0, 3.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"init_scale": math.inf}, r"GradScaler\(init_scale=inf\): expected a number from"),
        ({"init_scale": math.nan}, r"init_scale=nan\)"),
        ({"init_scale": 0.0}, r"init_scale=0.0\)"),
        ({"init_scale": -1.0}, r"init_scale=-1.0\)"),
        ({"init_scale": 1e39}, r"init_scale=1e\+39\)"),
        ({"init_scale": "big"}, r"init_scale='big'\)"),
        ({"growth_factor": math.nan}, r"growth_factor=nan\): expected a finite number"),
        ({"growth_factor": math.inf}, r"growth_factor=inf\)"),
        ({"growth_factor": None}, r"growth_factor=None\)"),
        ({"backoff_factor": math.nan}, r"backoff_factor=nan\): expected a number above 0"),
        ({"backoff_factor": 0.0}, r"backoff_factor=0.0\)"),
        ({"backoff_factor": -1.0}, r"backoff_factor=-1.0\)"),
        ({"growth_interval": 0}, r"growth_interval=0\): expected an int of at least 1"),
        ({"growth_interval": 1.5}, r"growth_interval=1.5\)"),
        ({"dynamic": "no"}, r"dynamic='no'\): expected True or False"),
        ({"min_scale": "1"}, r"min_scale='1', max_scale=None\)"),
        ({"max_scale": math.nan}, r"min_scale=None, max_scale=nan\)"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], says: str) -> None:
    """An impossible argument raises a ValueError that names it. A disabled scaler takes any value, as torch's does."""
    with pytest.raises(ValueError, match=says):
        ampkit.GradScaler("cpu", **options)
    ampkit.GradScaler("cpu", enabled=False, **options)


def test_arguments_that_torch_refuses() -> None:
    """The error for a factor of 1 names it and its value. An unknown argument raises torch's own error."""
    with pytest.raises(ValueError, match=r"growth_factor=1\.0\): expected a finite number above 1"):
        ampkit.GradScaler("cpu", growth_factor=1.0)
    with pytest.raises(ValueError, match=r"backoff_factor=1\.0\): expected a number above 0 and below 1"):
        ampkit.GradScaler("cpu", 8.0, 2.0, 1.0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        ampkit.GradScaler("cpu", scale=8.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda scaler: scaler.set_growth_factor(math.inf), r"GradScaler.set_growth_factor\(new_factor=inf\)"),
        (lambda scaler: scaler.set_backoff_factor(0.0), r"GradScaler.set_backoff_factor\(new_factor=0.0\)"),
        (lambda scaler: scaler.set_growth_interval(0), r"GradScaler.set_growth_interval\(new_interval=0\)"),
        (lambda scaler: scaler.update(0.0), r"GradScaler.update\(new_scale=0.0\)"),
        (lambda scaler: scaler.update(math.inf), r"GradScaler.update\(new_scale=inf\)"),
    ],
)
def test_impossible_numbers_later(call: Callable[[Any], None], says: str) -> None:
    """Setters check numbers as load_state_dict does, so that every state_dict can be loaded."""
    scaler = used_scaler()
    before = whole(scaler)
    with pytest.raises(ValueError, match=says):
        call(scaler)
    assert whole(scaler) == before


# ------------------------------------------------------------------------------------------------------- any argument

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.floats(), max_size=2),
    st.sampled_from([1, 2, 1.0, 2.0, 0.5, 1024.0, 2000, torch.tensor(2.0), torch.ones(2), torch.tensor(True), 1j]),
)


def outcome(call: Callable[[], Any]) -> Exception | None:
    """Return the exception that a call raises, None if it raises none."""
    try:
        call()
    except Exception as error:  # the caller decides whether it is the right one
        return error
    return None


def survives(scaler: ampkit.GradScaler) -> None:
    """Assert that a scaler scales, steps, skips, and returns its state."""
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    for bad in (False, True, False):
        loss = scaler.scale(weight.sum())
        loss.backward()
        assert weight.grad is not None
        if bad:
            weight.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.isfinite().all()
        assert 0 < scaler.get_scale() < math.inf or scaler.get_growth_factor() > 1e30
    torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*KEYS, *OWN]), ANYTHING, max_size=4), st.sets(st.sampled_from(KEYS), max_size=1)
)
def test_any_state_dict_is_loaded_or_refused_whole(changes: dict[str, Any], missing: set[str]) -> None:
    """S6: with any values in the state dict, the scaler works afterwards, or a clear error leaves it unchanged."""
    state = {**used_scaler().state_dict(), **changes}
    state = {key: value for key, value in state.items() if key not in missing}
    scaler = used_scaler()
    before = whole(scaler)
    error = outcome(lambda: scaler.load_state_dict(state))
    if error is None:
        survives(scaler)
        used_scaler().load_state_dict(scaler.state_dict())
    else:
        assert isinstance(error, ValueError)
        assert str(error).startswith("GradScaler.load_state_dict")
        assert whole(scaler) == before


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*ARGUMENTS, "hysteresis", "min_scale", "max_scale", "dynamic"]),
        ANYTHING,
        max_size=4,
    )
)
def test_any_arguments_make_a_scaler_or_a_clear_error(options: dict[str, Any]) -> None:
    """S1: with any arguments the scaler works, or a ValueError names one of them."""
    error = outcome(lambda: ampkit.GradScaler("cpu", **options))
    if error is None:
        survives(ampkit.GradScaler("cpu", **options))
    else:
        assert isinstance(error, ValueError)
        assert any(f"{name}=" in str(error) for name in options)


# ---------------------------------------------------------------------------------------------------------- the floor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [{}, {"hysteresis": 2}, {"min_scale": 1e-300}, {"max_scale": 8.0}])
@pytest.mark.filterwarnings("ignore:GradScaler. the last:ampkit.AmpkitWarning")
def test_the_scale_never_falls_to_zero(device: str, rule: dict[str, Any]) -> None:
    """S1: after 200 overflows the scale is 2**-126, steps are still skipped, and a good step gives finite weights."""
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=8.0, **rule)
    for i in range(201):
        scaler.scale(torch.zeros((), device=device))
        weight.grad = torch.full_like(weight, 0.0 if i == 200 else math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**-126
    assert torch.equal(weight.detach(), torch.ones_like(weight))
    assert scaler.stats()[:2] == (201, 200)


@pytest.mark.parametrize("device", DEVICES)
def test_the_floor_changes_no_bit_of_torchs_rule(device: str) -> None:
    """S1: the scale has the bits of torch's as long as that is not below the floor."""
    scales: list[list[float]] = []
    for cls in (ampkit.GradScaler, torch.amp.GradScaler):
        scaler = cls(device, init_scale=3.7, growth_factor=1.3, backoff_factor=0.6, growth_interval=2)
        weight = torch.zeros(3, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
        history = []
        for i in range(120):
            scaler.scale(torch.zeros((), device=device))
            weight.grad = torch.full_like(weight, math.inf if i % 3 or i > 40 else 1.0)
            scaler.step(optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the one that says that all steps were skipped
                scaler.update()
            history.append(scaler.get_scale())
        scales.append(history)
    assert scales[0] == scales[1]


# ---------------------------------------------------------------------------------------------------- always skipped


def told(caught: Any) -> list[str]:
    return [str(w.message) for w in caught if "optimizer steps were all skipped" in str(w.message)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("good_at", [None, 30, 60])
def test_fifty_skipped_steps_are_said_once(device: str, good_at: int | None) -> None:
    """S1: one warning comes when 50 steps in a row were skipped, and none for 49."""
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=8.0)
    lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(200):
            scaler.scale(torch.zeros((), device=device))
            weight.grad = torch.full_like(weight, 1.0 if i == good_at else math.inf)
            scaler.step(optimizer)
            scaler.update()
            if device == "cuda":
                torch.cuda.synchronize()
            lines.append(len(told(caught)))
    assert sum(lines[i] - lines[i - 1] for i in range(1, 200)) == 1
    first = lines.index(1)
    begun = 0 if good_at in (None, 60) else good_at + 1
    assert begun + 50 <= first + 1 <= begun + 50 + 26
    assert [w.filename for w in caught if told([w])] == [__file__]


@pytest.mark.parametrize("device", DEVICES)
def test_skips_that_are_not_in_a_row_are_no_news(device: str) -> None:
    """S1: no warning comes if every second step is skipped, or 49 in a row."""
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=8.0)
    for i in range(250):
        scaler.scale(torch.zeros((), device=device))
        weight.grad = torch.full_like(weight, 1.0 if i % 50 == 49 or (i < 100 and i % 2) else math.inf)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.step(optimizer)
            scaler.update()
        assert not caught, f"a warning in step {i}"
    assert int(scaler.skipped) == 50 + 150 - 3


def always_infinite(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
    return F.cross_entropy(model(images.flatten(1)), labels) * boost


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["graphed_step", "graphed"])
def test_replays_that_are_all_skipped_are_said_once(engine: tuple[str, str], kind: str) -> None:
    """S1: the warning comes in replays too, though no Python of the step runs there."""
    device, graph = engine
    model = nn.Linear(3 * 64, 10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = ampkit.GradScaler(device)
    step: Any = None
    if kind == "graphed_step":
        step = ampkit.graphed_step(
            always_infinite, model, optimizer, scaler=scaler, graph=graph, warmup=1, on_failure="raise"
        )
    else:

        @ampkit.graphed(
            modules=(model,), optimizers=(optimizer,), scaler=scaler, graph=graph, warmup=1, on_failure="raise"
        )
        def step(images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = always_infinite(model, images, labels, boost)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

    (batch,) = make_batches(device, [4], (0,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(110):
            step(*batch)
            if device == "cuda":
                torch.cuda.synchronize()
    assert len(told(caught)) == 1
    assert step.replays >= 107


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:GradScaler. the last:ampkit.AmpkitWarning")
def test_counts_are_read_without_a_wait() -> None:
    """S1: the host does not wait for copies of the counts, even if the device is busy."""
    weight = torch.ones(3, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler = ampkit.GradScaler("cuda", init_scale=8.0)
    infinite = torch.full_like(weight, math.inf)
    scaler.materialize(torch.device("cuda"))
    with no_sync():
        for i in range(70):
            if i == 48:
                torch.cuda._sleep(2_000_000_000)  # about a second, so that the time below shows a wait for later work
            weight.grad = infinite.clone()
            scaler.step(optimizer)
            scaler.update()
        assert not torch.cuda.current_stream().query()
    assert scaler.stats()[:2] == (70, 70)
