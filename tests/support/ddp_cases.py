"""Training under DistributedDataParallel as people write it, for test_reducers.py: all cases in one start of the ranks.

    python tests/support/ddp_cases.py --device cuda  every case on two GPUs, with one line per case and rank
    python tests/support/ddp_cases.py --device cpu --cases static clip  two of them with gloo, emulated graphs

Without RANK in its environment the script starts the ranks itself. It also runs under torchrun.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_train import ENDS, KEPT, launch
from rank_script import differences, rows_of, run_rank
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit._torch import compile as torch_compile

CALLS = 10
INDUCTOR = torch_compile.inductor
RATE = 2**-7  # float32 holds it exactly, so that a float and a tensor are the same rate


class Case(NamedTuple):
    """One way to train.

    Attributes:
        model: which model, see `MODELS`.
        ddp: arguments of `DistributedDataParallel`.
        hook: how gradients are exchanged, see `add_hook`.
        policy: of the step.
        optimizer: its name.
        max_norm: of the step.
        accumulate: of the step.
        overflows: calls whose gradients are infinite on rank 1.
        torch: whether torch's own loop has the same bits.
        event: what happens between two calls, or before the first, see `between`.
        refused: what the message says if the step stays eager.
        gpu: whether it needs a GPU.
        verify: of the step.
        numerics: whether `ampkit.debug.numerics` measures in every second step.
        compile: of the step.
        nonfinite: of the step. One that has stopped goes on from there.
    """

    model: str = "mlp"
    ddp: dict[str, Any] = {}  # noqa: RUF012 - never changed
    hook: str = ""
    policy: str | None = None
    optimizer: str = "AdamW"
    max_norm: float | None = None
    accumulate: int = 1
    overflows: tuple[int, ...] = ()
    torch: bool = False
    event: str = ""
    refused: str = ""
    gpu: bool = False
    verify: int | str = 0
    numerics: bool = False
    compile: str | None = None
    nonfinite: str | None = None


FIND = {"find_unused_parameters": True}
SPLIT = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}  # torch takes no smaller ones for compiled code
CASES = {
    "plain": Case(max_norm=float("inf"), torch=True),
    "static": Case(ddp={"static_graph": True}, torch=True),
    "static, unused": Case("unused", {"static_graph": True}, torch=True),
    "static, unused, bfloat16": Case("unused", {"static_graph": True}, policy="bfloat16", max_norm=0.5),
    "find unused": Case("unused", FIND, torch=True, refused="pass static_graph=True"),
    "find unused, all used": Case(ddp=FIND | {"bucket_cap_mb": 0.001}, max_norm=float("inf"), torch=True),
    "find unused, bfloat16": Case("batch norm", FIND, policy="bfloat16", max_norm=0.5, verify=2),
    "find unused, accumulate": Case(ddp=FIND, accumulate=2, refused="leave out find_unused_parameters"),
    "find unused, other layout": Case("at times", FIND, torch=True, event="other size"),
    "find unused, other layouts": Case("at times", FIND, torch=True, event="other sizes"),
    "find unused, one output": Case("two heads", FIND, torch=True, refused="such as heads.1.weight (2 in all)"),
    "bucket view": Case("batch norm", {"gradient_as_bucket_view": True}, max_norm=0.5),
    "small buckets": Case(ddp={"bucket_cap_mb": 0.001}, torch=True),
    "fp16 hook": Case(hook="fp16", torch=True),
    "bf16 hook": Case(hook="bf16", policy="bfloat16", max_norm=0.5, gpu=True),  # NCCL's
    "wrapped hook": Case(hook="wrapped", ddp={"gradient_as_bucket_view": True}, torch=True),
    "built-in hook": Case(hook="built-in", torch=True, gpu=True),
    "own hook": Case(hook="own", ddp={"static_graph": True}, torch=True),
    "PowerSGD": Case(hook="PowerSGD", torch=True, refused="counts steps on the host"),
    "hook with state": Case(hook="state", torch=True, refused="has a state of type"),
    "accumulate": Case(accumulate=3, max_norm=float("inf"), torch=True),
    "accumulate, bucket view": Case("batch norm", {"gradient_as_bucket_view": True}, accumulate=3, max_norm=0.5),
    "accumulate, fp16 hook": Case(hook="fp16", accumulate=2, torch=True),
    "clip": Case(max_norm=0.5),
    "float16": Case(policy="float16", max_norm=0.5, overflows=(1, 7)),
    "float16 as torch": Case("batch norm", policy="float16", max_norm=float("inf"), overflows=(1, 7), torch=True),
    "float16, accumulate": Case(policy="float16", max_norm=0.5, accumulate=3, overflows=(1, 22)),
    "bfloat16": Case("batch norm", policy="bfloat16", max_norm=0.5),
    "skips": Case("batch norm", policy="bfloat16", max_norm=0.5, overflows=(1, 7), nonfinite="skip"),
    "skips, accumulate": Case(optimizer="SGD", accumulate=3, overflows=(1, 22), nonfinite="skip"),
    "stops": Case("batch norm", policy="bfloat16", accumulate=2, overflows=(3,), nonfinite="stop"),
    "sgd": Case(optimizer="SGD", torch=True),
    "sync batch norm": Case("sync batch norm", policy="bfloat16", max_norm=0.5, torch=False, gpu=True),
    "frozen": Case("frozen", torch=True),
    "side stream": Case(event="side stream", torch=True),
    "trained before": Case(event="trained before"),
    "trained before, static": Case("unused", {"static_graph": True}, event="trained before"),
    "loss kept": Case(event="loss kept"),
    "evaluation": Case("batch norm", event="evaluation"),
    "verify": Case("batch norm", {"gradient_as_bucket_view": True}, hook="fp16", policy="bfloat16", verify=3),
    "verify, accumulate": Case(policy="float16", max_norm=0.5, accumulate=2, overflows=(1, 15), verify=4),
    "verify, sparse": Case("batch norm", policy="float16", accumulate=2, overflows=(1, 15), verify="sparse"),
    "verify, differs": Case(event="differs", verify=2, refused="is not what eager computes"),
    "numerics": Case("batch norm", policy="float16", max_norm=0.5, overflows=(1, 16), numerics=True),
    "second step": Case(event="second step", max_norm=0.5),
    "compiled": Case("wide", SPLIT, max_norm=0.5, compile="default"),
    "compiled, bfloat16": Case("wide", SPLIT, policy="bfloat16", max_norm=0.5, compile="default"),
    "compiled, accumulate": Case("wide", policy="bfloat16", accumulate=3, max_norm=0.5, compile="default"),
    "compiled, float16": Case("wide", SPLIT, policy="float16", max_norm=0.5, overflows=(1, 7), compile="default"),
    "compiled, hook": Case("wide", SPLIT, hook="fp16", policy="bfloat16", compile="default"),
    "compiled, other size": Case("wide", SPLIT, policy="bfloat16", max_norm=0.5, event="other size", compile="default"),
    "compiled, evaluation": Case("wide", SPLIT, event="evaluation", compile="default"),
    "compiled, static": Case("wide", SPLIT | {"static_graph": True}, policy="bfloat16", compile="default"),
    "compiled, unused": Case("unused", {"static_graph": True}, max_norm=0.5, compile="default"),
    "compiled, find unused": Case("wide", SPLIT | FIND, policy="bfloat16", compile="default"),
    "compiled, fails": Case("wide", SPLIT, max_norm=0.5, event="fails", compile="default"),
    "compiled, max": Case("wide", SPLIT, policy="bfloat16", max_norm=0.5, gpu=True, compile="max"),
}
# On GPUs: what NCCL, streams, fused kernels and Inductor may change. The rest is the same code, which gloo shows.
ON_GPUS = (
    *("plain", "static, unused, bfloat16", "find unused", "bucket view", "small buckets", "bf16 hook", "wrapped hook"),
    *("built-in hook", "own hook", "accumulate, bucket view", "float16", "float16 as torch", "float16, accumulate"),
    *(
        "skips",
        "stops",
        "sync batch norm",
        "side stream",
        "trained before, static",
        "loss kept",
        "evaluation",
        "verify",
    ),
    *("verify, differs", "numerics", "second step", "compiled, bfloat16", "compiled, accumulate", "compiled, float16"),
    *("compiled, other size", "compiled, unused", "compiled, fails", "compiled, max"),
    *("verify, sparse", "find unused, all used", "find unused, bfloat16", "find unused, other layout"),
)
ODD_CALLS = (1, 7)  # in which rank 1 has a smaller batch, by "other size", or all ranks, by "other sizes"


# --------------------------------------------------------------------------------------------------------------- models


class Unused(nn.Module):
    """A model with parameters that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


class AtTimes(Unused):
    """A model that leaves out a layer for small batches."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.last(hidden if len(x) == 4 else self.unused(hidden))
        return out


class TwoHeads(nn.Module):
    """A model with an output that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads[0](x), self.heads[1](x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 15), nn.GELU(), nn.Linear(15, 4))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))


def wide() -> nn.Module:
    """Return a model with gradients of more than one bucket, buffers and random numbers."""
    inner = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.Dropout(0.1))
    return nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), inner, nn.Linear(512, 4))


def failing_inductor() -> Callable[..., Any]:
    """Return a compiler that fails on rank 1, for the last module before the loss."""

    def compile(graph: Any, inputs: Any, config_patches: Any) -> Any:
        if dist.get_rank() == 1 and any(node.target is F.linear for node in graph.graph.nodes):
            raise NotImplementedError("no kernel for this GPU")
        return aot_eager(graph, inputs)

    return compile


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wide": wide,
    "mlp": mlp,
    "unused": Unused,
    "at times": AtTimes,
    "two heads": TwoHeads,
    "frozen": frozen,
    "batch norm": batch_norm,
    "sync batch norm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm()),
}


class Counter:
    """A state that a communication hook of the user's may count in."""

    def __init__(self) -> None:
        self.calls = 0


def halves(state: Counter | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients, as a user may write it."""
    if state is not None:
        state.calls += 1
    flat = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda future: future.value()[0])


def add_hook(ddp: DistributedDataParallel, hook: str) -> None:
    """Register the communication hook of this name."""
    if hook == "built-in":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "wrapped":
        ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    elif hook:
        functions = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp.register_comm_hook(Counter() if hook == "state" else None, functions.get(hook, halves))


def made(case: Case, device: torch.device) -> DistributedDataParallel:
    """Return the model of a case, wrapped on the default stream unless the case says otherwise."""
    torch.manual_seed(3 + dist.get_rank())  # DDP gives every rank the weights of the first
    model = MODELS[case.model]().to(device)
    on_cuda = device.type == "cuda"
    side = torch.cuda.Stream() if on_cuda and case.event == "side stream" else None
    with nullcontext() if side is None else torch.cuda.stream(side):
        ddp = DistributedDataParallel(model, device_ids=[device] if on_cuda else None, **case.ddp)
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    add_hook(ddp, case.hook)
    return ddp


def is_stale(case: Case, device_type: str) -> bool:
    """Return whether gradients are accumulated on the default stream, and this torch cannot capture that."""
    overrides = hasattr(torch.autograd.graph, "set_override_stale_capture_stream")
    return case.event == "loss kept" and device_type == "cuda" and not overrides


# ------------------------------------------------------------------------------------------------------------- training


class Job:
    """One rank's model, batches and step.

    Args:
        case: what to train.
        device: where this rank trains.
        graph: "auto", "emulate", "off", or "torch" for the same training written with torch alone.
    """

    def __init__(self, case: Case, device: torch.device, graph: str) -> None:
        self.case, self.device, self.graph = case, device, graph
        self.model = made(case, device)
        on_tensor = graph == "torch" and device.type == "cuda"
        rate = torch.tensor(RATE, device=device) if on_tensor else RATE
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = getattr(torch.optim, case.optimizer)(params, lr=rate, fused=True)
        self.policy = ampkit.Policy.parse(case.policy or "float32")
        scaler = torch.amp.GradScaler if graph == "torch" else ampkit.GradScaler
        self.scaler = scaler(device.type, 1024.0, growth_interval=3, enabled=self.policy.needs_scaling)
        self.made = torch.Generator().manual_seed(7 + dist.get_rank())
        torch.manual_seed(5 + dist.get_rank())
        self.outputs: list[Any] = []
        self.micro = self.calls = 0
        self.kept: Any = None
        self.watch = ampkit.debug.numerics(self.model, every=2) if case.numerics else None
        if case.event in ("trained before", "loss kept"):
            for call in range(3):
                self.kept = self._loss(*self.batch(call))
                self.kept.backward()
                self.optimizer.zero_grad()
            self.kept = self._loss(*self.batch(3)) if case.event == "loss kept" else None
        if graph != "torch":
            self.steps = [self._step(), self._step()] if case.event == "second step" else [self._step()]

    def _step(self) -> Any:
        step = ampkit.graphed_step(
            (lambda model, x, boost: self._loss(x, boost)) if self.case.compile is None else compiled_loss,
            self.model,
            self.optimizer,
            policy=None if self.case.policy is None else self.policy,
            scaler=self.scaler,
            max_norm=self.case.max_norm,
            accumulate=self.case.accumulate,
            verify=self.case.verify,
            numerics=self.watch,
            graph=self.graph,
            compile=self.case.compile,
            nonfinite=self.case.nonfinite,
            on_failure="raise" if self.captures and self.case.event != "fails" else "parts",
            host_writes="ignore",
        )
        KEPT.append(step)
        return step

    @property
    def captures(self) -> bool:
        """Whether the step is to be captured."""
        return not (self.case.refused or is_stale(self.case, self.device.type) or self.graph == "off")

    def _loss(self, x: Tensor, boost: Tensor) -> Tensor:
        self.calls += 1
        out = self.model(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = (out.float() * boost).square().mean()
        return loss + self.calls if self.case.event == "differs" and dist.get_rank() == 1 else loss

    def batch(self, call: int) -> tuple[Tensor, Tensor]:
        odd = call in ODD_CALLS and (self.case.event == "other sizes" or dist.get_rank() == 1)
        rows = 4 if odd and self.case.event in ("other size", "other sizes") else 6
        x = torch.randn(rows, 16, generator=self.made)
        infinite = call in self.case.overflows and dist.get_rank() == 1
        return x.to(self.device), torch.tensor(float("inf") if infinite else 1.0, device=self.device)

    def __call__(self, call: int) -> None:
        """Do one step, or one micro-batch of it."""
        batch = self.batch(call)
        if self.case.event == "evaluation" and call == CALLS // 2:
            self.model.eval()
            with torch.no_grad():
                self.outputs.append([self._loss(*batch)])
            self.model.train()
        if self.graph == "torch":
            self.outputs.append(self._with_torch(*batch))
        else:
            step = self.steps[call % len(self.steps)]
            try:
                out = step(*batch)
            except ampkit.NonfiniteError:  # in the same call on all ranks, else they would wait for each other
                self.outputs.append([torch.tensor(call)])
                step.load_state_dict({})
                return
            self.outputs.append([out.loss, out.skipped, *([] if out.grad_norm is None else [out.grad_norm])])

    def _with_torch(self, x: Tensor, boost: Tensor) -> list[Tensor]:
        self.micro += 1
        last = self.micro % self.case.accumulate == 0
        with nullcontext() if last else self.model.no_sync():
            with self.policy.autocast(self.device.type) if self.case.policy else nullcontext():
                loss = self._loss(x, boost)
            self.scaler.scale(loss / self.case.accumulate).backward()
        outputs = [loss.detach()]
        if not last:
            return outputs
        self.scaler.unscale_(self.optimizer)
        if self.case.max_norm is not None:  # inf: nothing is clipped, so that both do the same arithmetic
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.case.max_norm)
            outputs += [~norm.isfinite(), norm]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return outputs

    def state(self) -> dict[str, Tensor]:
        """Return copies of all that training changes, by name."""
        named: dict[str, Any] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        names = {param: name for name, param in self.model.named_parameters()}
        for param, kept in self.optimizer.state.items():
            named.update({f"{names[param]}.{key}": value for key, value in kept.items() if isinstance(value, Tensor)})
        if self.scaler.is_enabled():
            named["scale"] = torch.tensor(self.scaler.get_scale())
        return {name: tensor.detach().clone() for name, tensor in named.items()}


def compiled_loss(model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
    """Return what `Job._loss` does, which counts on the host, so that it would be compiled in each call."""
    loss: Tensor = (model(x).float() * boost).square().mean()
    return loss


def calls(case: Case) -> int:
    """Return how often the step is called."""
    return CALLS * case.accumulate * (2 if case.numerics else 1)


def train(case: Case, device: torch.device, graph: str) -> Job:
    """Train, and return the job at its end."""
    job = Job(case, device, graph)
    for call in range(calls(case)):
        job(call)
    return job


def compare(case: Case, device: torch.device, graph: str) -> dict[str, Any]:
    """Train with a graph and without, and return where the two differ, with the counts of the first."""
    start = time.monotonic()
    reference = train(case, device, "off")
    alone = train(case, device, "torch") if case.torch else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = train(case, device, graph)
    report = job.steps[0].report()
    row = {
        "differ": differences(reference, job),
        "differ from torch": [] if alone is None else differences(alone, job),
        "weights": [tensor.double().sum().item() for tensor in job.model.parameters()],
        "messages": [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)],
        "torch warns": [str(w.message)[:300] for w in caught if "AccumulateGrad" in str(w.message)],
        "working": len(job.steps[0]._window._step._working),
        "replays": sum(step.report().replays for step in job.steps),
        "compiled": list(report.compiled),
        **{name: getattr(report, name) for name in ("captures", "eager", "skipped", "failure")},
        "seconds": round(time.monotonic() - start, 1),
    }
    for step in (*reference.steps, *job.steps):
        step.close()
    return row


def compare_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a row for each case by its name."""

    def row(name: str) -> dict[str, Any]:
        # Without deterministic algorithms, emulated replays that count differ like kernels that make noise.
        torch.use_deterministic_algorithms(True, warn_only=CASES[name].event != "differs")
        if CASES[name].event == "fails":
            torch_compile.inductor = failing_inductor
        elif device.type == "cpu":  # Inductor compiles C++, which takes seconds; AOTAutograd does all but that
            torch_compile.inductor = lambda: lambda graph, inputs, config_patches: aot_eager(graph, inputs)
        else:
            torch_compile.inductor = INDUCTOR
        return compare(CASES[name], device, "auto" if device.type == "cuda" else "emulate")

    names = args.cases or [name for name, case in CASES.items() if device.type == "cuda" or not case.gpu]
    return rows_of(names, row, hidden=["weights"])


# ----------------------------------------------------------------------------------------------------------------- main


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--end", choices=ENDS, default="destroy")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if "RANK" not in os.environ:
        rows = launch(*argv, ranks=args.ranks, timeout=args.timeout, script=__file__)
        for rank, row in enumerate(rows):
            for name, result in row.items():
                print(f"rank {rank}, {name}: {json.dumps({k: v for k, v in result.items() if v and k != 'weights'})}")
        return 0
    run_rank(partial(compare_all, args), args.device, args.timeout, args.end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
