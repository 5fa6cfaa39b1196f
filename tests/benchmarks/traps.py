"""Twelve situations of a training loop, under five ways to replay CUDA graphs: right, an error, or silently wrong.

    PYTHONPATH=. python tests/benchmarks/traps.py                              prints the table, on a GPU
    PYTHONPATH=. python tests/benchmarks/traps.py --write docs/traps.md        and writes it into the page
    PYTHONPATH=. python tests/benchmarks/traps.py --cell dropout callables     one cell, in this process

Each cell trains a small model twice from one seed, under deterministic algorithms: with a plain loop, and in one of the
ways. What the modules hold at the end, parameters and buffers, is compared. A cell is a process of its own, because a
capture that fails may leave a process in which no later one succeeds.

All ways get the same help: the first calls of a capture are steps on real batches, torch.compiler is told where a step
begins, the generator is seeded behind the warm-up of make_graphed_callables, and Inductor draws eager's random numbers.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS

import marked
import torch
from torch import Tensor, nn
from torch.optim import SGD
from traps_situations import SITUATIONS, Situation

MARK = "traps.py"  # the block of docs/traps.md
WARMUP = 4  # calls before a capture: one window of micro-batches
CLOSE = 1e-3  # how far compiled kernels may be from eager ones after 40 steps
SECONDS = 100  # of a cell


# ----------------------------------------------------------------------------------------------------------------- ways


def loop(
    situation: Situation, modules: Sequence[nn.Module], nets: Sequence[Any], device: str, mark: bool = False
) -> str:
    """Train with the loop that everybody writes. `nets` are called in place of the modules."""
    optimizers = situation.optimizers(modules)
    schedulers = situation.schedulers(optimizers)
    torch.manual_seed(7)
    for i, batch in enumerate(situation.batches(device), 1):
        if mark:
            torch.compiler.cudagraph_mark_step_begin()
        situation.backward(nets, optimizers, *batch)
        if i % situation.accumulate == 0:
            situation.update(optimizers)
            for scheduler in schedulers:
                scheduler.step()
    return ""


def plain(situation: Situation, modules: Sequence[nn.Module], device: str) -> str:
    return loop(situation, modules, modules, device)


def reduce_overhead(situation: Situation, modules: Sequence[nn.Module], device: str) -> str:
    import torch._dynamo.config
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    torch._dynamo.config.recompile_limit = (
        4  # 8 as a rule: a model that counts its calls is compiled so often, then eager
    )
    nets = [torch.compile(module, mode="reduce-overhead") for module in modules]
    return loop(situation, modules, nets, device, mark=True)


def callables(situation: Situation, modules: Sequence[nn.Module], device: str) -> str:
    samples = situation.samples(situation.batches(device)[0])
    nets = torch.cuda.make_graphed_callables(tuple(modules), tuple(samples))  # type: ignore[arg-type]
    return loop(situation, modules, nets, device)


def on_a_side_stream(work: Callable[[], Any]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)


def record(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return what replays the work, which is captured and not done."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def by_hand(situation: Situation, modules: Sequence[nn.Module], device: str) -> str:
    """torch.cuda.graph as in "Whole-network capture" of torch's notes on CUDA, with a rarer update outside of it."""
    batches = situation.batches(device)
    static = [part.clone() for part in batches[0]]
    optimizers, work = _work(situation, modules)
    replays: list[Callable[[], Any]] = []

    def call(i: int, *batch: Tensor) -> None:
        for kept, part in zip(static, batch, strict=True):
            kept.copy_(part)
        if i <= WARMUP:
            on_a_side_stream(lambda: work(*static))
            return
        if not replays:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=situation.set_to_none)
            replays.append(record(lambda: work(*static)))
        replays[0]()

    return _captured_loop(situation, optimizers, batches, call)


def cuda_graph_module(situation: Situation, modules: Sequence[nn.Module], device: str) -> str:
    from tensordict.nn import CudaGraphModule

    optimizers, work = _work(situation, modules)
    graphed = CudaGraphModule(work, warmup=WARMUP + 1)  # it captures in the last of these calls
    return _captured_loop(situation, optimizers, situation.batches(device), lambda i, *batch: graphed(*batch))


def _work(situation: Situation, modules: Sequence[nn.Module]) -> tuple[list[SGD], Callable[..., Tensor]]:
    """Return the optimizers, and what a graph holds: a whole step, or a backward where calls accumulate gradients."""
    optimizers = situation.optimizers(modules)

    def work(*batch: Tensor) -> Tensor:
        situation.backward(modules, optimizers, *batch)
        if situation.accumulate == 1:
            situation.update(optimizers)
        return batch[0].new_zeros(())

    return optimizers, work


def _captured_loop(
    situation: Situation, optimizers: Sequence[SGD], batches: Sequence[tuple[Tensor, ...]], call: Callable[..., Any]
) -> str:
    """Train with calls of a graph. Its gradients are left where it writes them, unless they are zeroed in place."""
    schedulers = situation.schedulers(optimizers)
    torch.manual_seed(7)
    for i, batch in enumerate(batches, 1):
        call(i, *batch)
        if i % situation.accumulate == 0:
            if situation.accumulate > 1:
                situation.update(optimizers, clear=i <= WARMUP or not situation.set_to_none)
            for scheduler in schedulers:
                scheduler.step()
    return ""


def ours(situation: Situation, modules: Sequence[nn.Module], device: str) -> str:
    """Train with ampkit, and return how: "whole" graphs, "in parts" or "eager"."""
    import ampkit

    graph = "auto" if device == "cuda" else "emulate"
    optimizers, work = _work(situation, modules)
    torch.manual_seed(7)
    if len(modules) > 1:
        step: Any = ampkit.graphed(modules=modules, optimizers=optimizers, graph=graph)(work)
    else:
        step = ampkit.graphed_step(
            situation.loss,
            modules[0],
            optimizers[0],
            accumulate=situation.accumulate,
            scheduler=next(iter(situation.schedulers(optimizers)), None),
            graph=graph,
        )
    batches = situation.batches(device)
    if situation.window:
        for i in range(0, len(batches), situation.accumulate):
            step.window(*map(torch.stack, zip(*batches[i : i + situation.accumulate], strict=True)))
    else:
        for batch in batches:
            step(*batch)
    outcome: str = step.report().outcome
    return outcome


Way = Callable[[Situation, Sequence[nn.Module], str], str]
WAYS: dict[str, tuple[str, Way]] = {
    "compile": ('`torch.compile(mode="reduce-overhead")`', reduce_overhead),
    "callables": ("`torch.cuda.make_graphed_callables`", callables),
    "by_hand": ("`torch.cuda.graph` by hand", by_hand),
    "tensordict": ("tensordict's `CudaGraphModule`", cuda_graph_module),
    "ampkit": ("ampkit", ours),
}


# ---------------------------------------------------------------------------------------------------------------- cells


def state_after(situation: Situation, way: Way, device: str) -> tuple[dict[str, Tensor], str]:
    """Return what the modules hold after the training, and what the way says of it."""
    torch.manual_seed(0)
    modules = [module.to(device) for module in situation.modules()]
    said = way(situation, modules, device)
    states = {f"{i}.{name}": t for i, module in enumerate(modules) for name, t in module.state_dict().items()}
    return {name: tensor.detach().double().cpu() for name, tensor in states.items()}, said


def measure(name: str, way: str, device: str) -> dict[str, Any]:
    """Return the cell: `error` is what was raised, else `distance` the largest relative one of a tensor."""
    torch.use_deterministic_algorithms(True)
    situation = SITUATIONS[name][1]
    cell: dict[str, Any] = {"situation": name, "way": way}
    expected, _ = state_after(situation, plain, device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, said = state_after(situation, WAYS[way][1], device)
    except ModuleNotFoundError as error:
        return cell | {"missing": error.name}
    except Exception as error:  # the verdict of this cell
        traceback.print_exc()
        return cell | {"error": type(error).__name__, "message": (str(error).splitlines() or [""])[0]}
    distances = [
        ((got[key] - tensor).norm() / tensor.norm().clamp_min(1e-12)).item() for key, tensor in expected.items()
    ]
    exact = all(torch.equal(got[key], tensor) for key, tensor in expected.items())
    worst = float("nan") if any(d != d for d in distances) else max(distances)
    return cell | {"exact": exact, "distance": worst, "said": said}


def cell_text(cell: dict[str, Any]) -> str:
    """Return what the table says of a cell."""
    if "missing" in cell:
        return "not installed"
    if "error" in cell:
        return f"raises `{cell['error']}`"
    if "ended" in cell:
        return str(cell["ended"])
    said = f", {cell['said']}" if cell["said"] else ""
    if cell["exact"]:
        return f"right{said}"
    if cell["distance"] <= CLOSE:
        return f"right within {cell['distance']:.0e}{said}"
    return f"**wrong** by {cell['distance']:.1e}{said}"


def in_a_process(name: str, way: str) -> dict[str, Any]:
    """Return the cell, measured by a process of its own; one that ends without an answer is a verdict too."""
    command = [sys.executable, __file__, "--cell", name, way]
    cell: dict[str, Any] = {"situation": name, "way": way}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=_few_threads())
    except subprocess.TimeoutExpired:
        return cell | {"ended": f"no answer within {SECONDS} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        print(done.stderr[-2000:], file=sys.stderr)
        return cell | {"ended": f"ends the process ({done.returncode})"}
    return answer


def _few_threads() -> dict[str, str]:
    """Several processes share the cores: each of Inductor's would start as many workers as there are cores."""
    return {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}


def table(cells: Sequence[dict[str, Any]], about: str) -> str:
    """Return a markdown table of the cells, and a sentence on how they were measured."""
    texts = {(cell["situation"], cell["way"]): cell_text(cell) for cell in cells}
    lines = [marked.cells("situation", *(title for title, _ in WAYS.values())), "|---" * (len(WAYS) + 1) + "|"]
    for name, (title, _) in SITUATIONS.items():
        lines.append(marked.cells(title, *(texts.get((name, way), "") for way in WAYS)))
    return "\n".join([*lines, "", about])


def about() -> str:
    versions = [f"torch {torch.__version__}"]
    if importlib.util.find_spec("tensordict"):
        versions.append(f"tensordict {importlib.metadata.version('tensordict')}")
    return f"{torch.cuda.get_device_name()}, {', '.join(versions)}, {datetime.date.today()}."


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", nargs=2, metavar=("SITUATION", "WAY"), help="measure one cell, in this process")
    parser.add_argument("--processes", type=int, default=8, help="cells at a time")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table into this page, too")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here, and a CUDA graph needs one: nothing is measured.")
    if args.cell:
        print(json.dumps(measure(*args.cell, "cuda")))
        return 0
    pairs = sorted(
        ((name, way) for name in SITUATIONS for way in WAYS),
        key=lambda pair: (pair[1] != "compile", pair[0] != "counter"),
    )
    with ThreadPoolExecutor(args.processes) as pool:
        cells = list(pool.map(lambda pair: in_a_process(*pair), pairs))
    for cell in cells:
        print(json.dumps(cell))
    text = table(cells, about())
    print(text)
    if args.write:
        marked.write(args.write, MARK, text)
    wrong = [cell for cell in cells if cell["way"] == "ampkit" and not cell.get("exact")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
