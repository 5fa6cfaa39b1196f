"""Weights and optimizer state in bfloat16: bytes per parameter, milliseconds of an update, and graphs beside eager.

    python tests/benchmarks/optimizer_states.py                        on a GPU: 300M parameters in 148 tensors, < 60 s
    python tests/benchmarks/optimizer_states.py --compile --forms "stochastic rounding"    the same by Inductor, too
    python tests/benchmarks/optimizer_states.py --forms "torchao, 8-bit states"            a minute or more each
    python tests/benchmarks/optimizer_states.py --device cpu --tiny    does it run, and are the bits those of eager

An update is one graph in which AdamW steps all parameters. "foreach" is the update without `compile=`, "Inductor" that
of `compile="default"`. Both are measured beside torch's fused AdamW on float32. The bytes are those of weights,
gradients and state, as `ampkit.debug.forecast` says and as the allocator has them. torchao compiles the updates of its
optimizers itself, for each shape twice; on a CPU, TORCHDYNAMO_DISABLE=1 prevents that.
"""

import argparse
import gc
import importlib
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ampkit
from ampkit._optimizer.param_groups import CapturableGroups
from ampkit._optimizer.update.compiled_update import CompiledUpdate
from ampkit._optimizer.update.state_form import StateForm, set_state_form
from ampkit._step.compile.compiled import INDUCTOR_OPTIONS
from ampkit._torch.compile import Compiler
from ampkit._torch.tensors.tensors import inner_tensors


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


def update_ms(form: Form, args: argparse.Namespace, *, compiled: bool) -> float:
    """Return the milliseconds of an update, in a graph on a GPU."""
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
    return timed(replayed(update) if args.device == "cuda" else update, args.repeats, args.device)


def replayed(update: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return graph.replay


def timed(call: Callable[[], object], repeats: int, device: str) -> float:
    """Return the median of the milliseconds that calls take."""
    found = []
    call()
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found)


def same_bits(form: Form, args: argparse.Namespace, compile: str | None) -> bool:
    """Return whether ten steps of a small model leave the bits of eager steps in weights, state and random numbers."""
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
        assert graph == "off" or step.report().outcome == "whole"
        step.close()
    return all(map(torch.equal, *after))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="fewer parameters")
    parser.add_argument("--compile", action="store_true", help="measure compiled updates, too, which takes minutes")
    parser.add_argument("--repeats", type=int, default=20)
    own = [name for name, form in FORMS.items() if not form.torchao]
    parser.add_argument("--forms", nargs="+", default=own, choices=FORMS, metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    args = parser.parse_args()
    args.blocks, args.width, args.tokens = (1, 16, 50) if args.tiny else (12, 1280, 50304)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore", UserWarning)  # Inductor's own
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}")
    kinds = {"foreach": None, "Inductor": "default"} if args.compile else {"foreach": None}
    fused = update_ms(FORMS["float32"], args, compiled=False)
    print(f"fused AdamW of torch, float32: {fused:.3f} ms")
    for name in args.forms:
        form = FORMS[name]
        row: dict[str, Any] = {"form": name}
        row["forecast B/param"] = round(forecast_bytes(form, args), 3)
        row["measured B/param"] = round(measured_bytes(form, args), 3)
        for kind, compile in list(kinds.items())[: 1 if form.torchao else None]:
            row[f"{kind} ms"] = round(update_ms(form, args, compiled=compile is not None), 3)
            row[f"{kind} / fused"] = round(row[f"{kind} ms"] / fused, 2)
            row[f"{kind} bits"] = "same" if same_bits(form, args, compile) else "DIFFER"
        print(json.dumps(row) if args.json else "  ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
    if args.device == "cuda":
        print(f"peak of all: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
