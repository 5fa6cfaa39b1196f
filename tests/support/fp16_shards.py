"""float16 under fully_shard with many overflows on single ranks, one process per rank, for test_fp16_shards.py.

    python tests/support/fp16_shards.py --device cuda  every case on two GPUs, with one line per case and rank
    python tests/support/fp16_shards.py --device cpu --cases clip  one of them with gloo, emulated graphs

Without RANK in its environment the script starts the ranks itself. It also runs under torchrun.

The learning rate and an average of the weights stay as they are in a skipped step: captured steps decide that on the
device, and torch's own loop on the host, by whether its scale fell.
"""

import argparse
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_train import ENDS, KEPT, launch
from fsdp_train import local
from rank_script import differences, rows_of, run_rank, same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

import ampkit

CALLS, OVERFLOWS = {"cpu": 56, "cuda": 350}, {"cpu": 16, "cuda": 100}  # by kind of device
PEAK = 2**-7  # of the learning rate. All rates are exact in float32, so that a float and a tensor are the same
RISE, FALL = 32, 512  # optimizer steps in which the rate rises, and in which it would fall to 0
DECAY = 0.25
CLASSES, PROBES = 4, 8  # outputs that the model is trained for, and outputs without a gradient for the layers before


class Case(NamedTuple):
    """One way to train.

    Attributes:
        max_norm: of the step.
        policy: of the step; None if MixedPrecisionPolicy casts.
        graphed: whether a function of the user's is captured, which calls scaler, clipping and optimizer as with torch.
        torch: whether torch's own loop has the same bits.
    """

    max_norm: float = float("inf")
    policy: str | None = None
    graphed: bool = False
    torch: bool = False


# Under graphed_step, fused AdamW unscales and clips in one division. torch has one for each, which rounds twice.
CASES = {
    "as torch": Case(torch=True),
    "policy, as torch": Case(policy="float16", torch=True),
    "clip": Case(max_norm=0.125),
    "graphed, clip as torch": Case(max_norm=0.125, graphed=True, torch=True),
}


class Overflow(NamedTuple):
    """What is infinite in a call.

    Attributes:
        ranks: in whose loss.
        whole: whether all gradients are; otherwise those that one rank has the shard of.
        output: which of the outputs leads to these.
    """

    ranks: tuple[int, ...]
    whole: bool
    output: int


def planned(ranks: int, device: str) -> dict[int, Overflow]:
    """Return the overflows of a training by call, the same on all ranks."""
    drawn = random.Random(38)
    calls = sorted(drawn.sample(range(CALLS[device]), OVERFLOWS[device]))
    who = [*((rank,) for rank in range(ranks)), tuple(range(ranks))]
    return {
        call: Overflow(drawn.choice(who), drawn.random() < 0.5, CLASSES + drawn.randrange(PROBES)) for call in calls
    }


class Net(nn.Module):
    """A perceptron, and a layer whose gradients say nothing about the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 15), nn.GELU())
        self.head, self.probe = nn.Linear(15, CLASSES), nn.Linear(15, PROBES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return torch.cat((self.head(features), self.probe(features.detach())), -1)


def sharded(case: Case, device: torch.device) -> Net:
    """Return the model under fully_shard."""
    torch.manual_seed(3)
    net = Net().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": low if case.policy is None else MixedPrecisionPolicy()}
    for layer in (net.body[0], net.body[2]):
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def factor(steps: Any) -> Any:
    """Return the learning rate behind so many optimizer steps, a number or a tensor, as a part of its peak."""
    rising, falling = (steps + 1) / RISE, 1 - steps / FALL
    return torch.minimum(rising, falling) if isinstance(steps, Tensor) else min(rising, falling)


class Job:
    """One rank's model, batches and step.

    Args:
        case: what to train.
        device: where this rank trains.
        graph: "auto", "emulate", "off", or "torch" for the same training written with torch alone.
    """

    watch = None

    def __init__(self, case: Case, device: torch.device, graph: str) -> None:
        self.case, self.device = case, device
        self.model = sharded(case, device)
        self.params = list(self.model.parameters())
        self.rate = torch.tensor(PEAK, device=device)
        on_tensor = graph != "torch" or device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.params, lr=self.rate if on_tensor else PEAK, fused=True)
        self.schedule = LambdaLR(self.optimizer, factor) if graph == "torch" else None
        self.rate.copy_(PEAK * factor(0))
        self.policy = ampkit.Policy.parse(case.policy or "float32")
        scaler = torch.amp.GradScaler if graph == "torch" else ampkit.GradScaler
        self.scaler: Any = scaler(device.type, 1024.0, growth_interval=2)
        self.average = [local(param).detach().clone() for param in self.params]
        self.made = torch.Generator().manual_seed(7 + dist.get_rank())
        self.planned = planned(dist.get_world_size(), device.type)
        self.outputs: list[list[Tensor]] = []
        self.step: Any = None
        if graph != "torch":
            self.step = (self._graphed if case.graphed else self._step)(graph)
            KEPT.append(self.step)

    def _step(self, graph: str) -> Any:
        return ampkit.graphed_step(
            self.loss_fn,
            self.model,
            self.optimizer,
            policy=None if self.case.policy is None else self.policy,
            scaler=self.scaler,
            max_norm=self.case.max_norm,
            after_step=self.after_step,
            graph=graph,
            on_failure="parts" if graph == "off" else "raise",
        )

    def _graphed(self, graph: str) -> Any:
        def train(x: Tensor, boost: Tensor) -> list[Tensor]:
            loss, norm = self._with_scaler(x, boost)
            self.after_step(self.model)
            return [loss, self.scaler.found_inf > 0, norm]

        return ampkit.graphed(
            modules=[self.model],
            optimizers=[self.optimizer],
            scaler=self.scaler,
            graph=graph,
            on_failure="parts" if graph == "off" else "raise",
        )(train)

    def loss_fn(self, model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
        return ((model(x).float() - x[:, : CLASSES + PROBES]) * boost).square().mean()

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Move average and learning rate, unless the step was skipped."""
        stepped = self.scaler.found_inf == 0
        for kept, param in zip(self.average, model.parameters(), strict=True):
            torch.where(stepped, kept.lerp(local(param), DECAY), kept, out=kept)
        self.rate.copy_(PEAK * factor(self.scaler.steps - self.scaler.skipped))

    def batch(self, call: int) -> tuple[Tensor, Tensor]:
        x, boost = torch.randn(4, 16, generator=self.made), torch.ones(CLASSES + PROBES)
        overflow = self.planned.get(call)
        if overflow is not None and dist.get_rank() in overflow.ranks:
            boost[slice(None) if overflow.whole else overflow.output] = torch.inf
        return x.to(self.device), boost.to(self.device)

    def __call__(self, call: int) -> None:
        """Do one step."""
        if self.step is None:
            outputs = self._with_torch(*self.batch(call))
        elif self.case.graphed:
            outputs = self.step(*self.batch(call))
        else:
            out = self.step(*self.batch(call))
            outputs = [out.loss, out.skipped, out.grad_norm]
        rate = self.optimizer.param_groups[0]["lr"]
        rate = rate.clone() if isinstance(rate, Tensor) else torch.tensor(rate)
        scale = torch.tensor(self.scaler.get_scale())
        self.outputs.append([*outputs, scale, rate, torch.cat([kept.flatten() for kept in self.average])])

    def _with_torch(self, x: Tensor, boost: Tensor) -> list[Tensor]:
        assert self.schedule is not None  # of torch's loop
        scale = self.scaler.get_scale()
        loss, norm = self._with_scaler(x, boost)
        if self.scaler.get_scale() >= scale:
            torch._foreach_lerp_(self.average, [local(param).detach() for param in self.params], DECAY)
            self.schedule.step()
        return [loss, ~norm.isfinite(), norm]

    def _with_scaler(self, x: Tensor, boost: Tensor) -> tuple[Tensor, Tensor]:
        """Do a step as torch's documentation writes it, with a scaler of torch or of ampkit."""
        with torch.autocast(self.device.type, torch.float16, enabled=self.case.policy is not None):
            loss = self.loss_fn(self.model, x, boost)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm: Any = nn.utils.clip_grad_norm_(self.params, self.case.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach(), norm.full_tensor()

    def state(self) -> dict[str, Tensor]:
        """Return copies of this rank's part of parameters and optimizer state, and the scale, by name."""
        named: dict[str, Any] = dict(self.model.named_parameters())
        names = {param: name for name, param in named.items()}
        for param, kept in self.optimizer.state.items():
            named.update({f"{names[param]}.{key}": value for key, value in kept.items() if isinstance(value, Tensor)})
        named["scale"] = torch.tensor(self.scaler.get_scale())
        return {name: local(tensor).detach().clone() for name, tensor in named.items()}

    def moved_in_skipped(self) -> list[int]:
        """Return the calls that were skipped and moved the learning rate or the average all the same."""
        pairs = zip(self.outputs[:-1], self.outputs[1:], strict=True)
        return [
            call
            for call, (before, after) in enumerate(pairs, start=1)
            if after[1] and not all(map(same_bits, before[4:], after[4:]))
        ]


def train(case: Case, device: torch.device, graph: str) -> Job:
    """Train, and return the job at its end."""
    job = Job(case, device, graph)
    for call in range(CALLS[device.type]):
        job(call)
    return job


def compare(case: Case, device: torch.device, graph: str) -> dict[str, Any]:
    """Train with a graph and without, and return where the two differ, with the counts of the first."""
    start = time.monotonic()
    torch.use_deterministic_algorithms(True)
    reference = train(case, device, "off")
    alone = train(case, device, "torch") if case.torch else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = train(case, device, graph)
    report = job.step.report()
    skipped = [call for call, out in enumerate(job.outputs) if out[1]]
    row = {
        "differ": differences(reference, job),
        "differ from torch": [] if alone is None else differences(alone, job),
        "moved in skipped": job.moved_in_skipped(),
        "not skipped": sorted(set(job.planned) - set(skipped)),
        "skipped": len(skipped),
        "scales": sorted({out[3].item() for out in job.outputs}),
        "rates": len({out[4].item() for out in job.outputs}),
        "clipped": sum(bool(case.max_norm < out[2] < torch.inf) for out in job.outputs),
        "messages": [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)],
        "replays": report.replays,
        "seconds": round(time.monotonic() - start, 1),
    }
    for one in (reference, job):
        one.step.close()
    return row


def compare_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a row for each case by its name."""
    graph = "auto" if device.type == "cuda" else "emulate"
    return rows_of(args.cases or CASES, lambda name: compare(CASES[name], device, graph))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--end", choices=ENDS, default="destroy")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240)
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        rows = launch(*argv, ranks=args.ranks, timeout=args.timeout, script=__file__)
        print(json.dumps(rows, indent=1))
        return 0
    if args.device == "cpu":
        torch.set_num_threads(1)
    work: Callable[[torch.device], dict[str, Any]] = partial(compare_all, args)
    run_rank(work, args.device, args.timeout, args.end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
