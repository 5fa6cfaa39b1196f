"""What several test files share: devices, a model with all kinds of state, bitwise comparison of training state."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

import ampkit
from ampkit._capture.graph.capture_query import answering as answering
from ampkit._capture.graph.capture_query import seeing_capture as seeing_capture
from ampkit._capture.ranks.ranks import WARMUP_DDP as WARMUP_DDP
from ampkit._torch.optimizers import FUSED_ADAGRAD_ON_CUDA as FUSED_ADAGRAD_ON_CUDA

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])  # of torch, as (2, 11)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# The engine under test: emulated on the CPU, real graphs on a GPU.
ENGINES = [("cpu", "emulate"), pytest.param(("cuda", "auto"), marks=pytest.mark.cuda)]
COMPILER = "ampkit._torch.compile.inductor"  # to be replaced by a function that returns another compiler
NO_PRIMITIVE = "could not create a primitive"  # how oneDNN refuses what it has no kernel for


def onednn_computes_in(low: torch.dtype) -> bool:
    """Return whether oneDNN, which torch uses on the CPU, has kernels for float16 or bfloat16 on this CPU.

    On x86, bfloat16 needs AVX-512 and float16 needs AVX512-FP16; AVX-NE-CONVERT is enough for both. Without kernels in
    oneDNN, torch convolves in its own. An LSTM under autocast goes to oneDNN all the same, because torch chooses before
    autocast casts the float32 inputs: it fails with NO_PRIMITIVE.
    """
    name = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}[low]
    return torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, name)()


def leave_out_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile by AOTAutograd alone. On a CPU Inductor compiles C++ behind it, which takes seconds."""
    monkeypatch.setattr(COMPILER, lambda: lambda graph, inputs, config_patches: aot_eager(graph, inputs))


class Compiled:
    """A module that torch.compile was asked to compile, by a backend that counts what it does."""

    def __init__(self, module: nn.Module) -> None:
        self.compiles = self.calls = 0
        self.module = torch.compile(module, backend=self._backend)

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        self.compiles += 1
        return run


@contextmanager
def deterministic() -> Iterator[None]:
    """Make kernels repeatable bit by bit, as comparisons of eager and replayed steps need it."""
    before = torch.are_deterministic_algorithms_enabled()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        torch.use_deterministic_algorithms(True, warn_only=False)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@contextmanager
def no_sync() -> Iterator[None]:
    """Make every operation that waits for the device an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def marked_line(file: str, name: str) -> str:
    """Return the line of a file that ends in `# HERE name`, as a finding names it."""
    lines = Path(file).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# HERE {name}"))
    return f"{file}:{number}: `{lines[number - 1].strip()}`"


def line_of(kind: Callable[..., Any]) -> str:
    """Return the line that bears the name of a function as its mark, in the function's file."""
    return marked_line(kind.__code__.co_filename, kind.__name__)


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and linear layers on 3x8x8 images: parameters, buffers and random numbers."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.norm(self.conv(x)))).flatten(1))


def make_net(device: str, **kwargs: Any) -> nn.Module:
    """Return the same `Net` each time."""
    torch.manual_seed(3)
    return Net(**kwargs).to(device)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
}
# Without a fused kernel: a step is undone where it must be skipped, and a graph holds it all the same.
UNFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "plain adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "foreach adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "foreach rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, foreach=True),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
}


def skip_without_kernel(device: str, optimizer: str) -> None:
    """Skip what torch does not have: test_scaler.py has a test that tells when it does."""
    if device == "cuda" and optimizer == "adagrad" and not FUSED_ADAGRAD_ON_CUDA:
        pytest.skip("this torch refuses fused Adagrad on CUDA")


def scaled_backward(model: nn.Linear, scaler: torch.amp.GradScaler, seed: int, bad: float | None = None) -> None:
    """Give a linear layer of 6 inputs new gradients of a scaled loss, the first of them `bad`."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(model.weight.device)
    model.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    if bad is not None:
        assert model.weight.grad is not None
        model.weight.grad[0, 0] = bad


def boosted_loss(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy times `boost`, by which a batch makes its gradients overflow but not BatchNorm's buffers."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels) * boost
    return loss, {"correct": (logits.argmax(1) == labels).sum()}


def make_batches(
    device: str, sizes: list[int], overflow_at: tuple[int, ...] = ()
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return batches (images, labels, boost) of these sizes; those in `overflow_at` make every gradient infinite."""
    made = torch.Generator().manual_seed(7)
    batches = []
    for i, size in enumerate(sizes):
        images = torch.randn(size, 3, 8, 8, generator=made)
        labels = torch.randint(10, (size,), generator=made)
        boost = torch.tensor(float("inf") if i in overflow_at else 1.0)
        batches.append((images.to(device), labels.to(device), boost.to(device)))
    return batches


def bits(tensor: Tensor) -> Tensor:
    """Return a copy of the bits of a tensor, by which nan equals the same nan and 0.0 does not equal -0.0."""
    return tensor.detach().clone().contiguous().cpu().reshape(-1).view(torch.uint8)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: ampkit.GradScaler) -> dict[str, Any]:
    """Return everything that a step may change, by name, on the host."""
    state: dict[str, Any] = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    for i, param in enumerate(model.parameters()):
        for key, value in optimizer.state[param].items():
            state[f"state of parameter {i}: {key}"] = bits(torch.as_tensor(value))
    state["learning rates"] = [float(group["lr"]) for group in optimizer.param_groups]
    state["scaler"] = scaler.state_dict()
    state["cpu rng"] = bits(torch.get_rng_state())
    if torch.cuda.is_available():
        state["cuda rng"] = bits(torch.cuda.get_rng_state())
    return state


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Assert that two trees are equal bit by bit, naming the first place where they are not."""
    assert type(left) is type(right), f"{where}: {type(left)} and {type(right)}"
    if isinstance(left, dict):
        assert left.keys() == right.keys(), f"{where}: {left.keys() ^ right.keys()}"
        for key in left:
            assert_same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, Tensor):
        assert torch.equal(bits(left), bits(right)), f"{where} differs"
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), f"{where}: {len(left)} and {len(right)}"
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert left == right, f"{where}: {left} and {right}"


# ---------------------------------------------------------------------------------- lines that make the host wait


class _Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if grad.isfinite().all() else grad * 0  # HERE custom_backward


def custom_backward(x: Tensor) -> Tensor:
    return _Checked.apply(x)


def blocking_copy(x: Tensor) -> None:
    torch.ones(5).to(x.device)  # HERE blocking_copy


def pageable_copy(x: Tensor) -> None:
    torch.ones(5).to(x.device, non_blocking=True)  # HERE pageable_copy


def new_tensor(x: Tensor) -> None:
    torch.tensor([1.5, 2.5], device=x.device)  # HERE new_tensor


def synchronize(x: Tensor) -> None:
    torch.cuda.synchronize()  # HERE synchronize


def stream_synchronize(x: Tensor) -> None:
    torch.cuda.current_stream().synchronize()  # HERE stream_synchronize


def event_synchronize(x: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()  # HERE event_synchronize


# On CUDA, with what is said of each.
WAITS: dict[Callable[[Tensor], None], str] = {
    blocking_copy: "copies from pageable host memory to the device",
    pageable_copy: "copies from pageable host memory to the device",
    new_tensor: "copies from pageable host memory to the device",
    synchronize: "torch.cuda.synchronize() waits for the device",
    stream_synchronize: "stream.synchronize() waits for the device",
    event_synchronize: "event.synchronize() waits for the device",
}
