"""Microseconds of host time per replaying call, by section; of `graphed_step`, and of a Lightning batch beside it.

    python tests/benchmarks/host_path.py                    6 tensors (an MLP) and the 320 of a ResNet-50, on the CPU
    python tests/benchmarks/host_path.py --device cuda      the same with real graphs, and what a launch takes
    python tests/benchmarks/host_path.py --lightning        a batch of a Trainer beside a call of the raw loop
    python tests/benchmarks/host_path.py --profile          functions by their own time, as cProfile slows them

The graph is replaced by an object whose `replay` does nothing, so that only ampkit's own work for a replay is measured.
On a CUDA device the call is timed with its graph too: the difference is the launch. Sections are called alone, in a
loop, and what is left of the whole call is "window and rest". Figures are medians over short blocks of calls, with the
fastest block and the third quartile. If the host is busy with other things, compare the fastest blocks.
"""

import argparse
import cProfile
import itertools
import logging
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._capture.cache import Captured
from ampkit._capture.inputs import read_batch
from ampkit._capture.variation import Key

WARM_UP = 100  # calls, behind which no replay is timed by ampkit


class NoGraph:
    """Takes the place of a graph. A replay returns the outputs of one that was made before."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def replay(self) -> Any:
        return self._outputs

    def reset(self) -> None:
        pass


class Setup(NamedTuple):
    """A step that replays, its batch, its engine, and its only graph."""

    step: ampkit.GraphedStep
    batch: tuple[Tensor, ...]
    engine: Any
    captured: Any

    def without_launch(self) -> None:
        """Replace the graph by one that does nothing."""
        self.captured._graph = NoGraph(self.captured._graph.replay())


class Times(NamedTuple):
    """Microseconds per call in blocks of calls."""

    blocks: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.blocks)

    @property
    def fastest(self) -> float:
        return min(self.blocks)

    def __str__(self) -> str:
        return f"{self.median:7.1f} [{min(self.blocks):.1f}, {statistics.quantiles(self.blocks)[2]:.1f}]"


def mlp(widths: tuple[int, ...] = (32, 64, 64, 10)) -> nn.Module:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def resnet50() -> nn.Module:
    import torchvision

    return torchvision.models.resnet50(num_classes=10)  # type: ignore[no-any-return]  # a module


def loss_fn(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def replaying(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> Setup:
    """Return a step of this model behind its capture."""
    torch.manual_seed(0)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    graph = "auto" if device.type == "cuda" else "emulate"
    step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", max_norm=1.0, graph=graph)
    batch = torch.randn(*shape, device=device), torch.randint(10, shape[:1], device=device)
    while not step.captures:
        step(*batch)
    engine: Any = step._engine
    ((_, captured),) = engine._cache
    return Setup(step, batch, engine, captured)


def timed(fn: Callable[[], object], calls: int, blocks: int, device: torch.device) -> Times:
    """Time blocks of calls. On a CUDA device each begins with an empty queue, which its calls must not fill."""
    found = []
    for _ in range(blocks):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return Times(found)


def sections(setup: Setup) -> dict[str, Callable[[], object]]:
    """Return what a call does, part by part."""
    engine, captured, device = setup.engine, setup.captured, setup.engine._device
    key, _ = next(iter(engine._cache))
    spec, leaves = read_batch(setup.batch, {}, device)
    graph, number = captured._graph, engine._surroundings.number

    def read() -> object:
        if hasattr(engine, "_reader"):
            return engine._reader.read(setup.batch, {})
        return read_batch(setup.batch, {}, device)  # an older ampkit, as in the next

    def key_and_state() -> object:
        if not hasattr(engine, "_watch"):
            engine._state.generation()
            return engine._cache.get(Key(spec, key.phase, number))
        engine._watch.present()
        return engine._cache.get(engine._reader.read(setup.batch, {})[0], key.phase, number)

    return {
        "batch layout": read,
        "layout, key and state": key_and_state,
        "overlap check": lambda: captured.inputs.refuse_shared(leaves),
        "check and copy of inputs": lambda: captured.inputs.copy_(leaves),
        "outputs": lambda: outputs_of(captured, graph),
    }


def outputs_of(captured: Captured, graph: Any) -> object:
    if hasattr(graph.replay(), "copied"):
        return graph.replay().copied()
    return captured._rebuilt(map(Tensor.clone, captured._tensors))  # type: ignore[call-arg]  # graph makes none


def show(name: str, setup: Setup, args: argparse.Namespace) -> None:
    device = setup.engine._device

    def call() -> object:
        return setup.step(*setup.batch)

    blocks = args.blocks
    launch = ""
    if device.type == "cuda":
        for _ in range(WARM_UP):
            call()
        launch = f"   with the launch {timed(call, args.calls, blocks, device)}"
    setup.without_launch()
    for _ in range(WARM_UP):
        call()
    whole = timed(call, args.calls, blocks, device)
    parts = {part: timed(fn, args.calls, blocks, device) for part, fn in sections(setup).items()}
    again = timed(call, args.calls, blocks, device)
    print(f"{name}: {whole} us per call, again {again}{launch}")
    for part, times in parts.items():
        print(f"    {part:26}{times}")
    known = [times.fastest for part, times in parts.items() if part not in ("overlap check", "batch layout")]
    print(f"    {'window and rest':26}{'':8} {whole.fastest - sum(known):.1f}", flush=True)
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(lambda: [call() for _ in range(2000)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


# ------------------------------------------------------------------------------------------------------------ Lightning


def lightning(args: argparse.Namespace, device: torch.device) -> None:
    """Print the time of a batch of a Trainer and that of a call of the raw loop, both without the launch."""
    setup = replaying(mlp(), (64, 32), device)
    setup.without_launch()
    for _ in range(WARM_UP):
        setup.step(*setup.batch)
    raw = timed(lambda: setup.step(*setup.batch), args.calls, args.blocks, device)
    print(f"raw loop: {raw} us per call", flush=True)
    for name, graphed in (("Lightning, AmpkitCallback", True), ("Lightning, a step that does nothing", False)):
        clock = trainer_times(args, device, graphed)
        print(f"{name}: {Times(clock.blocks)} us per batch", flush=True)
        if args.profile:
            pstats.Stats(clock.profile).sort_stats("tottime").print_stats(45)


class Same:
    """The same batch so many times."""

    def __init__(self, batch: tuple[Tensor, ...], times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (self.batch for _ in range(self.times))


def trainer_times(args: argparse.Namespace, device: torch.device, graphed: bool) -> Any:
    """Fit the MLP; return the times of blocks of batches, with the graph's replay replaced by one that does nothing."""
    import lightning.pytorch as pl

    from ampkit.lightning import AmpkitCallback

    callback = AmpkitCallback(on_failure="raise", graph="auto" if device.type == "cuda" else "emulate")
    batch = torch.randn(64, 32, device=device), torch.randint(10, (64,), device=device)
    profiled = 2000 if args.profile else 0
    last = WARM_UP + args.blocks * args.calls

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return loss_fn(self.net, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    class DoesNothing(Module):
        """The least that Lightning takes for a batch: there is no step, and no backward."""

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return zero

        def backward(self, *_: Any) -> None:
            pass

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            optimizer.step = lambda closure: closure()
            optimizer.step(closure=closure)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.blocks: list[float] = []
            self.count = 0
            self.profile = cProfile.Profile()

        def on_train_batch_start(self, *_: Any) -> None:
            done, self.count = self.count - WARM_UP, self.count + 1
            if done == -WARM_UP // 2 and graphed:
                ((_, captured),) = callback._fit._step._engine._cache
                captured._graph = NoGraph(captured._graph.replay())
            now = time.perf_counter()
            if done > 0 and done % args.calls == 0 and len(self.blocks) < args.blocks:
                self.blocks.append((now - self.start) / args.calls * 1e6)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            if done >= 0 and done % args.calls == 0:
                self.start = time.perf_counter()
            if profiled and self.count == last:
                self.profile.enable()

        def on_train_end(self, *_: Any) -> None:
            self.profile.disable()

    zero = torch.zeros((), device=device, requires_grad=True)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        gradient_clip_val=1.0 if graphed else None,
        callbacks=[clock, *([callback] if graphed else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Module() if graphed else DoesNothing(), Same(batch, last + 1 + profiled))
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=20, help="in a block; few enough for the queue of a GPU")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--lightning", action="store_true")
    parser.add_argument("--only", choices=("mlp", "resnet50"))
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    warnings.filterwarnings("ignore", category=UserWarning)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if args.lightning:
        lightning(args, device)
        return
    if args.only != "resnet50":
        show("6 tensors", replaying(mlp(), (64, 32), device), args)
    if args.only != "mlp":
        side = 64 if device.type == "cuda" else 32
        show("320 tensors", replaying(resnet50(), (2, 3, side, side), device), args)


if __name__ == "__main__":
    main()
