r"""The kernels of one training step of a model of the bench, and what each is for, with their times.

    python tests/benchmarks/kernels.py                                  mlp-tiny: graphed, "default", "max", JAX's scan
    python tests/benchmarks/kernels.py --model mlp-deep --sides none default jax
    python tests/benchmarks/kernels.py --model gpt2-like -b 8 --sides default reduce-overhead

Sides are `graphed_step` by what it compiles ("none", "default", "max"), torch.compile by its mode ("reduce-overhead",
"max-autotune"), and "jax", which only trains MLPs. The model computes in bfloat16 and is trained with clipping to
norm 1, as by `python -m ampkit bench`. A line is a kernel: how often it runs in a step, microseconds per step, what it
is for. What a compiled kernel is for is read from the code that Inductor has written, which names the operations of
each kernel. JAX runs in a process of its own. Its kernels are those of its profiler's trace; if that has none, the
operations of the optimized program are counted.
"""

import argparse
import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SIDES = ("none", "default", "max", "jax")
TORCH = ("reduce-overhead", "max-autotune")  # modes of torch.compile
STEPS = 20  # that are profiled
SCAN = 96  # steps per call of lax.scan

# What a kernel is for, by names of kernels and of the operations in them. All that fit are named, in this order.
_PURPOSES: tuple[tuple[str, str], ...] = (
    ("gemm", r"gemm|nvjet|cutlass|xmma|splitk|triton_tem_|aten\.(add)?mm|aten\.bmm|\bdot\b"),
    ("loss", r"softmax|nll|cross_entropy|log_soft"),
    ("norm", r"vector_norm|lpnorm|l2norm|foreach_norm|linalg_norm"),
    ("clip", r"clamp|clip"),
    ("update", r"adam|lerp|addcdiv|addcmul|aten\.sqrt|aten\.pow|\brsqrt\b|\bsqrt\b"),
    ("bias gradient", r"aten\.sum|reduce_kernel|sum_functor|reduce_row|column_reduc"),
    ("relu", r"relu|threshold|clamp_min|aten\.le\b"),
    ("cast or copy", r"copy|convert|_to_copy|memcpy|\bcat\b|catarray|bfloat16_copy"),
    ("fill", r"fill|memset|zeros"),
)


class Kernel(NamedTuple):
    """A kernel of a step.

    Attributes:
        name: as the profiler writes it.
        count: how often it runs in a step.
        us: microseconds of all its runs in a step.
        operations: what it does, in the names of ATen or HLO; "" if only its name tells.
    """

    name: str
    count: float
    us: float
    operations: str = ""

    @property
    def purpose(self) -> str:
        return purpose(self.name, self.operations)


def purpose(name: str, operations: str = "") -> str:
    """Return what a kernel is for, by its name and its operations."""
    text = f"{name} {operations}".lower()
    return " + ".join(what for what, pattern in _PURPOSES if re.search(pattern, text)) or "elementwise"


def kernels_of(events: Iterable[tuple[str, float]], steps: int, operations: dict[str, str]) -> list[Kernel]:
    """Return the kernels of a step, those that take longest first.

    Args:
        events: name and microseconds of each run of a kernel.
        steps: how many steps they belong to.
        operations: see `inductor_operations`.
    """
    counts: Counter[str] = Counter()
    times: defaultdict[str, float] = defaultdict(float)
    for name, us in events:
        counts[name] += 1
        times[name] += us
    found = [Kernel(name, counts[name] / steps, times[name] / steps, operations.get(name, "")) for name in counts]
    return sorted(found, key=lambda kernel: -kernel.us)


def inductor_operations(source: str) -> dict[str, str]:
    """Return the operations of each kernel in a file that Inductor has written, by the name of the kernel."""
    found, operations = {}, []
    for line in source.splitlines():
        if match := re.search(r"Original ATen: \[(.*)\]", line):
            operations.append(match.group(1))
        elif match := re.match(r"(\w+) = async_compile\.triton\(", line):
            found[match.group(1)], operations = ", ".join(dict.fromkeys(", ".join(operations).split(", "))), []
        elif line.startswith(("def call", "async_compile.wait")):
            operations = []
    return found


def hlo_operations(text: str) -> Counter[str]:
    """Count the operations of the body of the loop in an optimized program of XLA, by kind; fusions with their kind.

    If there is no loop, those of the entry are counted. Operations that launch nothing are left out.
    """
    bodies: dict[str, list[str]] = {}
    name, loop, entry = "", "", ""
    for line in text.splitlines():
        if match := re.match(r"\s*(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = match.group(2)
            bodies[name] = []
            entry = name if match.group(1) else entry
        elif name:
            bodies[name].append(line)
            if match := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                loop = match.group(1)
    found: Counter[str] = Counter()
    for line in bodies.get(loop or entry, []):
        match = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = .*? ([\w\-]+)\(", line)
        if match is None or match.group(1) in _LAUNCH_NOTHING:
            continue
        kind = re.search(r'custom_call_target="([^"]+)"|kind=(\w+)', line)
        called = f" {next(part for part in kind.groups() if part)}" if kind else ""
        found[match.group(1) + called] += 1
    return found


_LAUNCH_NOTHING = frozenset(
    ("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "call", "opt-barrier", "after-all")
)


def trace_events(trace: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and microseconds of each kernel on a GPU in a trace of JAX's profiler, in Chrome's format."""
    events = trace.get("traceEvents", [])
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "GPU" in str(event.get("args", {}).get("name"))
    }
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and "Stream" in str(event.get("args", {}).get("name"))
    }
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices and (event["pid"], event["tid"]) in streams:
            yield event["name"], float(event.get("dur", 0.0))


def show(title: str, kernels: list[Kernel]) -> None:
    """Print a table of kernels, and what each purpose takes."""
    print(f"\n{title}: {sum(k.count for k in kernels):.1f} kernels, {sum(k.us for k in kernels):.1f} us per step")
    for kernel in kernels:
        print(f"  {kernel.count:5.1f} x {kernel.us:7.2f} us  {kernel.purpose:34.34}  {kernel.name:60.60}")
        if kernel.operations:
            print(f"  {'':20}  {kernel.operations:.140}")
    purposes: Counter[str] = Counter()
    for kernel in kernels:
        purposes[kernel.purpose] += kernel.count  # type: ignore[assignment]  # a Counter of fractions
    print("  " + ", ".join(f"{count:.1f} {what}" for what, count in purposes.most_common()), flush=True)


# -------------------------------------------------------------------------------------------------------------- ampkit


def ours(model: str, batch: int, compile: str | None) -> None:
    """Profile replays of a graphed step, and print its kernels. Of a step in a scan, the time too."""
    import torch

    import ampkit

    case, batches = on_device(model, batch)
    net = case.model.cuda()
    optimizer = case.optimizer(net.parameters(), fused=True)
    step = ampkit.graphed_step(case.loss_fn, net, optimizer, policy="bfloat16", max_norm=1.0, compile=compile)
    start = time.perf_counter()
    for i in range(80):
        step(*batches[i % len(batches)])
    torch.cuda.synchronize()
    set_up = time.perf_counter() - start
    assert step.captures == 1, step.report()
    profile_and_show(
        f"graphed_step(compile={compile!r}), set up in {set_up:.1f} s", lambda i: step(*batches[i % len(batches)])
    )
    if case.widths:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stacked = tuple(torch.stack([batches[i % len(batches)][part] for i in range(SCAN)]) for part in range(2))
        for _ in range(4):
            step.scan(*stacked)
        begin.record()
        for _ in range(10):
            step.scan(*stacked)
        end.record()
        end.synchronize()
        print(f"  scan of {SCAN}: {begin.elapsed_time(end) * 1e3 / (10 * SCAN):.1f} us per step", flush=True)
    step.close()


def torchs(model: str, batch: int, mode: str) -> None:
    """Profile steps written with torch.amp and torch.compile, as the bench has them, and print their kernels."""
    import torch

    from ampkit._commands.bench.variants import VARIANTS, Setting
    from ampkit._precision.policy import Policy

    case, batches = on_device(model, batch)
    setting = Setting(Policy.parse("bfloat16"), torch.device("cuda", 0), "device")
    step = VARIANTS[mode].build(dataclasses.replace(case, batches=batches), setting).step
    assert step is not None
    for i in range(20):
        step(*batches[i % len(batches)])
    profile_and_show(f"torch.compile(mode={mode!r})", lambda i: step(*batches[i % len(batches)]))


def on_device(model: str, batch: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the case of the bench, and its batches on the device."""
    from ampkit._commands.bench.cases import CASES

    case = CASES[model](batch, seed=0, count=4)
    return case, [tuple(part.cuda() for part in given) for given in case.batches]


def profile_and_show(title: str, step: Callable[[int], object]) -> None:
    """Profile `STEPS` steps and print their kernels, with the time of a step without the profiler."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(STEPS):
        step(i)
    end.record()
    end.synchronize()
    title += f", {begin.elapsed_time(end) / STEPS:.3f} ms per step"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for i in range(STEPS):
            step(i)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type.name == "CUDA" and not e.is_user_annotation]
    spans = [(event.name, event.time_range.elapsed_us()) for event in events]
    show(title, kernels_of(spans, STEPS, written_by_inductor()))


def written_by_inductor() -> dict[str, str]:
    """Return the operations of all kernels that Inductor has written in this process."""
    codecache = sys.modules.get("torch._inductor.codecache")
    found: dict[str, str] = {}
    for module in getattr(getattr(codecache, "PyCodeCache", None), "modules", []):
        source = Path(str(getattr(module, "__file__", "")))
        for name, operations in inductor_operations(source.read_text() if source.is_file() else "").items():
            known = found.get(name, "")
            found[name] = operations if operations in known or not known else f"{known}; {operations}"
    return found


# ----------------------------------------------------------------------------------------------------------------- JAX


def jaxs(model: str, batch: int) -> None:
    """Start the process with JAX, and print what it has found."""
    import beside_jax
    import jax_worker
    import torch

    from ampkit._commands.bench.cases import CASES
    from ampkit._precision.policy import Policy

    if not beside_jax.has_jax():
        print("\nJAX: jax, optax or numpy is not installed")
        return
    case = CASES[model](batch, seed=0, count=4)
    given = {**beside_jax.options(case, Policy.parse("bfloat16")), "schedule": 10_000}
    given |= {"max_norm": 1.0, "batches": 4, "steps_per_call": SCAN, "on_device": True}
    with tempfile.TemporaryDirectory(prefix="ampkit-kernels-") as folder:
        Path(folder, jax_worker.GIVEN).write_text(json.dumps(given))
        beside_jax.save_arrays(case, Path(folder, jax_worker.ARRAYS))
        command = [sys.executable, __file__, "--jax-in", folder, "--worker", str(jax_worker.__file__)]
        environment = beside_jax.environment(torch.device("cuda", 0))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            print(f"\nJAX failed:\n{done.stderr[-2000:]}")
            return
        found = json.loads(Path(folder, "kernels.json").read_text())
    print(f"\nJAX, lax.scan of {SCAN}: {found['us']:.1f} us per step")
    if found["events"]:
        operations: dict[str, str] = found["operations"]
        show("JAX, by its profiler", kernels_of(map(tuple, found["events"]), found["steps"], operations))
    else:
        print(f"  its profiler has written no kernels ({found['problem']})")
    counts = Counter(found["hlo"])
    print(f"  the body of the loop in the optimized program: {sum(counts.values())} operations, of which")
    print("  " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()), flush=True)


def in_jax(folder: Path, worker: str) -> None:
    """Compile the scan, time it and trace it; write what was found to the folder. Without torch."""
    import runpy

    import jax
    import numpy

    names = runpy.run_path(worker)
    given = json.loads((folder / names["GIVEN"]).read_text())
    with numpy.load(folder / names["ARRAYS"]) as arrays:
        training = names["Training"](given, dict(arrays))
    text = training._scan.lower(training._carry, training._stacked(SCAN)).compile().as_text()
    training.run(2 * SCAN)
    us = min(training.seconds(10 * SCAN) for _ in range(5)) / (10 * SCAN) * 1e6
    events, problem = [], ""
    try:
        with jax.profiler.trace(str(folder / "trace")):
            training.run(SCAN)
        for path in (folder / "trace").rglob("*.trace.json.gz"):
            events += trace_events(json.loads(gzip.decompress(path.read_bytes())))
    except Exception as error:  # what it needs differs from one JAX to the next; the program is counted anyway
        problem = f"{type(error).__name__}: {error}"
    found = {"us": us, "events": events, "problem": problem, "steps": SCAN, "hlo": hlo_operations(text)}
    (folder / "kernels.json").write_text(json.dumps({**found, "operations": hlo_fusions(text)}))


def hlo_fusions(text: str) -> dict[str, str]:
    """Return the operations inside of each fusion of a program of XLA, by the name that its kernel has."""
    insides: dict[str, str] = {}
    name, operations = "", []
    for line in text.splitlines():
        if match := re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name, operations = match.group(1), []
        elif name and line.strip() == "}":
            insides[name] = ", ".join(dict.fromkeys(operations))
        elif match := re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = .*? ([\w\-]+)\(", line):
            operations += [match.group(1)] if match.group(1) not in _LAUNCH_NOTHING else []
    pairs = re.findall(r"%?([\w.\-]+) = [^\n]*? fusion\([^\n]*calls=%?([\w.\-]+)", text)
    return {re.sub(r"[.\-]", "_", fusion): insides.get(called, "") for fusion, called in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp-tiny", help="one that the bench has; default: mlp-tiny")
    parser.add_argument("-b", "--batch", type=int, help="default: the bench's")
    parser.add_argument("--sides", nargs="+", choices=SIDES + TORCH, default=SIDES)
    parser.add_argument("--jax-in", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jax_in:
        in_jax(Path(args.jax_in), args.worker)
        return
    import torch

    from ampkit._commands.bench.cases import BATCH, BATCHES, CASES
    from ampkit._commands.bench.process import fast_kernels

    if args.model not in CASES:
        parser.error(f"--model: expected one of {', '.join(CASES)}, got {args.model}")
    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ.setdefault("TORCHINDUCTOR_MAX_AUTOTUNE_REPORT_CHOICES_STATS", "0")
    batch = args.batch or BATCHES.get(args.model, BATCH)
    for side in args.sides:
        try:
            with fast_kernels(torch.device("cuda")):
                if side == "jax":
                    jaxs(args.model, batch)
                elif side in TORCH:
                    torchs(args.model, batch, side)
                else:
                    ours(args.model, batch, None if side == "none" else side)
        except Exception as error:  # the other sides are printed
            print(f"\n{side}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
