"""The update of an averaged model without host reads equals torch's own, bit by bit, and fits into a CUDA graph."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from harness import DEVICES, assert_same, bits, no_sync
from tape import taped
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit
from ampkit._capture.engine.engine import _OTHER_ANSWER as OTHER_ANSWER
from ampkit._optimizer.average import capturable, prepare_average, update_average


def rising_decay(old: Tensor, new: Tensor, count: Tensor) -> Tensor:
    decay = torch.clamp((1 + count) / (10 + count), max=0.99)
    return decay * old + (1 - decay) * new


def kept_fraction(old: Any, new: Any, count: Tensor) -> None:
    for ours, theirs in zip(old, new, strict=True):
        ours.copy_(ours - (ours - theirs) // (count * 2))  # an integer division: a count of 0 would raise


FUNCTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "ema": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "single ema": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    "single swa": lambda: {"avg_fn": get_swa_avg_fn()},
    "custom": lambda: {"avg_fn": rising_decay},
    "custom multi": lambda: {"multi_avg_fn": kept_fraction},
}


class Mixed(nn.Module):
    """Parameters of several dtypes, shapes and memory formats, a shared one, float and integer buffers."""

    def __init__(self, integers: bool, complexes: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)  # num_batches_tracked is an int64 of shape ()
        if not integers:
            self.norm.num_batches_tracked = None
        self.double = nn.Linear(7, 3).double()
        self.half = nn.Linear(33, 5).half()
        self.bfloat16 = nn.Linear(17, 3).bfloat16()
        self.shared = self.double
        self.offset = nn.Parameter(torch.randn(()))
        if complexes:
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))


def make_pair(
    device: str, function: str, use_buffers: bool, integers: bool
) -> tuple[nn.Module, AveragedModel, AveragedModel]:
    """Return a model and two equal averages of it. The first update must overwrite the averages' values."""
    torch.manual_seed(5)
    # Complex numbers have no floor division.
    model = Mixed(integers, complexes=function != "custom multi").to(device)
    averaged = AveragedModel(model, device=torch.device(device), use_buffers=use_buffers, **FUNCTIONS[function]())
    with torch.no_grad():
        for i, param in enumerate(averaged.parameters()):
            param.fill_([float("nan"), float("inf"), -0.0][i % 3])
        model.conv.weight[0] = -0.0
    return model, averaged, copy.deepcopy(averaged)


def drift(model: nn.Module, seed: int) -> None:
    """Change every tensor of the model in place, as a training step would. Draws no random numbers on the device."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype is torch.int64:
                tensor.add_(seed % 5 + 1)
            else:
                tensor.add_(torch.randn(tensor.shape, generator=made).to(tensor.device, tensor.dtype))


def takes_integers(device: str, function: str) -> bool:
    """Return whether torch's own update averages integer buffers; its SWA kernel refuses them."""
    return function != "swa" and not (function == "default" and device == "cuda")


def state(averaged: AveragedModel) -> dict[str, Tensor]:
    return dict(averaged.state_dict(keep_vars=True))


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_updates_equal_those_of_torch(device: str, function: str, use_buffers: bool) -> None:
    """The first update (a copy), later averages, buffers and count have torch's bits. Tensors change in place."""
    integers = takes_integers(device, function) or not use_buffers
    model, averaged, reference = make_pair(device, function, use_buffers, integers)
    addresses = {name: tensor.data_ptr() for name, tensor in state(averaged).items()}
    for seed in range(5):
        reference.update_parameters(model)
        update_average(averaged, model)
        assert_same(dict(averaged.state_dict()), dict(reference.state_dict()), f"after {seed + 1} updates")
        drift(model, seed)
    assert averaged.n_averaged == 5
    assert {name: tensor.data_ptr() for name, tensor in state(averaged).items()} == addresses


@pytest.mark.parametrize("device", DEVICES)
def test_a_count_that_was_set_back_copies_again(device: str) -> None:
    """The device decides in each update whether it is the first one, because a checkpoint may set the count back."""
    model, averaged, reference = make_pair(device, "ema", True, True)
    for seed in range(4):
        if seed == 2:
            averaged.n_averaged.zero_()
            reference.n_averaged.zero_()
        reference.update_parameters(model)
        update_average(averaged, model)
        drift(model, seed)
    assert_same(dict(averaged.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_where_torch_takes_the_foreach_kernel(monkeypatch: pytest.MonkeyPatch, use_buffers: bool) -> None:
    """The default average on a GPU is computed by another formula than on the CPU. This test runs it on the CPU."""
    monkeypatch.setattr("torch.optim.swa_utils._get_foreach_kernels_supported_devices", lambda: ["cpu"])
    monkeypatch.setattr("ampkit._optimizer.average.devices_with_foreach", lambda: ["cpu"])
    model, averaged, reference = make_pair("cpu", "default", use_buffers, integers=not use_buffers)
    single = copy.deepcopy(reference)
    single.avg_fn = get_swa_avg_fn()
    for seed in range(4):
        reference.update_parameters(model)
        single.update_parameters(model)
        update_average(averaged, model)
        assert_same(dict(averaged.state_dict()), dict(reference.state_dict()), f"after {seed + 1} updates")
        drift(model, seed)
    assert not torch.equal(single.module.conv.weight, averaged.module.conv.weight), "the formulas do not differ here"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_in_another_dtype(dtype: torch.dtype, use_buffers: bool) -> None:
    """An average in a wider or narrower dtype is rounded as torch rounds it, in the first copy and in buffers too."""
    model = nn.BatchNorm1d(9)
    averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(0.7), use_buffers=use_buffers).to(dtype)
    reference = copy.deepcopy(averaged)
    for seed in range(3):
        reference.update_parameters(model)
        update_average(averaged, model)
        assert_same(dict(averaged.state_dict()), dict(reference.state_dict()))
        drift(model, seed)


def test_integers_under_torchs_swa_kernel_raise_as_in_torch() -> None:
    """torch raises in the second update; here the same error comes in the first, where both results are computed."""
    model, averaged, reference = make_pair("cpu", "swa", True, True)
    reference.update_parameters(model)
    with pytest.raises(RuntimeError, match="Integer division with addcdiv"):
        reference.update_parameters(model)
    with pytest.raises(RuntimeError, match="Integer division with addcdiv"):
        update_average(averaged, model)


def test_an_empty_or_parameterless_model() -> None:
    """For a model with buffers alone, or with no tensors, updates are counted as in torch."""
    for model in (nn.BatchNorm1d(3, affine=False), nn.Identity()):
        averaged = AveragedModel(model)
        update_average(averaged, model)
        update_average(averaged, model)
        assert averaged.n_averaged == 2


class _Reads(TorchDispatchMode):
    """Counts how often the host reads the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_read_on_the_host(function: str) -> None:
    """torch's own update reads the count twice and its SWA kernel once more per dtype; this one reads nothing."""
    reads = Counter[str]()
    model, averaged, reference = make_pair("cpu", function, False, True)
    for name, update in {"torch": reference.update_parameters, "ours": partial(update_average, averaged)}.items():
        update(model)
        with _Reads() as mode:
            update(model)
        reads[name] = mode.count
    assert reads["ours"] == 0
    assert reads["torch"] >= (6 if function == "swa" else 2)


@pytest.mark.cuda
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_sync(function: str, use_buffers: bool) -> None:
    """No update waits for the device, not even the first one."""
    model, averaged, _ = make_pair("cuda", function, use_buffers, takes_integers("cuda", function) or not use_buffers)
    with no_sync():
        update_average(averaged, model)
        update_average(averaged, model)
    assert int(averaged.n_averaged) == 2


@pytest.mark.cuda
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_graph_holds_the_update(function: str, use_buffers: bool) -> None:
    """After an eager update one is captured. Replays average, and copy if the count was set back to 0."""
    integers = takes_integers("cuda", function) or not use_buffers
    model, averaged, reference = make_pair("cuda", function, use_buffers, integers)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update_average(averaged, model)
    torch.cuda.current_stream().wait_stream(stream)
    reference.update_parameters(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update_average(averaged, model)
    for seed in range(5):
        if seed == 3:
            averaged.n_averaged.zero_()
            reference.n_averaged.zero_()
        drift(model, seed)
        graph.replay()
        reference.update_parameters(model)
        assert_same(dict(averaged.state_dict()), dict(reference.state_dict()), f"after {seed + 1} replays")


@pytest.mark.cuda
def test_the_count_follows_the_model_to_the_gpu() -> None:
    """torch leaves the count on the CPU, where a graph cannot read it. Either loads the other's state_dict."""
    model = nn.Linear(3, 3, device="cuda")
    averaged, reference = AveragedModel(model), AveragedModel(model)
    assert averaged.n_averaged.device.type == "cpu"
    prepare_average(averaged)
    assert averaged.n_averaged.device == model.weight.device
    update_average(averaged, model)
    reference.load_state_dict(averaged.state_dict())
    averaged.load_state_dict(reference.state_dict())
    assert averaged.n_averaged.device == model.weight.device
    assert reference.n_averaged == averaged.n_averaged == 1


# -------------------------------------------------------------------------------------------------- which callable


class Watched(AveragedModel):
    """Overrides the update."""

    def update_parameters(self, model: nn.Module) -> None:
        """Do it torch's way."""
        super().update_parameters(model)


class Renamed(AveragedModel):
    """Overrides nothing."""


class Clamp(nn.Module):
    """Has state, and a method to be called after the optimizer."""

    def keep(self, model: nn.Module) -> None:
        """Do nothing."""


@pytest.mark.parametrize("kind", [AveragedModel, Renamed])
def test_torchs_update_is_replaced(kind: type[AveragedModel]) -> None:
    """`averaged.update_parameters` is replaced by the update without host reads, which changes the average."""
    model = nn.Linear(2, 2)
    averaged = kind(model)
    run, owner = capturable(averaged.update_parameters)
    assert owner is averaged
    with _Reads() as mode:
        run(model)
    assert mode.count == 0
    assert averaged.n_averaged == 1


def test_other_callables_are_left_alone() -> None:
    """Other callables are returned as they are, with the module that they belong to. So is an overridden update."""
    watched, clamp = Watched(nn.Linear(2, 2)), Clamp()
    assert capturable(watched.update_parameters) == (watched.update_parameters, watched)
    assert capturable(clamp.keep) == (clamp.keep, clamp)
    assert capturable(clamp) == (clamp, clamp)
    assert capturable(print) == (print, None)
    assert capturable("ab".join) == ("ab".join, None)  # type: ignore[arg-type]


def test_the_count_is_moved_before_the_first_step() -> None:
    """The count is moved before the first step, because a captured step cannot move it."""
    averaged = AveragedModel(nn.Linear(2, 2, device="meta"))
    assert averaged.n_averaged.device.type == "cpu"
    capturable(averaged.update_parameters)
    assert averaged.n_averaged.device.type == "meta"


@pytest.mark.parametrize(
    ("after_step", "says"),
    [
        (3, r"graphed_step\(after_step=int\): expected a callable.*averaged.update_parameters"),
        (AveragedModel(nn.Linear(1, 1)), "would run the model. Pass its update_parameters"),
    ],
)
def test_what_cannot_be_called_is_refused(after_step: Any, says: str) -> None:
    """The message says what to pass."""
    with pytest.raises(ValueError, match=says):
        capturable(after_step)


@pytest.mark.parametrize("way", ["if", "where", "torch's"])
def test_an_average_that_leaves_out_skipped_steps(way: str) -> None:
    """`after_step` asks `scaler.found_inf`, by a branch or by a `where`: captured with the bits of a loop that asks."""
    loop, _ = averaged_steps(way, None)
    for tape in (False, True):
        with taped() if tape else nullcontext():
            found, step = averaged_steps(way, "emulate")
        assert_same(found, loop)
        assert step is not None
        asked_again = 0 if way == "where" else 3  # in the skipped steps
        assert (step.replays, step.captures) == (16 - sum(step.report().eager.values()), 1)
        assert step.report().eager.get(OTHER_ANSWER, 0) <= asked_again


def averaged_steps(way: str, graph: str | None) -> tuple[list[Any], ampkit.GraphedStep | None]:
    """Return weights and average behind each of 16 steps, three of which overflow: of a step, or of a loop of torch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.n_averaged.fill_(1)  # it begins with the model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    scaler = ampkit.GradScaler("cpu", init_scale=64.0, growth_interval=4)

    def after_step(model: nn.Module) -> None:
        assert scaler.found_inf is not None  # the scaler is enabled
        if way == "where":
            weight = torch.where(scaler.found_inf > 0, 0.0, 0.5)
            for ours, theirs in zip(averaged.module.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, weight)
        elif not scaler.found_inf:
            if way == "if":
                torch._foreach_lerp_([*averaged.module.parameters()], [*model.parameters()], 0.5)
            else:
                averaged.update_parameters(model)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    options: dict[str, Any] = {"scaler": scaler, "after_step": after_step, "graph": graph}
    step = None if graph is None else ampkit.graphed_step(loss_fn, model, optimizer, **options)
    found: list[Any] = []
    for i in range(16):
        x = torch.full((3, 4), float("inf") if i in (6, 9, 14) else 1 + i / 8.0)
        if step is not None:
            step(x)
        else:
            optimizer.zero_grad()
            scaler.scale(loss_fn(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            if i not in (6, 9, 14):
                with torch.no_grad():
                    torch._foreach_lerp_([*averaged.module.parameters()], [*model.parameters()], 0.5)
        found.append([bits(each.detach()) for each in (*model.parameters(), *averaged.module.parameters())])
    return found, step
