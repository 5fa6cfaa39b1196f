"""Run by test_graph.py in a process of its own: steps that no graph can hold, one after another, and their damage.

Prints one JSON line per kind, or with --table what each comes to. A failed capture that is not recovered from would
make every later kind fail as well.
"""

import contextlib
import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Extra = Callable[[Tensor, Tensor], Any]  # gets the loss and the input; what it returns multiplies the loss
capturing = torch._C._cuda_isCurrentStreamCapturing  # torch.cuda's tells user code nothing of ampkit's captures


def item_in_forward(loss: Tensor, x: Tensor) -> None:
    loss.item()  # HERE


def item_in_backward_hook(loss: Tensor, x: Tensor) -> None:
    loss.register_hook(lambda grad: grad * float(grad.sum() > 0))  # HERE


def data_dependent_if(loss: Tensor, x: Tensor) -> None:
    if float(loss.detach()) > 0:  # HERE
        pass


def nonzero(loss: Tensor, x: Tensor) -> None:
    (x * loss.detach()).nonzero()  # HERE


def boolean_mask(loss: Tensor, x: Tensor) -> None:
    x[x > loss.detach()]  # HERE


def to_cpu(loss: Tensor, x: Tensor) -> None:
    loss.detach().cpu()  # HERE


def numpy(loss: Tensor, x: Tensor) -> None:
    x.mean(0).cpu().numpy()  # HERE


def pageable_copy_in(loss: Tensor, x: Tensor) -> Tensor:
    return torch.tensor([1.0] * 100).to("cuda").mean()  # HERE


def pageable_copy_non_blocking(loss: Tensor, x: Tensor) -> Tensor:
    return torch.tensor([1.0] * 100).to("cuda", non_blocking=True).mean()  # HERE


def new_tensor(loss: Tensor, x: Tensor) -> Tensor:
    return torch.tensor([1.5] * 100, device="cuda").mean()  # HERE


def printed(loss: Tensor, x: Tensor) -> None:
    str(loss)  # HERE


def random_number(loss: Tensor, x: Tensor) -> Tensor:
    return torch.full((), 0.5 + random.random(), device="cuda")  # HERE


def random_tensor(loss: Tensor, x: Tensor) -> Tensor:
    return torch.full((), 0.5 + float(torch.rand(())), device="cuda")  # HERE


def exception(loss: Tensor, x: Tensor) -> None:
    CALLS.append(1)
    if len(CALLS) == 3:
        raise ValueError("a mistake of the user")  # HERE


def two_lines(loss: Tensor, x: Tensor) -> None:
    x.sum().item()  # HERE
    loss.register_hook(lambda grad: grad * float(grad.sum() > 0))


def other_generator(loss: Tensor, x: Tensor) -> None:
    torch.rand(1, device="cuda", generator=OTHER)  # HERE


def swallowed(loss: Tensor, x: Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        loss.item()  # HERE


def exception_in_capture(loss: Tensor, x: Tensor) -> None:
    if capturing():
        raise ValueError("a mistake of the user")  # HERE


def item_in_capture(loss: Tensor, x: Tensor) -> None:
    if capturing():
        loss.item()  # HERE


def swallowed_in_capture(loss: Tensor, x: Tensor) -> None:
    if capturing():
        with contextlib.suppress(RuntimeError):
            loss.item()


def item_of_backward_in_capture(loss: Tensor, x: Tensor) -> None:
    loss.register_hook(lambda grad: grad * float(grad.sum() > 0) if capturing() else grad)  # HERE


def copy_in_capture(loss: Tensor, x: Tensor) -> None:
    if capturing():
        loss.detach().cpu()  # HERE


def out_of_memory(loss: Tensor, x: Tensor) -> None:
    if capturing():
        torch.empty(2**42, device="cuda")  # HERE


# What the preflight sees, or what raises before a capture.
FOUND_BEFORE: tuple[Extra, ...] = (
    item_in_forward,
    item_in_backward_hook,
    data_dependent_if,
    nonzero,
    boolean_mask,
    to_cpu,
    numpy,
    pageable_copy_in,
    pageable_copy_non_blocking,
    new_tensor,
    printed,
    random_number,
    random_tensor,
    exception,
    two_lines,
    other_generator,
    swallowed,
)
# What first happens in the capture, which must be recovered from.
FOUND_IN_CAPTURE: tuple[Extra, ...] = (
    exception_in_capture,
    item_in_capture,
    swallowed_in_capture,
    item_of_backward_in_capture,
    copy_in_capture,
    out_of_memory,
)


def make(extra: Extra | None, **options: Any) -> tuple[ampkit.GraphedStep, nn.Module]:
    """Return a step that is captured as a whole or not at all, and its model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)).cuda()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        factor = None if extra is None else extra(loss, x)
        return loss if factor is None else loss * factor

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return ampkit.graphed_step(
        loss_fn,
        model,
        optimizer,
        policy="float16",
        max_norm=1.0,
        **{"on_failure": "eager", "host_writes": "ignore", **options},
    ), model


def train(extra: Extra | None, graph: str) -> tuple[list[Tensor], list[str], dict[str, Any], list[str]]:
    """Return losses, weights and random numbers after seven steps; the warnings; the report; errors that came out."""
    CALLS.clear()
    step, model = make(extra, graph=graph)
    torch.manual_seed(7)
    random.seed(7)
    results, errors = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(7):
            try:
                results.append(step(X, Y).loss)
            except ValueError as error:
                errors.append(f"{innermost(error)}: {error}")
    results += [param.detach() for param in model.parameters()]
    results += [torch.rand(3, device="cuda"), torch.rand(3), torch.tensor(random.random())]
    return results, [str(warning.message) for warning in caught], step.report().to_dict(), errors


def innermost(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}:"


def healthy(older: ampkit.GraphedStep) -> bool:
    """Random operations, an older graph, the allocator and a new capture all work."""
    before = older.replays
    older(X, Y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = F.dropout(X)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    report = train(None, "auto")[2]
    return bool(
        older.replays == before + 1 and not torch.equal(first, drawn) and report["replays"] == 4 and leak() == 0
    )


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
    following = (i for i in range(start, len(lines)) if lines[i].startswith(("def ", "# What")))
    return next((i + 1 for i in range(start, next(following)) if lines[i].endswith("# HERE")), None)


def row(extra: Extra, older: ampkit.GraphedStep) -> dict[str, Any]:
    """Train eagerly, train with graphs, and ask for an error; return what came of it."""
    expected, _, _, eager_errors = train(extra, "off")
    got, messages, report, errors = train(extra, "auto")
    torch.cuda.synchronize()
    raised = ""
    CALLS.clear()
    step, _ = make(extra, on_failure="raise")
    for _ in range(5):
        try:
            step(X, Y)
        except (ampkit.CaptureError, ValueError) as error:
            raised = raised or (
                str(error) if isinstance(error, ampkit.CaptureError) else f"{innermost(error)}: {error}"
            )
    return {
        "kind": extra.__name__,
        "line": f"{__file__}:{marked_line(extra)}:" if marked_line(extra) else "",
        "messages": messages,
        "raised": raised,
        "errors": errors,
        "same_errors": errors == eager_errors,
        "equal": all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)),
        "eager": report["eager"],
        "replays": report["replays"],
        "failure": report["failure"],
        "healthy": healthy(older),
    }


def verdict(row: dict[str, Any]) -> list[bool]:
    """Return the columns of the table: found before capture, line right, step done once, healthy, equal to eager."""
    said = row["messages"] + row["errors"]
    before = not any("capture failed" in message for message in said) and bool(said)
    line = len(said) == 1 and row["line"] in said[0] and row["line"] in row["raised"]
    once = sum(row["eager"].values()) + row["replays"] == 7
    return [before, line, once and row["same_errors"], row["healthy"], row["equal"]]


def main() -> None:
    older, _ = make(None)
    for _ in range(5):
        older(X, Y)
    if "--table" in sys.argv:
        columns = ("before capture", "line right", "done once", "healthy", "equals eager")
        print(f"{'':28}" + "".join(f"{column:>16}" for column in columns))
    for extra in (*FOUND_BEFORE, *FOUND_IN_CAPTURE):
        result = row(extra, older)
        if "--table" in sys.argv:
            print(f"{extra.__name__:28}" + "".join(f"{'yes' if value else 'no':>16}" for value in verdict(result)))
        else:
            print(json.dumps(result), flush=True)


CALLS: list[int] = []

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    OTHER = torch.Generator("cuda")
    X, Y = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    main()
