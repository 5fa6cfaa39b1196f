"""Training under DistributedDataParallel, one process per rank, for test_ranks.py: what was trained, and the end.

    python tests/support/ddp_train.py --device cuda --model resnet50 --policy float16 --time  two ranks, rows as JSON
    python tests/support/ddp_train.py --loop 20 --end all  as many jobs, one after another
    python tests/support/ddp_train.py --fsdp-probe  what a capture of FSDP2 does

Without RANK in its environment the script starts the ranks itself. It also runs under torchrun.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import forks
import torch
import torch.distributed as dist
from harness import Net, training_state
from ports import free_port
from torch import Tensor, nn
from torch.distributed import destroy_process_group  # as a script imports it, before ampkit can know
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit

ENDS = ("close", "destroy", "imported", "nothing")
KEPT: list[Any] = []  # what a script has at its top level lives until the interpreter ends

# --------------------------------------------------------------------------------------------------- starting the ranks


class JobError(Exception):
    """A rank failed, or the job did not end in time."""


class Started:
    """Ranks that run a script. `started[case]` waits for a case of it, `rows()` for their end.

    Args:
        options: the arguments of each rank.
        ranks: how many.
        timeout: seconds until those that have not ended are ended, with the stacks of their threads in the error.
        script: what each runs, this one if not given.
        forked: whether ranks are forks of a process that has imported torch, which is no process for a GPU.
        modules: what the process that is forked has imported besides.
        more: what is added to their environment.
    """

    def __init__(
        self,
        *options: str,
        ranks: int = 2,
        timeout: float = 120,
        script: str = __file__,
        forked: bool = False,
        modules: Sequence[str] = (),
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.options = options
        self._deadline = time.monotonic() + timeout
        self._folder = tempfile.mkdtemp()
        self._processes: list[subprocess.Popen[bytes] | forks.Fork] = []
        self._has_failed = False
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "STORE": f"{self._folder}/store",
                "ROWS": f"{self._folder}/{rank}.rows",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "PYTHONFAULTHANDLER": "1",  # SIGABRT has the stacks of all threads printed
                **more,
            }
            files = f"{self._folder}/{rank}.out", f"{self._folder}/{rank}.err"
            if forked:
                self._processes.append(forks.Fork(forks.Script([script, *options], environment, *files, modules)))
                continue
            with open(files[0], "w") as out, open(files[1], "w") as err:
                command = [sys.executable, script, *options]
                self._processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder)

    def __getitem__(self, case: str) -> list[dict[str, Any]]:
        """Return the row of each rank for a case, once all of them have it. See `rank_script.rows_of`."""
        while None in (rows := [self._row(rank, case) for rank in range(len(self._processes))]):
            if not self._go_on():
                self._end()
                raise JobError(f"{' '.join(self.options)}: no rank failed, and not all have a row of {case!r}")
            time.sleep(0.1)
        return [row for row in rows if row is not None]

    def rows(self, follow: Callable[[str], object] = lambda line: None) -> list[dict[str, Any]]:
        """Return the JSON row that each rank printed last, in order, an empty one if it printed none.

        Args:
            follow: called with each line that rank 0 prints, as soon as it is there.

        Raises:
            JobError: a rank did not exit with 0, or none of it did in time; with the end of what they wrote.
        """
        followed, goes_on = 0, True
        while goes_on:
            goes_on = self._go_on()
            *lines, _ = self._written(0, "out").split("\n")
            for line in lines[followed:]:
                follow(line)
            followed = len(lines)
            time.sleep(0.05)
        self._end()
        printed = [self._written(rank, "out").splitlines() for rank in range(len(self._processes))]
        return [json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}")) for lines in printed]

    def end_by(self, deadline: float) -> None:
        """Have the time be up then, at the latest, by `time.monotonic`."""
        self._deadline = min(self._deadline, deadline)

    def _row(self, rank: int, case: str) -> dict[str, Any] | None:
        head = json.dumps(case) + " "
        lines = self._written(rank, "rows").splitlines(keepends=True)
        whole = [line for line in lines if line.startswith(head) and line.endswith("\n")]
        row: dict[str, Any] | None = json.loads(whole[0][len(head) :]) if whole else None
        return row

    def _written(self, rank: int, kind: str) -> str:
        file = Path(f"{self._folder}/{rank}.{kind}")
        return file.read_text() if file.exists() else ""

    def _go_on(self) -> bool:
        """Return False if all have ended, one has failed (and the others had 15 s to follow), or the time is up."""
        codes = [process.poll() for process in self._processes]
        if any(codes):
            self.end_by(time.monotonic() + 15)
        return None in codes and time.monotonic() < self._deadline

    def _end(self) -> None:
        """End those that run. Raise an error if there are any, or if one has failed."""
        if self._has_failed:
            raise JobError(f"{' '.join(self.options)}: the ranks ended before; the first error about them says why")
        late = end_late(self._processes)
        codes = [process.returncode for process in self._processes]
        self._has_failed = any(codes)
        if self._has_failed:
            ends = []
            for rank, code in enumerate(codes):
                said = "late, and ended with the stacks of its threads" if rank in late else f"exit {code}"
                errors = self._written(rank, "err")
                errors = errors[max(0, errors.rfind("Fatal Python error") - 2500) :] if rank in late else errors[-2500:]
                ends.append(f"--- rank {rank}: {said}\n{self._written(rank, 'out')[-2500:]}{errors}")
            raise JobError("\n".join([" ".join(self.options), *ends]))


def end_late(processes: "Sequence[subprocess.Popen[bytes] | forks.Fork]") -> list[int]:
    """End those that have not ended, which have 10 s to write their stacks; return which these are."""
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in late:
        processes[rank].send_signal(signal.SIGABRT)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and None in [process.poll() for process in processes]:
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    return late


def launch(*options: str, **how: Any) -> list[dict[str, Any]]:
    """Run a script, this one, with `options` once per rank. Return the JSON row that each printed last, in order.

    Args:
        options: the arguments of each rank.
        how: see `Started`.

    Raises:
        JobError: see `Started.rows`.
    """
    with Started(*options, **how) as started:
        return started.rows()


def as_torchrun() -> dict[str, str]:
    """Return what torchrun adds to the environment of two ranks, where the first of them has the store."""
    elastic = {"RUN_ID": "test", "RESTART_COUNT": "0", "MAX_RESTARTS": "0", "USE_AGENT_STORE": "False"}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
        **{f"TORCHELASTIC_{name}": value for name, value in elastic.items()},
    }


def join(device_type: str) -> torch.device:
    """Join the other ranks and return this one's device."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else None)
    store = f"file://{os.environ['STORE']}" if "STORE" in os.environ else "env://"
    if device_type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, device_id=device)
    else:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    return device


# ------------------------------------------------------------------------------------------------------------- training


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))


def resnet50() -> nn.Module:
    import torchvision  # takes longer than the small jobs run

    model: nn.Module = torchvision.models.resnet50(num_classes=10)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "net": (Net, 8),
    "mlp": (perceptron, 8),
    "resnet50": (resnet50, 224),
}

RESNET = ["--model", "resnet50", "--batch", "32", "--calls", "20", "--policy", "float16", "--max-norm", "1.0"]
WINDOWS = ["--windows", "--accumulate", "2", "--calls", "100", "--policy", "float16", "--max-norm", "0.5"]
WINDOWS += ["--overflows", "3", "51"]
ON_GPUS = {
    "resnet50, overflows": [*RESNET, "--overflows", "1", "15"],
    "resnet50, accumulate": [*RESNET, "--accumulate", "2", "--calls", "32"],
    "windows": WINDOWS,
    "windows of another size": [*WINDOWS, "--odd-calls", "80", "81"],
    "another size in the warm-up": ["--calls", "30", "--odd-calls", "3"],
    "another size after the capture": ["--calls", "30", "--odd-calls", "14"],
    "blocks on one rank": ["--failing-rank", "1", "--failure", "item"],
    "raises on one rank": ["--failing-rank", "1", "--failure", "capture"],
}


def wrapped(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Return the model under DDP, as people write it."""
    if device.type == "cpu":
        return DistributedDataParallel(model)
    return DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)


class Job:
    """One rank's model, batches and step.

    Args:
        args: the options of the command line.
        device: where this rank trains.
        graph: "auto", "emulate", "off", or "torch" for the same training written with torch alone.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, graph: str) -> None:
        self.args = args
        self.rank = dist.get_rank()
        build, self.size = MODELS[args.model]
        torch.manual_seed(3 + self.rank)  # DDP gives every rank the weights of the first
        layout = torch.channels_last if args.time else torch.contiguous_format
        self.model = wrapped(build().to(device, memory_format=layout), device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.device, self.graph = device, graph
        self.policy = ampkit.Policy.parse(args.policy)
        scaler = ampkit.GradScaler if graph != "torch" else torch.amp.GradScaler
        self.scaler = scaler(device.type, 1024.0, growth_interval=3, enabled=self.policy.needs_scaling)
        self.made = torch.Generator().manual_seed(7 + self.rank)
        self.micro = 0
        if graph == "torch":
            return
        self.step = ampkit.graphed_step(
            self.loss_fn,
            self.model,
            self.optimizer,
            policy=self.policy,
            scaler=self.scaler,
            max_norm=args.max_norm,
            accumulate=args.accumulate,
            graph=graph,
            on_failure=args.on_failure,
        )
        KEPT.append(self.step)

    def loss_fn(self, model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor, number: int = 0) -> Tensor:
        """Return the loss; on the rank that is to fail, with a line that no graph can hold."""
        loss = F.cross_entropy(model(images), labels) * boost
        if self.rank == self.args.failing_rank and self.graph != "torch":
            if self.args.failure == "item":
                loss.item()  # BLOCKS
            elif self.device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
                raise ValueError("a mistake of the user")
        return loss

    def batch(self, call: int = -1) -> tuple[Any, ...]:
        """Return a new batch of this rank's own, with infinite gradients, of another size, or with a number of Python
        that varies, where the options say."""
        odd = call in self.args.odd_calls and self.rank == 1
        size = self.args.batch - 1 if odd else self.args.batch
        images = torch.randn(size, 3, self.size, self.size, generator=self.made)
        labels = torch.randint(10, (size,), generator=self.made)
        overflows = call in self.args.overflows and self.rank == 1
        boost = torch.tensor(float("inf") if overflows else 1.0)
        varies = self.args.varies_from is not None and call >= self.args.varies_from and self.rank == 1
        return images.to(self.device), labels.to(self.device), boost.to(self.device), *([call] if varies else [])

    def __call__(self, batch: tuple[Any, ...]) -> Tensor:
        """Do the step of one batch; return its loss."""
        return self._with_torch(batch) if self.graph == "torch" else self.step(*batch).loss

    def window(self, batches: list[tuple[Any, ...]]) -> Tensor:
        """Do the step of these micro-batches; return their losses. The reference makes a call for each."""
        if self.graph not in ("off", "torch"):
            return self.step.window(*map(torch.stack, zip(*batches, strict=True))).loss
        losses = torch.stack([self(batch) for batch in batches])
        if len(batches) < self.args.accumulate:
            self.flush()
        return losses

    def flush(self) -> None:
        """End a short window."""
        if self.graph != "torch":
            self.step.flush()
            return
        for param in self.model.parameters():  # what no_sync left to each rank
            dist.all_reduce(param.grad.div_(dist.get_world_size()))
        self._update()

    def _with_torch(self, batch: tuple[Any, ...]) -> Tensor:
        self.micro += 1
        last = self.micro % self.args.accumulate == 0
        with nullcontext() if last else self.model.no_sync():
            with self.policy.autocast(self.device.type):
                loss = self.loss_fn(self.model, *batch)
            self.scaler.scale(loss / self.args.accumulate).backward()
        if last:
            self._update()
        return loss.detach()

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.args.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def train_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train once per kind of `args.graph`, from the same start, and return what came of each by its name."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    return {graph: train(args, device, graph) for graph in args.graph}


def train_cases(names: Sequence[str], device: torch.device) -> int:
    """Train with the options of these cases, and write a row of each."""
    from rank_script import rows_of  # which imports this file

    def row(name: str) -> dict[str, Any]:
        found = train_all(parse_args(["--graph", "auto", "off", *ON_GPUS[name]]), device)
        while KEPT:
            KEPT.pop().close()
        return found

    print(json.dumps(rows_of(names, row, hidden=["auto", "off"])), flush=True)
    end("destroy")
    return 0


def train(args: argparse.Namespace, device: torch.device, graph: str) -> dict[str, Any]:
    """Return digests of all state by name, the counts, and what was warned of."""
    job = Job(args, device, graph)
    torch.manual_seed(5 + job.rank)
    losses, raised = [], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(0, args.calls, args.accumulate if args.windows else 1):
            try:
                if args.windows:
                    end = min(call + args.accumulate, args.calls)
                    losses += job.window([job.batch(micro) for micro in range(call, end)])
                else:
                    losses.append(job(job.batch(call)))
            except ampkit.CaptureError as error:
                raised = str(error)
                break
        if args.flush:
            job.flush()
    row: dict[str, Any] = {
        "losses": torch.stack(losses).tolist(),
        "raised": raised,
        "parameters": digests(dict(job.model.named_parameters())),
        "messages": [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)],
    }
    if graph != "torch":
        report = job.step.report()
        row["state"] = digests(training_state(job.model, job.optimizer, job.step.scaler))
        row |= {
            name: getattr(report, name) for name in ("captures", "replays", "eager", "skipped", "failure", "launches")
        }
    return row


def digests(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a dict as digests of their bits, and the rest as it is."""
    return {name: digest(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()[:16]


def timed(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return milliseconds per step: with torch alone, with graphed_step eagerly, and with its graph."""
    torch.backends.cudnn.benchmark = True
    row: dict[str, Any] = {"rank": dist.get_rank(), "model": args.model, "batch": args.batch, "policy": args.policy}
    for name, graph in (("torch", "torch"), ("eager", "off"), ("graphed", "auto")):
        job = Job(args, device, graph)
        batch = job.batch()
        images = batch[0].contiguous(memory_format=torch.channels_last)
        steps(job, (images, *batch[1:]), 20)
        row[f"{name}_ms"] = round(steps(job, (images, *batch[1:]), 40), 3)
    row["replays"] = job.step.replays
    row["ratio"] = round(row["torch_ms"] / row["graphed_ms"], 2)
    return row


def steps(job: Callable[[Any], Any], batch: Any, n: int) -> float:
    """Do `n` steps and return milliseconds per step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(n):
        job(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / n * 1e3


def end(how: str) -> None:
    """Leave the job as a user may: careful, without close(), by a name imported earlier, or not at all."""
    if how == "close":
        for step in KEPT:
            step.close()
    if how in ("close", "destroy"):
        dist.destroy_process_group()
    elif how == "imported":
        destroy_process_group()


def loop(args: argparse.Namespace, options: Sequence[str]) -> int:
    """Start, capture and end `args.loop` jobs, one after another; return how many of them failed."""
    failed = 0
    for k in range(args.loop):
        how = ENDS[k % len(ENDS)] if args.end == "all" else args.end
        start = time.monotonic()
        try:
            rows = launch(*options, "--end", how, ranks=args.ranks, timeout=60)
            (run,) = rows[0].values()
            verdict = f"exit 0, {run['replays']} replays"
        except JobError as error:
            verdict, failed = f"FAILED\n{error}\n", failed + 1
        print(f"run {k}: {verdict}, {time.monotonic() - start:.1f} s, ended by: {how}", flush=True)
    return failed


# ---------------------------------------------------------------------------------------------------------- fully_shard


class Shards(NamedTuple):
    """One way to shard a model."""

    model: str
    reshard: bool
    low_precision: bool


SHARDS = {
    "mlp": Shards("mlp", False, False),
    "mlp, resharded": Shards("mlp", True, False),
    "transformer, bfloat16": Shards("transformer", False, True),
    "transformer, bfloat16, resharded": Shards("transformer", True, True),
}


def sharded(way: Shards, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small sharded model, each block and the whole, and its optimizer."""
    torch.manual_seed(3)
    if way.model == "mlp":
        blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
    else:
        blocks = [nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(*blocks).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if way.low_precision else MixedPrecisionPolicy()
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=way.reshard, mp_policy=policy)
    on_device = {"fused": True, "capturable": device.type == "cuda"}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **on_device)


def probe(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Capture a sharded step bare, after 12 warm-ups, replay it 8 times, and compare with 20 eager steps.

    On the CPU the replays are eager steps: that tries the probe, not the capture.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    way = SHARDS[args.variant]
    x = torch.randn(8, 32, 256, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    stream = torch.cuda.Stream() if device.type == "cuda" else None

    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, optimizer = sharded(way, device)

        def body() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, body

    reference, eager = make()
    model, body = make()
    row: dict[str, Any] = {"rank": dist.get_rank(), "variant": args.variant, "captured": False}
    if stream is not None:
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(12):
            expected, got = eager(), body()
    if stream is not None:
        torch.cuda.synchronize()
    row["equal after warm-up"] = torch.equal(expected, got)
    replay: Callable[[], Any] = body
    if stream is not None:
        for param in model.parameters():
            param.grad = None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=args.capture_mode):
                got = body()
        except Exception as error:  # whatever it is, it is the finding
            lines = [line for line in str(error).splitlines() if line.strip()]
            return row | {"error": f"{type(error).__name__}: {' '.join(lines)[:600]}"}
        row["captured"], replay = True, graph.replay
    # One after the other: collectives of both at a time could meet in another order on another rank.
    with torch.cuda.stream(stream):
        for _ in range(8):
            expected = eager()
        if stream is not None:
            stream.synchronize()
        for _ in range(8):
            out = replay()
    if stream is None:
        got = out
    else:
        stream.synchronize()
    pairs = [(a.to_local(), b.to_local()) for a, b in zip(reference.parameters(), model.parameters(), strict=True)]
    row["last loss equal"] = torch.equal(expected, got)
    row["bitwise"] = all(torch.equal(a, b) for a, b in pairs)
    row["largest difference"] = max(float((a - b).abs().max()) for a, b in pairs)
    if stream is not None:
        with torch.cuda.stream(stream):
            row["eager_ms"] = round(steps(lambda _: eager(), None, 30), 3)
            row["graphed_ms"] = round(steps(lambda _: replay(), None, 30), 3)
        graph.reset()  # before the process group ends
    return row


def probe_all(args: argparse.Namespace) -> None:
    """Probe every way to shard in processes of its own, and print what happened."""
    for variant in SHARDS:
        options = ["--fsdp-probe", "--variant", variant, "--device", args.device, "--capture-mode", args.capture_mode]
        try:
            for row in launch(*options, "--end", "destroy", ranks=args.ranks, timeout=90):
                print(json.dumps(row), flush=True)
        except JobError as error:
            print(json.dumps({"variant": variant, "job": str(error)[-1500:]}), flush=True)


# ----------------------------------------------------------------------------------------------------------------- main


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="*", choices=ON_GPUS, help="train these instead, one after another")
    parser.add_argument("--model", choices=MODELS, default="net")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--calls", type=int, default=18)
    parser.add_argument("--policy", default="float32")
    parser.add_argument("--max-norm", type=float)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--windows", action="store_true", help="give the micro-batches of an optimizer step at once")
    parser.add_argument("--flush", action="store_true", help="end with a short window")
    parser.add_argument("--graph", choices=["auto", "emulate", "off", "torch"], nargs="+", default=["auto"])
    parser.add_argument("--overflows", type=int, nargs="*", default=[], help="calls that overflow on rank 1")
    parser.add_argument("--odd-calls", type=int, nargs="*", default=[], help="calls with a smaller batch on rank 1")
    parser.add_argument("--varies-from", type=int, help="call from which batches of rank 1 hold the call's number")
    parser.add_argument("--on-failure", choices=["eager", "raise"], default="eager")
    parser.add_argument("--failing-rank", type=int, default=-1)
    parser.add_argument("--failure", choices=["item", "capture"], default="item")
    parser.add_argument("--end", choices=[*ENDS, "all"], default="close")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds, for one job")
    parser.add_argument("--time", action="store_true", help="time the steps instead")
    parser.add_argument("--loop", type=int, help="this many jobs, one after another")
    parser.add_argument("--fsdp-probe", action="store_true")
    parser.add_argument("--variant", choices=SHARDS)
    parser.add_argument("--capture-mode", choices=["global", "thread_local", "relaxed"], default="thread_local")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if "RANK" in os.environ:
        device = join(args.device)
        if args.cases:
            return train_cases(args.cases, device)
        work = probe if args.fsdp_probe else timed if args.time else train_all
        try:
            row = work(args, device)
        except Exception:
            traceback.print_exc()
            # An interpreter that ends right after it joined sometimes aborts, as gloo's threads still run.
            os._exit(1)
        print(json.dumps(row), flush=True)
        if "error" in row:
            os._exit(0)  # how a process ends after a failed bare capture is not what the probe asks
        end(args.end)
    elif args.loop:
        model = "mlp" if args.model == "net" else args.model
        graph = "auto" if args.device == "cuda" else "emulate"
        return loop(args, ["--device", args.device, "--model", model, "--graph", graph])
    elif args.fsdp_probe:
        probe_all(args)
    else:
        for row in launch(*argv, ranks=args.ranks, timeout=args.timeout):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
