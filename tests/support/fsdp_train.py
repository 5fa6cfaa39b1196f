"""Training under fully_shard, one process per rank, for test_fully_shard.py: all cases in one start of the ranks.

    python tests/support/fsdp_train.py --device cuda  every case on two GPUs, with one line per case and rank
    python tests/support/fsdp_train.py --device cuda --time  milliseconds per step and MiB of a transformer
    python tests/support/fsdp_train.py --device cpu --cases bfloat16 resume  two of them with gloo, emulated graphs

Without RANK in its environment the script starts the ranks itself. It also runs under torchrun.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_train import ENDS, KEPT, digest, end_late
from rank_script import differences, rows_of, run_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import ampkit

CALLS = 10
RATE = 2**-7  # float32 holds it exactly, so that a float and a tensor are the same rate


class Case(NamedTuple):
    """One way to train.

    Attributes:
        model: which model, see `MODELS`.
        reshard: as in `fully_shard(reshard_after_forward=...)`.
        dtype: of `MixedPrecisionPolicy(param_dtype=...)`, None for none; gradients are reduced in float32.
        policy: of the step.
        optimizer: its name.
        options: of the optimizer.
        max_norm: of the step.
        accumulate: of the step.
        overflows: calls whose gradients are infinite on rank 1.
        average: whether `after_step` keeps an average of the weights.
        torch: whether torch's own loop has the same bits.
        behind: whether the optimizer steps behind the graphs.
        event: what happens between two calls, see `between`.
        copies: how many ranks have the same shards (HSDP).
        verify: of the step.
        numerics: whether `ampkit.debug.numerics` measures in every second step.
        moments: of the step.
        memory: whether `ampkit.debug.memory` records a step of the reference.
        nonfinite: of the step. One that has stopped goes on from there.
    """

    model: str = "mlp"
    reshard: bool | int | None = None
    dtype: torch.dtype | None = None
    policy: str | None = None
    optimizer: str = "AdamW"
    options: dict[str, Any] = {"fused": True}  # noqa: RUF012 - never changed
    max_norm: float | None = None
    accumulate: int = 1
    overflows: tuple[int, ...] = ()
    average: bool = False
    torch: bool = False
    behind: bool = False
    event: str = ""
    copies: int = 1
    verify: int | str = 0
    numerics: bool = False
    moments: str | None = None
    memory: bool = False
    nonfinite: str | None = None


LOW = torch.bfloat16
FALLS = {"fused": True, "betas": (0.9, 0.95)}  # of AdamW, whose moments in bfloat16 can fall
WEIGHTS = "params=bfloat16,rounding"
CASES = {
    "float32": Case(max_norm=float("inf"), torch=True, memory=True),
    "bfloat16": Case("transformer", dtype=LOW, max_norm=0.5, average=True),
    "bfloat16, not resharded": Case("transformer", False, dtype=LOW, torch=True),
    "bfloat16, resharded": Case("grouped", True, dtype=LOW, max_norm=0.5),
    "policy": Case("transformer", policy="bfloat16", max_norm=0.5),
    "float16": Case(policy="float16", max_norm=0.5, overflows=(1, 6)),
    "float16 as torch": Case(policy="float16", max_norm=float("inf"), overflows=(1, 6), torch=True),
    "float16 weights": Case("transformer", dtype=torch.float16, policy="float16", max_norm=0.5, overflows=(1, 6)),
    "accumulate": Case("transformer", dtype=LOW, max_norm=0.5, accumulate=3),
    "accumulate float16": Case(policy="float16", max_norm=0.5, accumulate=2, overflows=(0, 7), average=True),
    "sgd": Case(optimizer="SGD", options={"fused": True, "momentum": 0.9}, max_norm=0.5),
    "behind": Case(
        policy="float16", optimizer="SGD", options={"momentum": 0.9}, overflows=(1, 6), max_norm=0.5, behind=True
    ),
    "rmsprop": Case(optimizer="RMSprop", options={}, max_norm=0.5),
    "moments": Case("transformer", dtype=LOW, max_norm=0.5, options=FALLS, moments="bfloat16", event="resume"),
    "stochastic": Case(policy=f"{WEIGHTS}=stochastic", max_norm=0.5, event="resume"),
    "kahan": Case("transformer", policy=f"{WEIGHTS}=kahan", max_norm=0.5, options=FALLS, accumulate=2, copies=2),
    "tied": Case("tied", dtype=LOW, max_norm=0.5),
    "compiled blocks": Case("transformer", dtype=LOW, max_norm=0.5, event="compiled"),
    "compiled blocks, accumulate": Case("transformer", dtype=LOW, max_norm=0.5, accumulate=2, event="compiled"),
    "frozen": Case("frozen", dtype=LOW, max_norm=0.5),
    "evaluation": Case("transformer", dtype=LOW, max_norm=0.5, event="evaluation"),
    "state dict": Case("transformer", dtype=LOW, max_norm=0.5, event="state dict"),
    "resume": Case("transformer", dtype=LOW, max_norm=0.5, event="resume"),
    "resume float16": Case(policy="float16", max_norm=0.5, overflows=(1,), event="resume"),
    "exception": Case("transformer", dtype=LOW, max_norm=0.5, event="exception"),
    "scan": Case("transformer", dtype=LOW, max_norm=0.5, event="scan"),
    "windows": Case("transformer", dtype=LOW, max_norm=0.5, accumulate=3, event="windows"),
    "windows float16": Case(
        policy="float16", max_norm=0.5, accumulate=2, overflows=(1, 8), average=True, event="windows"
    ),
    "windows behind": Case(
        policy="float16", optimizer="SGD", options={"momentum": 0.9}, accumulate=2, behind=True, event="windows"
    ),
    "other size": Case(max_norm=0.5, event="other size"),
    "waits": Case("transformer", dtype=LOW, max_norm=0.5, event="waits"),
    "raises": Case("transformer", dtype=LOW, max_norm=0.5, event="raises"),
    "verify": Case("transformer", dtype=LOW, max_norm=0.5, verify=3),
    "verify sparse": Case("transformer", dtype=LOW, max_norm=0.5, verify="sparse"),
    "verify float16": Case(policy="float16", max_norm=0.5, accumulate=2, overflows=(1, 8), verify=4),
    "verify, not resharded": Case("grouped", False, dtype=LOW, verify=2),
    "verify, differs": Case("transformer", dtype=LOW, verify=4, event="differs"),
    "verify, average": Case("transformer", dtype=LOW, average=True, verify=2, event="average"),
    "verify, undeclared": Case(verify=2, event="undeclared"),
    "skips": Case("transformer", dtype=LOW, max_norm=0.5, overflows=(1, 6), nonfinite="skip"),
    "skips, accumulate": Case(accumulate=2, overflows=(0, 7), nonfinite="skip"),
    "skips behind": Case(optimizer="SGD", options={"momentum": 0.9}, overflows=(1, 6), behind=True, nonfinite="skip"),
    "stops": Case(accumulate=3, max_norm=0.5, overflows=(2,), nonfinite="stop"),
    "numerics": Case(policy="float16", max_norm=0.5, overflows=(1, 8), numerics=True),
    "numerics, accumulate": Case("transformer", dtype=LOW, max_norm=0.5, accumulate=2, numerics=True),
    "graphed": Case("transformer", dtype=LOW, max_norm=float("inf"), torch=True, event="graphed"),
    "graphed float16": Case(policy="float16", max_norm=0.5, overflows=(1, 6), verify=2, event="graphed"),
    "graphed pair": Case(event="graphed pair", verify=2),
    "copies": Case("transformer", dtype=LOW, max_norm=0.5, copies=2),
    "copies float16": Case(policy="float16", max_norm=0.5, accumulate=2, overflows=(1, 7), copies=2),
}
FOUR_RANKS = {
    "resharded to two": Case("transformer", 2, dtype=LOW, max_norm=0.5),
    "two copies": Case("transformer", dtype=LOW, max_norm=0.5, average=True, copies=2),
    "two copies float32": Case(max_norm=float("inf"), torch=True, copies=2),
    "two copies float16": Case(policy="float16", max_norm=0.5, accumulate=2, overflows=(0, 7), copies=2),
    "two copies resume": Case("transformer", dtype=LOW, max_norm=0.5, event="resume", copies=2),
    "two copies behind": Case(
        policy="float16", optimizer="SGD", options={"momentum": 0.9}, overflows=(1, 6), behind=True, copies=2
    ),
    "two copies waits": Case("transformer", dtype=LOW, max_norm=0.5, event="waits", copies=2),
}
# On GPUs: what NCCL, streams and fused kernels may change. The rest is the same code, which gloo shows on a CPU.
ON_GPUS = (
    *(
        "skips",
        "stops",
        "float32",
        "bfloat16",
        "bfloat16, resharded",
        "policy",
        "float16",
        "float16 weights",
        "accumulate float16",
    ),
    *("behind", "tied", "compiled blocks", "evaluation", "resume float16", "exception", "scan", "windows float16"),
    *(
        "other size",
        "waits",
        "raises",
        "verify",
        "verify sparse",
        "verify, differs",
        "numerics",
        "graphed float16",
        "copies float16",
        "stochastic",
    ),
)
GIVES_UP = ("waits", "raises", "differs", "undeclared", "average")  # events in which rank 1 cannot capture


# --------------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """A transformer block whose kernels are all deterministic."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax(q k^T) v. Deterministic, unlike some kernels of scaled_dot_product_attention."""
        return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.dropout(self.out(self.attention(q, k, v).transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class FastBlock(Block):
    """The same with torch's kernels, for timing."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(2))
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x.abs() * 10).long().clamp(max=30))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def mlp() -> nn.Module:
    # 15 and 1 rows: the shards of two ranks differ in size, and one is empty.
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 15), nn.GELU(), nn.Linear(15, 1))


def transformer() -> nn.Module:
    return nn.Sequential(*(Block(16, 2) for _ in range(2)), nn.LayerNorm(16), nn.Linear(16, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer": transformer,
    "grouped": transformer,
    "frozen": transformer,
    "tied": Tied,
}


def sharded(case: Case, device: torch.device, seed: int = 3) -> nn.Module:
    """Return the model of a case, under fully_shard."""
    torch.manual_seed(seed)
    params = ampkit.Policy.parse(case.policy or "float32").params
    return wrapped(MODELS[case.model]().to(device, params), case, device)


def wrapped(model: Any, case: Case, device: torch.device) -> nn.Module:
    """Put each block and the whole model under fully_shard."""
    options = mesh_options(case, device)
    blocks = list(model.blocks) if isinstance(model, Tied) else [part for part in model if isinstance(part, Block)]
    blocks = blocks or [part for part in model if isinstance(part, nn.Linear)]
    for block in blocks if case.event == "compiled" else ():
        block.compile()
    if case.model == "frozen":
        blocks[0].requires_grad_(False)
    for block in blocks:
        fully_shard(block, **options)
    if case.model == "grouped":
        fully_shard([model[-2], model[-1]], **options)
    whole: nn.Module = fully_shard(model, **options)
    return whole


def mesh_options(case: Case, device: torch.device) -> dict[str, Any]:
    """Return what a case passes to fully_shard."""
    ranks = dist.get_world_size()
    if case.copies == 1:
        mesh = init_device_mesh(device.type, (ranks,))
    else:
        shape = (case.copies, ranks // case.copies)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards"))
    low = MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy() if case.dtype is None else low}
    if case.reshard is not None:
        options["reshard_after_forward"] = case.reshard
    return options


# ------------------------------------------------------------------------------------------------------------- training


class Job:
    """One rank's model, batches and step.

    Args:
        case: what to train.
        device: where this rank trains.
        graph: "auto", "emulate", "off", or "torch" for the same training written with torch alone.
        seed: of the weights.
        model: a model under fully_shard, if not the one of the case.
    """

    def __init__(
        self, case: Case, device: torch.device, graph: str, seed: int = 3, model: nn.Module | None = None
    ) -> None:
        self.case, self.device, self.graph = case, device, graph
        self.model = sharded(case, device, seed) if model is None else model
        on_tensor = graph == "torch" and device.type == "cuda"
        rate = torch.tensor(RATE, device=device) if on_tensor else RATE
        kind = getattr(torch.optim, case.optimizer)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = kind(params, lr=rate, **case.options)
        self.policy = ampkit.Policy.parse(case.policy or "float32")
        scaler = torch.amp.GradScaler if graph == "torch" else ampkit.GradScaler
        self.scaler = scaler(device.type, 1024.0, growth_interval=3, enabled=self.policy.needs_scaling)
        self.average = [param.detach().clone() for param in self.model.parameters()] if case.average else []
        self.made = torch.Generator().manual_seed(7 + dist.get_rank())
        torch.manual_seed(5 + dist.get_rank())
        self.outputs: list[Any] = []
        self.critic: Any = None
        self.optimizers = (self.optimizer,)
        self.seen, self.elsewhere = 0, torch.zeros((), device=device)  # what a graph would not follow
        self.watch = ampkit.debug.numerics(self.model, every=2) if case.numerics else None
        if graph == "torch":
            return
        self.step: Any = self._graphed(graph) if case.event.startswith("graphed") else self._step(graph)
        KEPT.append(self.step)

    def _step(self, graph: str) -> Any:
        case = self.case
        return ampkit.graphed_step(
            self.loss_fn,
            self.model,
            self.optimizer,
            policy=None if case.policy is None else self.policy,
            scaler=self.scaler,
            max_norm=case.max_norm,
            accumulate=case.accumulate,
            after_step=self.after_step if case.average else None,
            verify=case.verify,
            moments=case.moments,
            numerics=self.watch,
            nonfinite=case.nonfinite,
            graph=graph,
            on_failure="parts" if graph == "off" or case.behind or case.event in GIVES_UP else "raise",
            host_writes="ignore",  # loss_fn counts its calls
        )

    def _graphed(self, graph: str) -> Any:
        """Return a function under `ampkit.graphed` that trains this model, and another one if the case has a pair."""
        scaler = self.scaler if self.scaler.is_enabled() else None
        train: Callable[..., Any] = self._with_torch
        modules = [self.model]
        if self.case.event == "graphed pair":
            self.critic = wrapped(nn.Sequential(nn.Linear(1, 8), nn.GELU(), nn.Linear(8, 1)), self.case, self.device)
            modules.append(self.critic)
            self.optimizers = (self.optimizer, torch.optim.AdamW(self.critic.parameters(), lr=RATE, fused=True))
            train = self._with_critic
        return ampkit.graphed(
            modules=modules,
            optimizers=self.optimizers,
            scaler=scaler,
            verify=self.case.verify,
            graph=graph,
            on_failure="parts" if graph == "off" else "raise",
            host_writes="ignore",
        )(train)

    def _with_critic(self, x: Tensor, boost: Tensor) -> list[Tensor]:
        """Train the critic on what the model makes, and then the model by what the critic says."""
        of_model, of_critic = self.optimizers
        of_critic.zero_grad()
        judged = self.critic(self.model(x).detach()).square().mean()
        judged.backward()
        of_critic.step()
        of_model.zero_grad()
        made = self.critic(self.model(x)).mean()
        made.backward()
        of_model.step()
        return [judged.detach(), made.detach()]

    def loss_fn(self, model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
        loss = (model(x.to(self.policy.params)).float() * boost).square().mean()
        self.seen += 1
        if dist.get_rank() == 1 and self.case.event == "differs" and self.seen > 6:
            loss = loss * (1 + self.seen % 2)  # so that the gradients on all ranks differ
        if dist.get_rank() == 1 and self.case.event == "undeclared":
            self.elsewhere.add_(1)
        if dist.get_rank() == 1 and self.case.event == "waits":
            loss.item()
        fails = dist.get_rank() == 1 and self.case.event == "raises" and self.device.type == "cuda"
        if fails and torch._C._cuda_isCurrentStreamCapturing():
            raise ValueError("a mistake of the user")
        return loss

    def after_step(self, model: nn.Module) -> None:
        """Keep an average of the weights, as a user of fully_shard writes it."""
        params = [param.detach() for param in model.parameters()]
        torch._foreach_lerp_(self.average, params, 0.25)

    def batch(self, call: int) -> tuple[Tensor, Tensor]:
        rows = 3 if self.case.event == "other size" and call in (2, 7) and dist.get_rank() == 1 else 4
        x = torch.randn(rows, *(() if self.case.model == "mlp" else (6,)), 16, generator=self.made)
        if self.case.model == "tied":
            x = x[..., 0]
        infinite = call in self.case.overflows and dist.get_rank() == 1
        return x.to(self.device), torch.tensor(float("inf") if infinite else 1.0, device=self.device)

    def __call__(self, call: int) -> None:
        """Do one step."""
        if self.graph == "torch":
            self.outputs.append(self._with_torch(*self.batch(call)))
        else:
            batch = self.batch(call)
            if self.case.event == "exception" and call == 1:
                self._raise_within(batch)
            if self.case.event == "windows":
                out = self._window(batch)
            elif self.case.event == "scan":
                out = self.step.scan(batch[0].expand(2, *batch[0].shape), batch[1].expand(2))
            elif self.case.event.startswith("graphed"):
                self.outputs.append(self.step(*batch))
                return
            else:
                try:
                    out = self.step(*batch)
                except ampkit.NonfiniteError:  # in the same call on all ranks, else they would wait for each other
                    self.outputs.append([torch.tensor(call)])
                    self.step.load_state_dict({})
                    return
            self.outputs.append([out.loss, out.skipped, *([] if out.grad_norm is None else [out.grad_norm])])

    def evaluate(self, call: int) -> None:
        """Evaluate the model, which leaves the root's parameters gathered."""
        x = self.batch(call)[0]
        self.model.eval()
        with torch.no_grad():
            self.outputs.append([self.model(x)])
        self.model.train()

    def _window(self, batch: tuple[Tensor, ...]) -> Any:
        """Do an optimizer step of equal micro-batches. The reference makes a call for each."""
        if self.graph != "off":
            return self.step.window(*(part.expand(self.case.accumulate, *part.shape) for part in batch))
        outs = [self.step(*batch) for _ in range(self.case.accumulate)]
        return outs[-1]._replace(loss=torch.stack([out.loss for out in outs]))

    def _raise_within(self, batch: tuple[Tensor, ...]) -> None:
        """Do a call in which the forward of the second block raises, on all ranks."""

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        hook = self.model[1].down.register_forward_pre_hook(fail)
        with suppress(ZeroDivisionError):
            self.step(*batch)
        hook.remove()

    def _with_torch(self, x: Tensor, boost: Tensor) -> list[Tensor]:
        assert self.case.accumulate == 1
        with self.policy.autocast(self.device.type) if self.case.policy else nullcontext():
            loss = self.loss_fn(self.model, x, boost)
        self.scaler.scale(loss).backward()
        outputs = [loss.detach()]
        if self.case.max_norm is not None:  # inf: nothing is clipped, so that both do the same arithmetic
            self.scaler.unscale_(self.optimizer)
            norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), self.case.max_norm)
            outputs += [~norm.full_tensor().isfinite(), norm.full_tensor()]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return outputs

    def state(self) -> dict[str, Tensor]:
        """Return copies of all that training changes, by name; of a sharded tensor this rank's part."""
        named: dict[str, Any] = dict(self.model.named_parameters())
        if self.critic is not None:
            named.update({f"critic.{name}": param for name, param in self.critic.named_parameters()})
        names = {param: name for name, param in named.items()}
        for param, kept in chain(*(optimizer.state.items() for optimizer in self.optimizers)):
            named.update({f"{names[param]}.{key}": value for key, value in kept.items() if isinstance(value, Tensor)})
        named.update({f"average {i}": tensor for i, tensor in enumerate(self.average)})
        if self.scaler.is_enabled():
            named["scale"] = torch.tensor(self.scaler.get_scale())
        return {name: local(tensor).detach().clone() for name, tensor in named.items()}


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def between(job: Job, call: int) -> Job:
    """Do what the case's event asks for before this call; return the job that goes on."""
    if call != CALLS // 2:
        return job
    if job.case.event == "evaluation":
        job.evaluate(call)
    if job.case.event == "state dict":
        before = job.model.state_dict()
        job.model.load_state_dict({name: tensor.clone() for name, tensor in before.items()})
    if job.case.event == "resume":
        return resumed(job)
    return job


def resumed(job: Job) -> Job:
    """Save a checkpoint of a job and return a new one, with other weights, that was loaded from it."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    dcp.save(checkpoint(job), checkpoint_id=folder[0])
    rng = torch.cuda.get_rng_state() if job.device.type == "cuda" else torch.get_rng_state()
    new = Job(job.case, job.device, job.graph, seed=99)
    new.made, new.outputs = job.made, job.outputs
    load(new, folder[0])
    (torch.cuda.set_rng_state if job.device.type == "cuda" else torch.set_rng_state)(rng)
    return new


def load(job: Job, folder: str) -> None:
    """Give a job the state of a checkpoint."""
    loaded = checkpoint(job)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(job.model, job.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    job.scaler.load_state_dict(loaded["scaler"])


def save_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train each case for some steps, save it, and return checksums of its state by the name of the case."""
    rows = {}
    for name in args.cases:
        job = Job(CASES[name], device, args.graph)
        for call in range(6):
            job(call)
        dcp.save(checkpoint(job), checkpoint_id=f"{args.save}/{name}")
        rows[name] = {"whole": checksums(job), "replays": job.step.replays}
    return rows


def load_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Load what other ranks have saved, and train on, with a graph and without.

    The rows have checksums of what was loaded, and what differs between the two trainings.
    """
    rows = {}
    for name in args.cases:
        jobs = [Job(CASES[name], device, graph, seed=99) for graph in ("off", args.graph)]
        for job in jobs:
            load(job, f"{args.load}/{name}")
        whole = checksums(jobs[1])
        for job in jobs:
            torch.manual_seed(11 + dist.get_rank())
            for call in range(6):
                job(call)
        rows[name] = {"whole": whole, "differ": differences(*jobs), "replays": jobs[1].step.replays}
    return rows


def checksums(job: Job) -> dict[str, str]:
    """Return a checksum of each parameter and of the optimizer's state for it, and the loss scale, by name."""
    named: dict[str, Any] = dict(job.model.named_parameters())
    names = {param: name for name, param in named.items()}
    for param, kept in job.optimizer.state.items():
        named.update({f"{names[param]}.{key}": value for key, value in kept.items() if isinstance(value, Tensor)})
    if job.scaler.is_enabled():
        named["scale"] = torch.tensor(job.scaler.get_scale())
    return {
        name: digest(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
        for name, tensor in named.items()
    }


def checkpoint(job: Job) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint saves and fills."""
    model, optimizer = get_state_dict(job.model, job.optimizer)
    return {"model": model, "optimizer": optimizer, "scaler": job.scaler.state_dict()}


def calls(case: Case) -> int:
    """Return how often the step is called."""
    return (CALLS + 4 * (case.accumulate - 1)) * (2 if case.numerics else 1)


def train(case: Case, device: torch.device, graph: str) -> Job:
    """Train, and return the job at its end."""
    job = Job(case, device, graph)
    for call in range(calls(case)):
        job = between(job, call)
        job(call)
    return job


def compare(case: Case, device: torch.device, graph: str) -> dict[str, Any]:
    """Train with a graph and without, and return where the two differ, with the counts of the first."""
    start = time.monotonic()
    reference = train(case, device, "off")
    if case.torch:
        alone = train(case, device, "torch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = train(case, device, graph)
    row = {
        "differ": differences(reference, job),
        "differ from torch": differences(alone, job) if case.torch else [],
        "finite": all(bool(tensor.isfinite().all()) for tensor in job.state().values()),
        "gradients": gradients(job),
        "memory": memory(reference) if case.memory else {},
        "norms": [out[2].tolist() for out in job.outputs if len(out) == 3],
        "messages": [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)],
        **{
            name: getattr(job.step.report(), name)
            for name in ("captures", "replays", "launches", "eager", "skipped", "failure")
        },
        "seconds": round(time.monotonic() - start, 1),
    }
    for one in (reference, job):
        one.step.close()
    return row


def memory(job: Job) -> dict[str, Any]:
    """Return the bytes that `debug.memory` counts in one more step of a job, and those that this rank's parts have."""
    with ampkit.debug.memory(job.model, job.optimizer) as recorded:
        job(0)
    counted = recorded.profile.at_peak
    states = [value for kept in job.optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    parts = {"parameter": list(job.model.parameters()), "optimizer state": states}
    return {name: (counted[name], nbytes(tensors)) for name, tensors in parts.items()}


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that the parts of tensors on this rank take; fully_shard pads them to equal sizes."""
    storages = {part.data_ptr(): part.nbytes() for part in (local(tensor).untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def gradients(job: Job) -> list[Any]:
    """Return how many values the gradient of each parameter was seen to have, the largest, and what is not finite."""
    rows = [] if job.watch is None else job.watch.report().rows
    return [(row.name, row.count, row.largest, row.nonfinite) for row in rows if row.what == "gradient"]


def compare_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a row for each case by its name."""

    def row(name: str) -> dict[str, Any]:
        # Without deterministic algorithms, emulated replays that count differ like kernels that make noise.
        torch.use_deterministic_algorithms(True, warn_only=not name.startswith("verify"))
        return compare({**CASES, **FOUR_RANKS}[name], device, args.graph)

    return rows_of(args.cases or CASES, row, hidden=["norms", "eager", "gradients", "memory"])


# --------------------------------------------------------------------------------------------------------------- timing


def timed(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return milliseconds per step and peak MiB of a transformer, with torch alone, eagerly and with a graph."""
    rows: dict[str, Any] = {}
    for batch in args.batches:
        for graph in ("torch", "off", args.graph):
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            case = Case(dtype=LOW, max_norm=1.0)
            width = args.width
            with device:
                blocks = [FastBlock(width, width // 64, 0.0) for _ in range(args.blocks)]
                model = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, width))
            job = Job(case, device, graph, model=wrapped(model, case, device))
            x, boost = torch.randn(batch, 512, width, device=device), torch.ones((), device=device)
            step = job.step if graph != "torch" else job._with_torch
            ms = milliseconds(lambda step=step, x=x, boost=boost: step(x, boost), 10, 30)
            peak = torch.cuda.max_memory_reserved() >> 20 if device.type == "cuda" else 0
            rows[f"{graph} batch {batch}"] = {"ms": round(ms, 2), "MiB": peak}
            print(f"rank {dist.get_rank()}, {graph}, batch {batch}: {ms:.2f} ms, {peak} MiB", flush=True)
            if graph != "torch":
                rows[f"{graph} batch {batch}"]["replays"] = job.step.replays
                job.step.close()
            KEPT.clear()
            del job, step, model, blocks
            gc.collect()
    return rows


def milliseconds(call: Callable[[], object], warmup: int, calls: int) -> float:
    for _ in range(warmup):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


# ----------------------------------------------------------------------------------------------------------------- main


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", choices=["auto", "emulate", "off"])
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *FOUR_RANKS])
    parser.add_argument("--save", metavar="FOLDER", help="train the cases for some steps and save them instead")
    parser.add_argument("--load", metavar="FOLDER", help="load the cases and train on instead")
    parser.add_argument("--time", action="store_true", help="time steps instead")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--end", choices=ENDS, default="destroy")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=95)
    args = parser.parse_args(argv)
    args.graph = args.graph or ("auto" if args.device == "cuda" else "emulate")
    return args


def start(argv: Sequence[str], ranks: int, timeout: float) -> int:
    """Run this script once per rank, on the output of this process. Return the first exit code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "STORE": f"{folder}/store"}
            environment = {**os.environ, **of_rank, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            environment["PYTHONFAULTHANDLER"] = "1"  # `end_late` has stacks printed
            processes.append(subprocess.Popen([sys.executable, __file__, *argv], env=environment))
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and None in (codes := [process.poll() for process in processes]):
            if any(codes):
                deadline = min(deadline, time.monotonic() + 15)
            time.sleep(0.05)
        late = end_late(processes)
        print(f"exit codes {[process.returncode for process in processes]}, ranks that were ended: {late}", flush=True)
        return next((code for code in (process.returncode for process in processes) if code), 0)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if "RANK" not in os.environ:
        return start(argv, args.ranks, args.timeout)
    work = timed if args.time else save_all if args.save else load_all if args.load else compare_all
    run_rank(partial(work, args), args.device, args.timeout, args.end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
