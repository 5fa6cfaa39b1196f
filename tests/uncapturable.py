"""Run by test_graph.py in a process of its own: steps that no graph can hold, one after another, and their damage.

Prints one JSON line per kind. A failed capture that is not recovered from would make every later kind fail as well.
"""

import contextlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Extra = Callable[[Tensor, Tensor], Any]
capturing = torch.cuda.is_current_stream_capturing


def item(loss: Tensor, x: Tensor) -> None:
    loss.item()  # HERE


def item_in_backward_hook(loss: Tensor, x: Tensor) -> None:
    loss.register_hook(lambda grad: grad * float(grad.sum() > 0))  # HERE


def data_dependent_if(loss: Tensor, x: Tensor) -> None:
    if loss > 0:  # HERE
        pass


def printed(loss: Tensor, x: Tensor) -> None:
    str(loss)  # HERE


def nonzero(loss: Tensor, x: Tensor) -> None:
    x.nonzero()  # HERE


def boolean_mask(loss: Tensor, x: Tensor) -> None:
    x[x > 0]  # HERE


def device_to_host(loss: Tensor, x: Tensor) -> None:
    loss.detach().cpu()  # HERE


def host_to_device(loss: Tensor, x: Tensor) -> None:
    torch.ones(5).to("cuda")  # HERE


def new_tensor(loss: Tensor, x: Tensor) -> None:
    torch.tensor(1.5, device="cuda")  # HERE


def exception(loss: Tensor, x: Tensor) -> None:
    if capturing():
        raise ValueError("a mistake of the user")  # HERE


def out_of_memory(loss: Tensor, x: Tensor) -> None:
    if capturing():
        torch.empty(2**42, device="cuda")  # HERE


def other_generator(loss: Tensor, x: Tensor) -> None:
    torch.rand(1, device="cuda", generator=OTHER)  # HERE


def swallowed(loss: Tensor, x: Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        loss.item()


KINDS: tuple[Extra, ...] = (
    item,
    item_in_backward_hook,
    data_dependent_if,
    printed,
    nonzero,
    boolean_mask,
    device_to_host,
    host_to_device,
    new_tensor,
    exception,
    out_of_memory,
    other_generator,
    swallowed,
)


def make(extra: Extra | None, **options: Any) -> tuple[ampkit.GraphedStep, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)).cuda()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if extra is not None:
            extra(loss, x)
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return ampkit.graphed_step(loss_fn, model, optimizer, policy="float16", max_norm=1.0, **options), model


def train(extra: Extra | None, graph: str) -> tuple[list[Tensor], list[str], dict[str, Any]]:
    """Return losses, weights and the random numbers after six steps; the warnings; the report."""
    step, model = make(extra, graph=graph)
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [step(X, Y).loss for _ in range(6)]
    results += [param.detach() for param in model.parameters()] + [torch.rand(3, device="cuda")]
    return results, [str(warning.message) for warning in caught], step.report().to_dict()


def healthy(older: ampkit.GraphedStep) -> bool:
    """Random operations, an older graph, the allocator and a new capture all work."""
    older(X, Y)
    replays = older.replays
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = F.dropout(X)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    _, _, report = train(None, "auto")
    return bool(replays > 2 and not torch.equal(first, drawn) and report["replays"] == 3 and leak() == 0)


def leak() -> int:
    """Return how many bytes blocks shared by two streams keep after they are freed."""
    torch.cuda.empty_cache()
    before, side = torch.cuda.memory_reserved(), torch.cuda.Stream()
    for _ in range(4):
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        block.record_stream(side)
        del block
        torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - before


def marked_line(extra: Extra) -> int | None:
    """Return the line of `extra` that has the mark."""
    start = extra.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()
    following = (i for i in range(start, len(lines)) if lines[i].startswith(("def ", "KINDS")))
    return next((i + 1 for i in range(start, next(following)) if lines[i].endswith("# HERE")), None)


def main() -> None:
    older, _ = make(None)
    for _ in range(5):
        older(X, Y)
    for extra in KINDS:
        expected, _, _ = train(extra, "off")
        got, messages, report = train(extra, "auto")
        torch.cuda.synchronize()
        raised = ""
        step, _ = make(extra, on_failure="raise")
        try:
            for _ in range(4):
                step(X, Y)
        except ampkit.CaptureError as error:
            raised = str(error)
        row = {
            "kind": extra.__name__,
            "line": f"{__file__}:{marked_line(extra)}:" if marked_line(extra) else "",
            "messages": messages,
            "raised": raised,
            "equal": all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)),
            "eager": report["eager"],
            "failure": report["failure"],
            "healthy": healthy(older),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    OTHER = torch.Generator("cuda")
    X, Y = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    main()
