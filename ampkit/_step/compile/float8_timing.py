"""How long a Linear layer takes, forward and backward, in float8 and without it."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._capture.graph.graph import CudaGraph, Pool, capture_stream
from ..._precision.float8 import Float8Forward, float8_forward
from ..._text import error_line
from ..._torch.autograd.backward_thread import run_backwards_here
from ..._torch.compile import Compiler
from ..._undo import Undo

_WARM_UP, _REPEATS, _REPLAYS = 3, 5, 10  # calls, and of the graph: how often so many replays are timed


class TimedLayer(NamedTuple):
    """What the time of a layer depends on."""

    recipe: str
    sizes: tuple[int, int, int]  # rows, inputs, outputs
    bias: bool
    dtype: torch.dtype  # of the parameters


def times_of(layer: TimedLayer, device: torch.device, compiler: Compiler | None) -> tuple[float, float] | str:
    """Return the milliseconds without float8 and with it, each of a graph of its own; or why they are not known.

    Both are timed in turns, so that neither the clock of the device nor other work on it decides.

    Args:
        layer: what is timed.
        device: a CUDA device.
        compiler: compiles what is timed, if the step is compiled.

    Sync: waits for the device.
    """
    forwards: tuple[Float8Forward, ...] = (nn.Linear.forward, float8_forward(layer.recipe))
    try:
        plain, float8 = _ms_in_turns([_run_of(layer, device, compiler, forward) for forward in forwards], device)
    except RuntimeError as error:  # no memory, no kernel, or nothing that the compiler can do
        return error_line(error)
    return plain, float8


def _run_of(
    layer: TimedLayer, device: torch.device, compiler: Compiler | None, forward: Float8Forward
) -> Callable[[], None]:
    """Return a function that does forward and backward of such a layer on random numbers."""
    rows, inputs, outputs = layer.sizes
    generator = torch.Generator(device).manual_seed(0)  # not that of the training

    def normal(shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

    # As in a compiled step: working weights are written in each call, and the update reads their gradients as they are.
    working = compiler is not None and forward is nn.Linear.forward
    dtype = torch.bfloat16 if working else layer.dtype
    module = nn.utils.skip_init(nn.Linear, inputs, outputs, layer.bias, device=device, dtype=dtype)
    params = list(module.parameters())
    masters = [normal(param.shape, layer.dtype) for param in params]
    x, gradient = normal((rows, inputs), torch.bfloat16).requires_grad_(), normal((rows, outputs), torch.bfloat16)
    call = _forward if compiler is None else compiler.compiled(_forward)

    def copy() -> None:
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)

    def run() -> None:
        if working:
            copy()
        torch.autograd.grad(call(forward, module, x), (x, *params), gradient)

    copy()
    return run


def _forward(forward: Float8Forward, module: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled=False):
        return forward(module, x)


def _ms_in_turns(runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Return the medians of the milliseconds that graphs of these functions take. All of them are kept until then."""
    stream = capture_stream(device)
    graphs = [CudaGraph(stream, Pool()) for _ in runs]
    found: list[list[float]] = [[] for _ in runs]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.device(device), Undo() as undo:
            run_backwards_here(undo)
            for graph, run in zip(graphs, runs, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UP):
                        run()
                graph.capture(run)
            for _ in range(1 + _REPEATS):
                for graph, times in zip(graphs, found, strict=True):
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    for _ in range(_REPLAYS):
                        graph.replay()
                    end.record()
                    end.synchronize()
                    times.append(start.elapsed_time(end) / _REPLAYS)
        return [statistics.median(times[1:]) for times in found]  # the first ones upload the graph
    finally:
        for graph in graphs:
            graph.reset()
