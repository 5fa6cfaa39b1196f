"""Settings of torch that change between calls: each has a graph of its own, and no call gets the graph of another."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from harness import ENGINES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ampkit

Engine = tuple[str, str]
Around = Callable[[], AbstractContextManager[Any]]


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def called(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextmanager
def deterministic_algorithms(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
# What a user changes, and what the message is to name.
CHANGES: dict[str, tuple[Around, str]] = {
    "no_grad": (torch.no_grad, "torch.is_grad_enabled() changed from True to False"),
    "inference mode": (torch.inference_mode, "torch.is_inference_mode_enabled() changed from False to True"),
    "matmul TF32": (
        lambda: attribute(MATMUL, "fp32_precision", "tf32"),
        "torch.backends.cuda.matmul.fp32_precision changed from 'none' to 'tf32'",
    ),
    "convolution TF32": (
        lambda: attribute(CUDNN.conv, "fp32_precision", "ieee"),
        "torch.backends.cudnn.conv.fp32_precision changed from 'tf32' to 'ieee'",
    ),
    "RNN TF32": (
        lambda: attribute(CUDNN.rnn, "fp32_precision", "ieee"),
        "torch.backends.cudnn.rnn.fp32_precision changed from 'tf32' to 'ieee'",
    ),
    "fp16 reduction": (
        lambda: attribute(MATMUL, "allow_fp16_reduced_precision_reduction", False),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    ),
    "bf16 reduction": (
        lambda: attribute(MATMUL, "allow_bf16_reduced_precision_reduction", False),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    ),
    "fp16 accumulation": (
        lambda: attribute(MATMUL, "allow_fp16_accumulation", True),
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
    ),
    "BLAS library": (
        lambda: called(
            torch.backends.cuda.preferred_blas_library, "cublaslt", torch.backends.cuda.preferred_blas_library()
        ),
        "torch.backends.cuda.preferred_blas_library()",
    ),
    "linalg library": (
        lambda: called(
            torch.backends.cuda.preferred_linalg_library, "cusolver", torch.backends.cuda.preferred_linalg_library()
        ),
        "torch.backends.cuda.preferred_linalg_library()",
    ),
    "cudnn enabled": (lambda: attribute(CUDNN, "enabled", False), "torch.backends.cudnn.enabled changed"),
    "cudnn benchmark": (lambda: attribute(CUDNN, "benchmark", True), "torch.backends.cudnn.benchmark changed"),
    "cudnn deterministic": (
        lambda: attribute(CUDNN, "deterministic", True),
        "torch.backends.cudnn.deterministic changed",
    ),
    "deterministic algorithms": (
        lambda: deterministic_algorithms(warn_only=False),
        "torch.are_deterministic_algorithms_enabled() changed",
    ),
    "deterministic algorithms, warnings": (
        lambda: deterministic_algorithms(warn_only=True),
        "torch.is_deterministic_algorithms_warn_only_enabled() changed",
    ),
    "filled memory": (
        lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "torch.utils.deterministic.fill_uninitialized_memory changed",
    ),
    "attention": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        "torch.backends.cuda.flash_sdp_enabled() changed from True to False",
    ),
    "attention without cudnn": (
        lambda: called(torch.backends.cuda.enable_cudnn_sdp, False, True),
        "torch.backends.cuda.cudnn_sdp_enabled() changed",
    ),
    "attention's reduction": (
        lambda: called(torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
        "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() changed",
    ),
    "order of attention": (
        lambda: sdpa_kernel(
            [
                SDPBackend.MATH,
                SDPBackend.OVERRIDEABLE,
                SDPBackend.CUDNN_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION,
                SDPBackend.FLASH_ATTENTION,
            ],
            set_priority=True,
        ),
        "the priority of attention kernels",
    ),
    "default dtype": (
        lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
        "torch.get_default_dtype() changed from torch.float32 to torch.float64",
    ),
    "default device": (lambda: torch.device("meta"), "torch.get_default_device() changed"),
    "fast path": (
        lambda: called(torch.backends.mha.set_fastpath_enabled, False, True),
        "torch.backends.mha.get_fastpath_enabled() changed",
    ),
    "parametrizations once": (
        torch.nn.utils.parametrize.cached,
        "torch.nn.utils.parametrize.cached() changed from 0 to 1",
    ),
    "packed tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        "saved_tensors_hooks around the step changed",
    ),
    "autocast's cache": (
        lambda: called(torch.set_autocast_cache_enabled, False, True),
        "torch.is_autocast_cache_enabled() changed",
    ),
}


def graphed_linear(engine: Engine, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(engine[0])

    @ampkit.graphed(modules=(model,), graph=engine[1], **{"on_failure": "raise", **options})
    def forward(x: Tensor) -> Tensor:
        return model(x) * 2

    return model, forward


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.quick(4)
def test_each_setting_has_a_graph_of_its_own(change: str) -> None:
    """R7: another value takes a warm-up and a capture, and says which setting it was; the first value costs nothing."""
    around, says = CHANGES[change]
    _, forward = graphed_linear(("cpu", "emulate"))
    x = torch.randn(2, 4)
    for _ in range(4):
        forward(x)
    with around():
        with pytest.warns(ampkit.CaptureWarning) as warned:
            forward(x)
        for _ in range(4):  # warnings are errors here
            forward(x)
    assert len(warned) == 1
    message = str(warned[0].message)
    assert says in message
    assert "takes 3 eager steps and a new capture" in message
    with around():
        forward(x)
    forward(x)
    assert (forward.captures, forward.replays) == (2, 1 + 2 + 2)
    assert set(forward.report().eager.values()) == {3}


def test_anomaly_mode_is_followed() -> None:
    """R7: a replay would not look for NaN, so calls under detect_anomaly are eager; without its check, replays."""
    _, forward = graphed_linear(("cpu", "emulate"), on_failure="eager")
    x = torch.randn(2, 4)
    for _ in range(4):
        forward(x)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        forward(x)
    assert (forward.captures, forward.replays) == (1, 2)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            forward(x)
    said = [str(warning.message) for warning in caught if warning.category is ampkit.CaptureWarning]
    assert ["detect_anomaly() changed from False to True" in text for text in said] == [True, False]
    assert "detect_anomaly() reads every gradient on the host" in said[1]
    assert (forward.captures, forward.replays) == (1, 2)


def test_the_old_names_and_the_new_ones_may_be_mixed() -> None:
    """R7: torch refuses to read `allow_tf32` once `fp32_precision` was set; a call reads what both of them set."""
    _, forward = graphed_linear(("cpu", "emulate"))
    x = torch.randn(2, 4)
    before = torch.get_float32_matmul_precision()
    try:
        for _ in range(4):
            forward(x)
        torch.set_float32_matmul_precision("high")
        with pytest.warns(ampkit.CaptureWarning, match="fp32_precision changed from 'none' to 'tf32'"):
            forward(x)
        MATMUL.fp32_precision = "ieee"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            _ = MATMUL.allow_tf32
        for _ in range(4):
            forward(x)
    finally:
        torch.set_float32_matmul_precision(before)
        MATMUL.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert forward.captures == 2


# ------------------------------------------------------------------------------------------------------ inference mode


MODES: dict[str, Around] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("verify", [0, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_inference_mode(engine: Engine, verify: int) -> None:
    """R7: a graphed function works in it from the first call to the last, and its outputs are inference tensors."""
    model, forward = graphed_linear(engine, verify=verify)
    with torch.inference_mode():
        for i in range(8):
            x = torch.randn(2, 4, device=engine[0])
            found = forward(x)
            assert found.is_inference()
            torch.testing.assert_close(found, model(x) * 2)
            assert (forward.captures, forward.replays) == (int(i > 2), max(0, i - 2))


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_three_modes_take_turns(engine: Engine) -> None:
    """R7: grad, no_grad and inference mode may alternate. Each has a graph with right values."""
    model, forward = graphed_linear(engine)
    for i in range(8):
        for mode in MODES.values():
            x = torch.randn(2, 4, device=engine[0])
            with mode():
                found = forward(x)
                torch.testing.assert_close(found, model(x) * 2)
                assert found.is_inference() == torch.is_inference_mode_enabled()
                assert not found.requires_grad
        with torch.no_grad():
            model.weight.mul_(0.9)
        assert forward.captures == (3 if i > 2 else 0)
    assert forward.replays == 5 * 3


@pytest.mark.parametrize("made_in", [torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_input_that_is_changed_in_place_in_inference_mode(engine: Engine, made_in: Around) -> None:
    """R7: an input that changes is written back, whether it is an inference tensor or not, in eager calls too."""
    device, graph = engine

    def run(graph: str, verify: int = 0) -> list[Tensor]:
        model, seen = nn.Linear(4, 3).to(device), []

        @ampkit.graphed(modules=(model,), graph=graph, on_failure="raise", verify=verify)
        def forward(x: Tensor) -> Tensor:
            x.add_(1)
            return model(x).sum() * 0 + x.sum()

        for i in range(6):
            with made_in():
                x = torch.full((2, 4), float(i), device=device)
            with torch.inference_mode():
                out = forward(x)
            seen += [x.cpu().clone(), out.cpu().clone()]
        return seen

    expected = run("off")
    for verify in (0, 2):
        torch.testing.assert_close(run(graph, verify), expected, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_that_changes_in_inference_mode(engine: Engine) -> None:
    """R7: buffers of BatchNorm move as in eager calls if calls in inference mode and outside of it alternate."""
    device, graph = engine

    def run(graph: str) -> list[Tensor]:
        torch.manual_seed(0)
        model, made = nn.BatchNorm1d(4).to(device), torch.Generator().manual_seed(1)

        @ampkit.graphed(modules=(model,), graph=graph, on_failure="raise")
        def observe(x: Tensor) -> Tensor:
            return model(x).sum()

        seen = []
        for i in range(12):
            x = torch.randn(8, 4, generator=made).to(device)
            with torch.inference_mode() if i % 2 else torch.no_grad():
                observe(x)
            assert model.running_mean is not None
            seen.append(model.running_mean.cpu().clone())
        return seen

    with pytest.warns(ampkit.CaptureWarning, match="changed from"):
        found = run(graph)
    torch.testing.assert_close(found, run("off"), rtol=1e-6, atol=1e-7)


# torch says so where a thread of autograd's is the first of its kind that calls cuBLAS.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_callable_graphed_in_inference_mode(engine: Engine) -> None:
    """R7: the sample may be an inference tensor; calls in the mode are eager, calls outside of it are replays."""
    device, graph = engine
    model = nn.Linear(4, 3).to(device)
    with torch.inference_mode():
        graphed = ampkit.make_graphed_callables(model, (torch.randn(2, 4, device=device),), graph=graph)
        graphed(torch.randn(2, 4, device=device))
    x = torch.randn(2, 4, device=device)
    graphed(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(3, 4))
    assert (model.forward.captures, model.forward.replays) == (1, 1)
    assert dict(model.forward.eager) == {"no_grad": 1}


# ------------------------------------------------------------------------------------------------------ on the device


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
def test_tf32_between_calls() -> None:
    """R7: a replay has the precision that is set now, bit by bit, back and forth, by the old name and the new one."""
    eager = nn.Linear(512, 512, bias=False, device="cuda").requires_grad_(False)
    forward = ampkit.graphed(modules=(eager,), on_failure="raise")(lambda x: eager(x))
    x, seen = torch.randn(512, 512, device="cuda"), []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for _ in range(5):
                assert torch.equal(forward(x), eager(x))
            seen.append(eager(x))
    finally:
        torch.set_float32_matmul_precision(before)
        MATMUL.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert not torch.equal(seen[0], seen[1])
    assert forward.captures == 2


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_attention_kernels_between_calls(dtype: torch.dtype) -> None:
    """R7: each choice of attention kernels has its own bits, those of the eager call under the same choice."""
    model = nn.Linear(1, 1, device="cuda")

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q) * 1

    graphed = ampkit.graphed(modules=(model,), on_failure="raise")(attend)
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=dtype)
    kernels = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]
    kernels += [SDPBackend.FLASH_ATTENTION] if dtype is torch.float16 else []
    seen = []
    for kernel in kernels * 2:
        with sdpa_kernel(kernel):
            for _ in range(5):
                assert torch.equal(graphed(q), attend(q))
            seen.append(attend(q))
    assert not torch.equal(seen[0], seen[1])
    assert graphed.captures == len(kernels)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
def test_deterministic_algorithms_between_calls() -> None:
    """R7: a call under deterministic algorithms replays a graph that was captured under them."""
    model = nn.Linear(1, 1, device="cuda")

    def scatter(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(16, device="cuda").index_add_(0, index, x)

    graphed = ampkit.graphed(modules=(model,), on_failure="raise")(scatter)
    x, index = torch.randn(100_000, device="cuda"), torch.randint(16, (100_000,), device="cuda")
    for _ in range(5):
        graphed(x, index)
    with deterministic_algorithms(warn_only=False):
        expected = scatter(x, index)
        for _ in range(8):
            assert torch.equal(graphed(x, index), expected)
    assert graphed.captures == 2


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
def test_default_dtype_between_calls() -> None:
    """R7: tensors that a function makes have the present default dtype."""
    model = nn.Linear(1, 1, device="cuda")

    @ampkit.graphed(modules=(model,), on_failure="raise")
    def make(x: Tensor) -> Tensor:
        return torch.ones(3, device="cuda") * x.sum()

    x = torch.ones(2, device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found = [make(x) for _ in range(5)]
        finally:
            torch.set_default_dtype(torch.float32)
        assert {out.dtype for out in found} == {dtype}
    assert make.captures == 2
