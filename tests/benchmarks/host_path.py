"""Microseconds of host time per replaying call, by section; of `graphed_step`, and of a Lightning batch beside it.

    python tests/benchmarks/host_path.py                    6 tensors (an MLP) and the 320 of a ResNet-50, on the CPU
    python tests/benchmarks/host_path.py --device cuda      the same with real graphs, and what a launch takes
    python tests/benchmarks/host_path.py --lightning        a batch of a Trainer beside a call of the raw loop
    python tests/benchmarks/host_path.py --profile          functions by their own time, as cProfile slows them

The graph is replaced by an object whose `replay` does nothing, so that only ampkit's own work for a replay is measured.
On a CUDA device the call is timed with its graph too, and the launch alone. Each part of a call is also called alone,
in a loop. Its own time is what is left without the parts that it calls, so the column "its own" adds up to the call.
Below are the bare calls of torch that the parts are made of. The blocks of calls of all parts are timed in turn.
Figures are medians over the blocks, and the fastest block. If the host is busy with other things, compare the latter.
"""

import argparse
import collections
import cProfile
import functools
import gc
import itertools
import logging
import operator
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._torch.device.streams import raw_stream
from ampkit._torch.tensors.tensors import foreach_copy_

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


class Part(NamedTuple):
    """A part of a call, and the parts that it calls itself.

    Attributes:
        name: what the table calls it.
        run: does this part alone.
        inside: what `run` does, part by part. The rest is the part's own.
    """

    name: str
    run: Callable[[], object]
    inside: tuple["Part", ...] = ()

    def all(self) -> list["Part"]:
        """Return this part and all that are inside of it, at any depth, in the order of the table."""
        return [self, *itertools.chain.from_iterable(part.all() for part in self.inside)]


def timed_in_turn(
    functions: Sequence[Callable[[], object]], calls: int, blocks: int, device: torch.device
) -> list[Times]:
    """Time blocks of calls of each function, in turn, so that whatever slows the host down slows all of them.

    On a CUDA device each block begins with an empty queue, which its calls must not fill.
    """
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(blocks):
        for fn, times in zip(functions, found, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            times.append((time.perf_counter() - start) / calls * 1e6)
    return [Times(times) for times in found]


def parts_of(setup: Setup) -> Part:
    """Return what a replaying call does, part by part. The names in brackets are files of ampkit."""
    engine, captured, step, batch = setup.engine, setup.captured, setup.step, setup.batch
    key, _ = next(iter(engine._cache))
    spec, leaves = engine._reader.spec_and_leaves(batch, {})
    watch, inputs, outputs = engine._state, captured.inputs, captured._graph.replay()
    look, number = watch._seen[0], engine._settings_history.number

    def objects() -> object:
        return gc.get_referents(*look._tables)

    state = Part(
        "state as before [watch]",
        watch.generation,
        (
            Part("learning rates", watch.refresh_rates),
            Part("addresses of tensors", look.walk.addresses),
            Part(
                "objects",
                look._read_objects,
                (
                    Part("what modules and groups hold", objects),
                    Part("requires_grad", lambda: list(map(_requires_grad, look._differentiable))),
                    Part("training", lambda: list(look.walk.training())),
                ),
            ),
            Part("layouts of tensors", lambda: look._has_layouts(*look.walk.local())),
            Part("settings of torch", look._read_settings),
        ),
    )
    replay = Part(
        "replay [cache]",
        lambda: captured.replay(leaves),
        (
            Part(
                "inputs: copies",
                lambda: inputs.copy_(leaves),
                (Part("overlaps", lambda: inputs.refuse_shared(leaves)),),
            ),
            Part("outputs: copy", outputs.copied),
        ),
    )
    call = Part(
        "key and graph [engine]",
        lambda: engine(batch, {}, key.phase),
        (
            Part("layout of the batch [inputs]", lambda: engine._reader.spec_and_leaves(batch, {})),
            state,
            Part("graph of the key [cache]", lambda: engine._cache.get(spec, key.phase, number)),
            replay,
        ),
    )
    window = Part("window [window]", lambda: step._window.run(batch, {}), (call,))
    return Part("a call [graphed_step, turns]", lambda: step(*batch), (window,))


_requires_grad = operator.attrgetter("requires_grad")


def floors_of(setup: Setup) -> dict[str, Callable[[], object]]:
    """Return what the least is that some parts could take: the bare calls of torch, with nothing of ampkit."""
    look, inputs, outputs = setup.engine._state._seen[0], setup.captured.inputs, setup.captured._graph.replay()
    tensors: list[Tensor] = look.walk.tensors
    pairs = list(zip(inputs._buffers, setup.batch, strict=True))
    row = torch.empty_like(outputs._block)
    floors: dict[str, Callable[[], object]] = {
        f"data_ptr() of {len(tensors)} tensors": lambda: list(map(Tensor.data_ptr, tensors)),
        f"the same as a loop over {len(tensors)}": lambda: [tensor.data_ptr() for tensor in tensors],
        f"requires_grad of {len(tensors)} tensors": lambda: list(map(_requires_grad, tensors)),
        "grad of all tensors": lambda: list(map(operator.attrgetter("grad"), tensors)),
        "copy_ of the outputs' block": lambda: row.copy_(outputs._block),
        "an empty tensor": lambda: torch.empty(24, dtype=torch.uint8, device=row.device),
        "a function that does nothing": lambda: None,
    }
    for i, (buffer, given) in enumerate(pairs):
        floors[f"copy_ of input {i}, {buffer.nbytes} bytes"] = functools.partial(buffer.copy_, given, True)
    together = (
        [tensor.view(torch.uint8) for tensor in inputs._buffers],
        [given.view(torch.uint8) for given in setup.batch],
    )
    floors["the inputs by one kernel"] = lambda: foreach_copy_(*together, True)
    floors["view(torch.uint8) of an input"] = lambda: setup.batch[0].view(torch.uint8)
    if row.is_cuda:
        index = row.device.index
        floors["torch.cuda.current_stream()"] = lambda: torch.cuda.current_stream(row.device)
        floors["the current stream's address"] = lambda: raw_stream(index)
    return floors


def show(name: str, setup: Setup, args: argparse.Namespace) -> None:
    device, blocks = setup.engine._session.device, args.blocks

    def call() -> object:
        return setup.step(*setup.batch)

    launched: list[Times] = []
    if device.type == "cuda":
        for _ in range(WARM_UP):
            call()
        launched = timed_in_turn([call, setup.captured._graph.replay], args.calls, blocks, device)
    setup.without_launch()
    for _ in range(WARM_UP):
        call()
    whole = parts_of(setup)
    times = dict(
        zip(map(id, whole.all()), timed_in_turn([p.run for p in whole.all()], args.calls, blocks, device), strict=True)
    )
    print(f"{name}: {times[id(whole)]} us per call; {calls_of(call)}")
    if launched:
        print(f"    with its launch {launched[0]}, the launch alone {launched[1]}")
    print(f"    {'':34}{'all of it':>10} {'fastest':>9} {'its own':>9} {'fastest':>9}")
    for line in lines(whole, times, 0):
        print(f"    {line}")
    floors = floors_of(setup)
    print("    bare calls of torch, the least that these could take:")
    for floor, taken in zip(floors, timed_in_turn(list(floors.values()), args.calls, blocks, device), strict=True):
        print(f"    {floor:34}{taken.median:10.1f} {taken.fastest:9.1f}", flush=True)
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(lambda: [call() for _ in range(2000)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def lines(part: Part, times: dict[int, Times], depth: int) -> Iterator[str]:
    """Yield a line per part. The column "its own" adds up to the whole call."""
    taken, inside = times[id(part)], [times[id(inner)] for inner in part.inside]
    own, own_fastest = (
        getattr(taken, which) - sum(getattr(inner, which) for inner in inside) for which in ("median", "fastest")
    )
    name = "  " * depth + part.name
    yield f"{name:34}{taken.median:10.1f} {taken.fastest:9.1f} {own:9.1f} {own_fastest:9.1f}"
    for inner in part.inside:
        yield from lines(inner, times, depth + 1)


def calls_of(call: Callable[[], object]) -> str:
    """Return how many functions a call calls: those written in Python, and those written in C."""
    counted: collections.Counter[str] = collections.Counter()
    calls = 64  # twice as many as `GraphOutputs` allocates rows for

    def count(frame: object, event: str, arg: object) -> None:
        counted[event] += 1

    sys.setprofile(count)
    try:
        for _ in range(calls):
            call()
    finally:
        sys.setprofile(None)
    return f"{counted['call'] / calls:.0f} calls of Python functions, {counted['c_call'] / calls:.0f} of C functions"


# ------------------------------------------------------------------------------------------------------------ Lightning


def lightning(args: argparse.Namespace, device: torch.device) -> None:
    """Print the time of a batch of a Trainer and that of a call of the raw loop, both without the launch."""
    setup = replaying(mlp(), (64, 32), device)
    setup.without_launch()
    for _ in range(WARM_UP):
        setup.step(*setup.batch)
    (raw,) = timed_in_turn([lambda: setup.step(*setup.batch)], args.calls, args.blocks, device)
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
                ((_, captured),) = callback._fit._step.engine._cache
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
