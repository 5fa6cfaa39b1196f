"""Training steps of the CIFAR-10 speedrun, the author's way and captured whole: bits, and milliseconds.

    PYTHONPATH=. python tests/benchmarks/cifar_speedrun.py                        on a GPU, at most 100 s
    PYTHONPATH=. python tests/benchmarks/cifar_speedrun.py --device cpu --tiny    does it run

The recipe is that of Keller Jordan's airbench94_muon (github.com/KellerJordan/cifar10-airbench), which reaches 94% in
200 steps: widths 64, 256 and 256 behind 2x2 whitening, float16 with norms in float32, label smoothing 0.2, SGD with
nesterov 0.85 for biases and head, and for the filters a Muon written by hand, with 3 steps of Newton and Schulz; 2,000
images per batch. Its facts are taken over, its code is not. The images are random, neither augmentation nor evaluation
is timed, and the bias of the whitening is trained in all steps, not in the first 75 alone.

First losses and weights of `ampkit.graphed`, nothing compiled, beside the same steps in an eager loop, bit by bit,
under deterministic algorithms. Then milliseconds per step of each way, the median over repeats (least to most), and
milliseconds that the device computes in a step: the sum of its kernels, as torch's profiler has them. No way of
launching these kernels is faster than that.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import ampkit
from tests.benchmarks.models import differing, repeatable

Step = Callable[[Tensor, Tensor], Tensor]
RATES = {"whitening": 0.053, "biases": 0.053, "head": 0.67, "filters": 0.24}
WHITENING_STEPS, TOTAL_STEPS = 75, 200  # the rates fall to 0 in so many steps, and begin anew
WEIGHT_DECAY = 2e-6  # times the batch
CHECKED, REPEATS = 24, 5
SECONDS = 5  # per way, without warm-up and compilation


class Way(NamedTuple):
    """How steps are made."""

    name: str
    orthogonal: bool = False  # whether Newton-Schulz is compiled
    net: dict[str, Any] | None = None  # with which arguments the net is compiled, with the loss; None: not at all
    graphed: bool = False


WAYS = (
    Way("eager, nothing compiled"),
    Way("the author's: Newton-Schulz compiled", orthogonal=True),
    Way("loss compiled, reduce-overhead", orthogonal=True, net={"mode": "reduce-overhead"}),
    Way("ampkit.graphed", graphed=True),
    Way("ampkit.graphed, both compiled", orthogonal=True, net={}, graphed=True),
)


class Sizes(NamedTuple):
    """What is trained, and how long."""

    batch: int
    widths: tuple[int, int, int]
    image: int  # pixels per row
    steps: int  # per repeat, at most
    device: str

    @property
    def low(self) -> torch.dtype:
        """The dtype of images and weights. Convolutions of a CPU have no float16."""
        return torch.float16 if self.device == "cuda" else torch.float32

    def data(self) -> tuple[Tensor, Tensor]:
        """Return a batch of images and labels."""
        made = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch, 3, self.image, self.image, generator=made)
        labels = torch.randint(10, (self.batch,), generator=made)
        return images.to(self.device, self.low, memory_format=torch.channels_last), labels.to(self.device)


# ----------------------------------------------------------------------------------------------------------- the recipe


class Group(nn.Module):
    """Two convolutions, each with a norm, and half as many pixels per row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding="same", bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding="same", bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norms[0](F.max_pool2d(self.first(x), 2)))
        return F.gelu(self.norms[1](self.second(x)))


class Net(nn.Module):
    """Whitening, three groups, and a linear layer; weights in low precision, norms in float32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        first, second, last = sizes.widths
        self.whitening = nn.Conv2d(3, 24, 2)
        self.groups = nn.Sequential(Group(24, first), Group(first, second), Group(second, last))
        self.head = nn.Linear(last, 10, bias=False)
        self.whitening.weight.requires_grad_(False)
        self.head.weight.data /= self.head.weight.data.std()
        self.to(sizes.low)
        for module in self.groups.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.dirac_(module.weight.data[: module.in_channels])
            elif isinstance(module, nn.BatchNorm2d):
                module.float().weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.groups(F.gelu(self.whitening(x))), 3)
        out: Tensor = self.head(x.flatten(1))
        return out / self.head.in_features


def orthogonal(grad: Tensor) -> Tensor:
    """Return about the nearest matrix with orthogonal rows or columns, by 3 steps of Newton and Schulz."""
    x = grad.bfloat16()
    x = x / (x.norm() + 1e-7)
    x = x.T if grad.shape[0] > grad.shape[1] else x
    for _ in range(3):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


class Recipe(nn.Module):
    """The net, and what its optimizers keep. The rates are tensors, which the loop sets in front of each step."""

    def __init__(self, sizes: Sizes, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(sizes).to(sizes.device, memory_format=torch.channels_last)
        self.filters = [conv.weight for group in self.net.groups for conv in (group.first, group.second)]
        self.momenta = nn.ParameterList(nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in self.filters)
        self.register_buffer("rates", torch.tensor(list(RATES.values()), device=sizes.device))
        decay, biases = WEIGHT_DECAY * sizes.batch, [norm.bias for group in self.net.groups for norm in group.norms]
        params = {"whitening": [self.net.whitening.bias], "biases": biases, "head": [self.net.head.weight]}
        self.sgd_rates = {name: torch.tensor(RATES[name], device=sizes.device) for name in params}
        groups = [
            {"params": own, "lr": self.sgd_rates[name], "weight_decay": decay / RATES[name]}
            for name, own in params.items()
        ]
        self.sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True, fused=True)
        self.trained = [*self.filters, *(param for own in params.values() for param in own)]
        self.orthogonal = torch.compile(orthogonal) if way.orthogonal else orthogonal
        self.loss: Step = self.loss_of if way.net is None else torch.compile(self.loss_of, **way.net)

    def set_rates(self, i: int) -> None:
        """Set the rates of the i-th step. Sync: none."""
        for name, rate in RATES.items():
            total = WHITENING_STEPS if name == "whitening" else TOTAL_STEPS
            tensor = self.rates[3] if name == "filters" else self.sgd_rates[name]
            tensor.fill_(rate * (1 - i % total / total))

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels, label_smoothing=0.2, reduction="sum")

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Do a training step; return the loss."""
        for param in self.trained:
            param.grad = None
        loss = self.loss(images, labels)
        loss.backward()
        self.sgd.step()
        with torch.no_grad():
            for weight, momentum in zip(self.filters, self.momenta, strict=True):
                assert weight.grad is not None  # the loss depends on all filters
                momentum.mul_(0.6).add_(weight.grad)
                direction = self.orthogonal((weight.grad + 0.6 * momentum).flatten(1))
                weight.mul_(len(weight) ** 0.5 / weight.norm())
                weight.sub_(direction.view_as(weight) * self.rates[3].to(weight.dtype))
        return loss.detach()


# --------------------------------------------------------------------------------------------------------- bits, speed


def made(sizes: Sizes, way: Way) -> tuple[Recipe, Callable[..., Any]]:
    """Return the recipe and its step."""
    recipe = Recipe(sizes, way)
    if not way.graphed:
        return recipe, recipe.step
    graph = "auto" if sizes.device == "cuda" else "emulate"
    return recipe, ampkit.graphed(modules=(recipe,), optimizers=(recipe.sgd,), graph=graph)(recipe.step)


def trained(sizes: Sizes, way: Way) -> tuple[dict[str, Tensor], str]:
    """Return the losses and the state behind some steps, and what the report says."""
    recipe, step = made(sizes, way)
    losses = []
    for i in range(CHECKED):
        recipe.set_rates(i)
        losses.append(step(*sizes.data()))
    state = {name: tensor.detach() for name, tensor in recipe.state_dict().items()}
    momenta = {f"momentum {i}": each["momentum_buffer"] for i, each in enumerate(recipe.sgd.state.values())}
    report = f"{step.report().outcome}, {step.report().replays} replays" if way.graphed else ""
    return {"losses": torch.stack(losses), **state, **momenta}, report


def timed(sizes: Sizes, way: Way) -> tuple[list[float], float, float]:
    """Return milliseconds per step of each repeat, those of its kernels, and the seconds before them."""
    torch.compiler.reset()
    start = time.perf_counter()
    recipe, step = made(sizes, way)
    batch = sizes.data()

    def run(steps: int) -> float:
        wait(sizes.device)
        begin = time.perf_counter()
        for i in range(steps):
            recipe.set_rates(i)
            step(*batch)
        wait(sizes.device)
        return time.perf_counter() - begin

    run(10)  # compilation, warm-up, capture
    steps = min(sizes.steps, max(2, int(SECONDS / REPEATS / (run(4) / 4))))
    before = time.perf_counter() - start
    rows = sorted(1e3 * run(steps) / steps for _ in range(REPEATS))
    with profile(activities=[ProfilerActivity.CUDA] if sizes.device == "cuda" else [ProfilerActivity.CPU]) as found:
        run(steps)
    on_device = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    return rows, sum(event.device_time for event in on_device) / 1e3 / steps, before


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ways", nargs="+", metavar="TEXT", default=[""], help="only those with one of these texts")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    full, tiny = (2000, (64, 256, 256), 32, 200), (8, (32, 32, 32), 32, 3)
    sizes = Sizes(*(tiny if args.tiny else full), args.device)
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__, flush=True)
    with repeatable(strict=True):
        (expected, _), (found, report) = trained(sizes, WAYS[0]), trained(sizes, WAYS[3])
    print(f"{report}, differing: {differing(found, expected)[:3]}", flush=True)
    print(f"{'way':38s} {'ms per step':>28s} {'of the author':>14s} {'its kernels':>12s} {'before, s':>10s}")
    authors = None
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for way in WAYS:
            if not any(text in way.name for text in args.ways):
                continue
            rows, kernels, before = timed(sizes, way)
            middle = statistics.median(rows)
            authors = middle if way is WAYS[1] else authors
            share = f"{middle / authors:.2f}x" if authors is not None else ""
            spread = f"{middle:9.3f} ({rows[0]:.3f} to {rows[-1]:.3f})"
            print(f"{way.name:38s} {spread:>28s} {share:>14s} {kernels:12.3f} {before:10.1f}", flush=True)


if __name__ == "__main__":
    main()
