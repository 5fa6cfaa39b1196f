"""Weights and optimizer state in bfloat16: bytes per parameter, milliseconds of an update, and graphs beside eager.

    PYTHONPATH=. python tests/benchmarks/optimizer_states.py --compile    on a GPU: 300M parameters in 148 tensors
    PYTHONPATH=. python tests/benchmarks/optimizer_states.py --forms kahan "torchao, 8-bit states"
    PYTHONPATH=. python tests/benchmarks/optimizer_states.py --device cpu --tiny      does it run, and are bits equal

An update is one graph in which AdamW steps all parameters. "foreach" is the update without `compile=`, "Inductor" that
of `compile="default"`. Each is the median of repeats, in turns with torch's fused AdamW on float32. The bytes are those
of weights, gradients and state, as `ampkit.debug.forecast` says and as the allocator has them. torchao compiles the
updates of its optimizers itself, for each shape twice; on a CPU, TORCHDYNAMO_DISABLE=1 prevents that. On a GPU each
form has a process of its own: all are set up at once, and measured one after the other, while the others wait.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from processes import Answer, or_error, remote, serve
from torch import Tensor, nn

import ampkit
from ampkit._optimizer.param_groups import CapturableGroups
from ampkit._optimizer.update.compiled_update import CompiledUpdate
from ampkit._optimizer.update.state_form import StateForm, set_state_form
from ampkit._step.compile.compiled import INDUCTOR_OPTIONS
from ampkit._torch.compile import Compiler
from ampkit._torch.tensors.tensors import inner_tensors
from tests.benchmarks.models import repeatable


class Form(NamedTuple):
    """A form of weights and state."""

    params: str
    rounding: str | None = None
    moments: str | None = None
    torchao: str = ""  # the class of torchao.optim, whose update is compiled anyway

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.params == "bfloat16" else torch.float32

    @property
    def policy(self) -> ampkit.Policy:
        return ampkit.Policy(params=self.params, compute="bfloat16", rounding=self.rounding)

    @property
    def state(self) -> StateForm | None:
        has_none = self.torchao or self == FORMS["float32"]
        return None if has_none else StateForm(self.moments is not None, self.rounding)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW of this form."""
        options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
        if not self.torchao:
            return torch.optim.AdamW(model.parameters(), fused=True, **options)
        made: torch.optim.Optimizer = getattr(importlib.import_module("torchao.optim"), self.torchao)(
            model.parameters(), bf16_stochastic_round=self.params == "bfloat16", **options
        )
        return made


FORMS = {
    "float32": Form("float32"),
    "moments in bfloat16": Form("float32", moments="bfloat16"),
    "stochastic rounding": Form("bfloat16", "stochastic", "bfloat16"),
    "kahan": Form("bfloat16", "kahan", "bfloat16"),
    "torchao, stochastic rounding": Form("bfloat16", torchao="_AdamW"),
    "torchao, 8-bit states": Form("float32", torchao="AdamW8bit"),
    "torchao, 8-bit states, stochastic rounding": Form("bfloat16", torchao="AdamW8bit"),
    "torchao, 4-bit states": Form("float32", torchao="AdamW4bit"),
    "torchao, float8 states": Form("float32", torchao="AdamWFp8"),
}


class Weights(nn.Module):
    """The parameters of a GPT, with 12 blocks 148 tensors. Its loss computes little, and all weights have gradients."""

    def __init__(self, blocks: int, width: int, tokens: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        block = [(3 * width, width), (3 * width,), (width, width), (width,)]
        block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), *[(width,)] * 4]
        shapes = [(tokens, width), (1024, width), *block * blocks, (width,), (width,)]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, device=device, dtype=dtype).mul_(0.02)) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(weight * (x + weight)).sum(dtype=torch.float32) for weight in self.weights]).sum()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def prepared(form: Form, args: argparse.Namespace) -> tuple[Weights, torch.optim.Optimizer]:
    """Return parameters with gradients, and an optimizer that has made its state."""
    model = Weights(args.blocks, args.width, args.tokens, args.device, form.dtype)
    optimizer = form.optimizer(model)
    set_state_form(optimizer, form.state)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    ampkit.GradScaler(args.device, enabled=False).step(optimizer)
    return model, optimizer


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that have the bits of the state."""

    def plain(tensor: Tensor) -> list[Tensor]:
        inner = inner_tensors(tensor)
        return [each for part in inner.values() for each in plain(part)] if inner else [tensor]

    return [each for kept in optimizer.state.values() for value in kept.values() for each in plain(value)]


def measured_bytes(form: Form, args: argparse.Namespace) -> float:
    """Return the bytes per parameter that the allocator has, or those of the tensors on a CPU."""
    on_cuda = args.device == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    model, optimizer = prepared(form, args)
    gc.collect()
    if on_cuda:
        held = torch.cuda.memory_allocated() - before
    else:
        held = sum(t.nbytes for p in model.parameters() for t in (p, p.grad) if t is not None)
        held += sum(tensor.nbytes for tensor in state_of(optimizer))
    return held / sum(param.numel() for param in model.parameters())


def forecast_bytes(form: Form, args: argparse.Namespace) -> float:
    """Return the bytes per parameter that a forecast has behind a step."""
    with torch.device("meta"):
        model = Weights(args.blocks, args.width, args.tokens, "meta", form.dtype)
    x = torch.zeros((), dtype=form.dtype)
    options: dict[str, Any] = {"policy": form.policy, "moments": form.moments, "device": args.device, "steps": 1}
    profile = ampkit.debug.forecast(loss_fn, model, form.optimizer(model), (x,), **options)
    held = sum(profile.series[category][-1] for category in ("parameter", "gradient", "optimizer state"))
    return held / sum(param.numel() for param in model.parameters())


def update_of(form: Form, args: argparse.Namespace, *, compiled: bool) -> Callable[[], None]:
    """Return an update, which is a graph on a GPU."""
    _, optimizer = prepared(form, args)
    scaler = ampkit.GradScaler(args.device, enabled=False)
    groups = CapturableGroups(optimizer, torch.device(args.device))
    groups.refresh()

    def update() -> None:
        with groups.applied():
            scaler.step(optimizer)

    if compiled:
        code = CompiledUpdate(optimizer, scaler, groups, None, Compiler(INDUCTOR_OPTIONS["default"]))
        found = code.prepared({})
        assert found is not None  # the optimizer has its state

        def update() -> None:
            code.run(found)

    update()
    return replayed(update) if args.device == "cuda" else update


def replayed(update: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a graph. It keeps `update`, whose tensors the graph writes to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return partial(_replay, graph, update)


def _replay(graph: torch.cuda.CUDAGraph, _: Callable[[], None]) -> None:
    graph.replay()


def in_turns(calls: dict[str, Callable[[], None]], repeats: int, device: str) -> dict[str, list[float]]:
    """Return the milliseconds that calls take."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            found[name].append(1000 * (time.perf_counter() - start))
    return {name: times[1:] for name, times in found.items()}


def bits(form: Form, args: argparse.Namespace, compile: str | None) -> str:
    """Return in a word whether ten steps of a small model leave the bits of eager ones: weights, state, random numbers.

    It says what became of the graph, if that did not take the whole step.
    """
    after = []
    for graph in ("off", "auto" if args.device == "cuda" else "emulate"):
        torch.manual_seed(0)
        model = Weights(1, 32, 100, args.device, form.dtype)
        optimizer = form.optimizer(model)
        step = ampkit.graphed_step(
            loss_fn,
            model,
            optimizer,
            policy=form.policy,
            moments=form.moments,
            max_norm=1.0,
            compile=compile,
            graph=graph,
            on_failure="parts" if form.torchao else "raise",  # steps of torchao's are watched before they are captured
        )
        for i in range(10):
            step(torch.tensor(i / 10, dtype=form.dtype, device=args.device))
        tensors = [*model.parameters(), *state_of(optimizer)]
        random = torch.cuda.get_rng_state() if args.device == "cuda" else torch.get_rng_state()
        after.append([*(tensor.detach().clone() for tensor in tensors), random])
        outcome = step.report().outcome
        step.close()
    if outcome != "whole":
        return outcome
    return "same" if all(map(torch.equal, *after)) else "DIFFER"


def row(name: str, args: argparse.Namespace) -> Iterator[Answer]:
    """Set a form up, and yield; measure it, and yield the row."""
    form, kinds = FORMS[name], {"foreach": None, "Inductor": "default"}
    if not args.compile or form.torchao:
        del kinds["Inductor"]
    found: Answer = {"form": name}
    found["forecast B/param"] = round(forecast_bytes(form, args), 3)
    found["measured B/param"] = round(measured_bytes(form, args), 3)
    updates = {"fused float32": update_of(FORMS["float32"], args, compiled=False)}
    for kind, compile in kinds.items():
        updates[kind] = update_of(form, args, compiled=compile is not None)
        with repeatable(strict=True):
            found[f"{kind} bits"] = bits(form, args, compile)
    yield {"ready": True}
    times = in_turns(updates, args.repeats, args.device)
    for kind, own in times.items():
        found[f"{kind} ms"] = [round(of(own), 3) for of in (statistics.median, min, max)]
        if kind in kinds:
            quotients = [ours / fused for ours, fused in zip(own, times["fused float32"], strict=True)]
            found[f"{kind} / fused"] = round(statistics.median(quotients), 3)
    yield found


def rows(args: argparse.Namespace) -> Iterator[Answer]:
    """Set all forms up at once, and yield the row of one after the other."""
    if args.device == "cpu":
        for name in args.forms:
            yield [{"form": name} | answer for answer in or_error(row(name, args))][-1]
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    threads = max(1, (os.cpu_count() or 1) // len(args.forms))
    runs = [remote([*command, name], threads=threads, seconds=args.seconds) for name in args.forms]
    try:
        for name, run, first in zip(args.forms, runs, ThreadPoolExecutor(len(runs)).map(next, runs), strict=True):
            yield {"form": name} | (first if "error" in first else next(run))
    finally:
        for run in runs:
            run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="fewer parameters")
    parser.add_argument("--compile", action="store_true", help="measure compiled updates, too, which takes minutes")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=FORMS, metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--seconds", type=float, default=400, help="a form that is not set up by then is left out")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--worker", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.blocks, args.width, args.tokens = (1, 16, 50) if args.tiny else (12, 1280, 50304)
    warnings.simplefilter("ignore", UserWarning)  # Inductor's own
    if args.worker:
        serve(row(args.worker, args))
        return
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}")
    for found in rows(args):
        text = json.dumps(found) if args.json else "  ".join(f"{key}: {value}" for key, value in found.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
