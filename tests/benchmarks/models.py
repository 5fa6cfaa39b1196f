"""Models that nobody here wrote, each under one line of graphed_step: are they eager's bits, and how fast is it.

    python tests/benchmarks/models.py --json FILE                 every model: checked, timed, as a table and as JSON
    python tests/benchmarks/models.py --only gpt2 bert --no-speed --policies float16 bfloat16

Vision models are torchvision's, language models those of transformers with random weights from a config. Nothing is
downloaded.
"""

import argparse
import copy
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

MAX_NORM = 1.0
LEARNING_RATE = 1e-4
CHECKED_STEPS = 8  # 3 of warm-up, then replays
NOISE_FACTOR = 3.0  # how much further from eager than eager runs are from each other, where they differ at all
WARM_UP_STEPS = 12
REPEATS = 5
Batch = tuple[Tensor, ...]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One model and what it is trained on.

    Attributes:
        package: what must be installed.
        build: makes the model, on the CPU.
        shape: of the inputs: (batch, channels, height, width) or (batch, tokens).
        labels: how many there are: classes or words.
        policy: the precision that it is timed in.
    """

    package: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    labels: int
    policy: str

    def batch(self, device: str, seed: int) -> Batch:
        """Return images and labels, or words."""
        made = torch.Generator().manual_seed(seed)
        if len(self.shape) == 2:
            return (torch.randint(self.labels, self.shape, generator=made).to(device),)
        images = torch.randn(self.shape, generator=made).to(device, memory_format=torch.channels_last)
        return images, torch.randint(self.labels, self.shape[:1], generator=made).to(device)

    def model(self, device: str) -> nn.Module:
        """Return the same model each time, in training mode, convolutions in channels-last layout."""
        torch.manual_seed(0)
        layout = torch.channels_last if len(self.shape) == 4 else torch.preserve_format
        return self.build().to(device, memory_format=layout).train()


def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
    """Return the loss of a classifier, or the one that a language model computes itself."""
    if len(batch) == 2:
        return F.cross_entropy(model(batch[0]), batch[1])
    loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


# --------------------------------------------------------------------------------------------------------------- models


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None)
    return model


def tiny_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def tiny_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    )


def tiny_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], stochastic_depth_prob=0.3, num_classes=10)


def attention_without_masks() -> str:
    """Return the name under which transformers finds its own SDPA attention, and no function that makes masks.

    With attn_implementation="sdpa" a causal model asks in every forward, `(...).all()`, whether its positions are of
    several sequences packed into one (transformers/masking_utils.py, 5.23): the host waits for the device. A capture
    skips the question and takes the general answer, a mask, and with it another kernel than eager. An attention that
    is registered without a mask function gets none: causal models then pass is_causal=True, which is the same mask.
    """
    from transformers import AttentionInterface, logging
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    logging.set_verbosity_error()  # a tiny vocabulary has not the special words of a config's defaults
    AttentionInterface.register("sdpa_without_masks", sdpa_attention_forward)
    return "sdpa_without_masks"


def gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation=attention_without_masks(), **sizes))


def bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(attn_implementation=attention_without_masks(), **sizes))


def llama(**sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(use_cache=False, attn_implementation=attention_without_masks(), **sizes))


LLAMA = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8}
TINY_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

CASES = {
    "resnet50": Case("torchvision", lambda: torchvision_model("resnet50"), (32, 3, 224, 224), 1000, "float16"),
    "vit_b_16": Case("torchvision", lambda: torchvision_model("vit_b_16"), (32, 3, 224, 224), 1000, "bfloat16"),
    "convnext_tiny": Case(
        "torchvision", lambda: torchvision_model("convnext_tiny"), (32, 3, 224, 224), 1000, "float16"
    ),
    "gpt2": Case("transformers", gpt2, (8, 256), 50257, "bfloat16"),  # the config's defaults: GPT-2 small
    "bert": Case("transformers", bert, (8, 256), 30522, "float16"),  # likewise BERT base
    "llama": Case("transformers", lambda: llama(num_key_value_heads=4, **LLAMA), (8, 256), 32000, "bfloat16"),
}
TINY_CASES = {
    "resnet": Case("torchvision", tiny_resnet, (4, 3, 32, 32), 10, "bfloat16"),
    "vit": Case("torchvision", tiny_vit, (2, 3, 32, 32), 10, "bfloat16"),
    "convnext": Case("torchvision", tiny_convnext, (2, 3, 32, 32), 10, "bfloat16"),
    "gpt2": Case("transformers", lambda: gpt2(**TINY_GPT2), (2, 16), 64, "bfloat16"),
    "bert": Case("transformers", lambda: bert(**TINY), (2, 16), 64, "bfloat16"),
    "llama": Case("transformers", lambda: llama(num_key_value_heads=2, **TINY), (2, 16), 64, "bfloat16"),
}


# ---------------------------------------------------------------------------------------------------------------- check


class Verdict(NamedTuple):
    """How a graphed run compares with eager ones of the same seed.

    Attributes:
        bitwise: whether all state is equal, bit by bit.
        difference: the largest difference of a tensor from the first eager run, as a share of its largest value.
        noise: the largest such difference between eager runs; 0.0 where the graphed run is bitwise.
        passed: bitwise, or eager itself is not and the graphed run is no further from it than NOISE_FACTOR times.
    """

    bitwise: bool
    difference: float
    noise: float
    passed: bool


def judge(graphed: State, eager: Sequence[State]) -> Verdict:
    """Compare a graphed run with the first eager run, and all eager runs with each other."""
    if not differing(graphed, eager[0]):
        return Verdict(True, 0.0, 0.0, True)
    difference = distance(graphed, eager[0])
    pairs = [(a, b) for i, a in enumerate(eager) for b in eager[:i]]
    noise = max((distance(a, b) for a, b in pairs if differing(a, b)), default=0.0)
    return Verdict(False, difference, noise, 0.0 < noise < math.inf and difference <= NOISE_FACTOR * noise)


def differing(left: State, right: State) -> list[str]:
    """Return the names of the tensors whose bits are not equal."""
    if left.keys() != right.keys():
        return sorted(left.keys() ^ right.keys())
    return [name for name in left if not torch.equal(_bytes(left[name]), _bytes(right[name]))]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def distance(left: State, right: State) -> float:
    """Return the largest difference of two tensors of one name, as a share of the largest value; inf for nan."""
    if left.keys() != right.keys():
        return math.inf
    shares = []
    for name in left:
        a, b = left[name].double(), right[name].double()
        shares.append(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).cpu())  # random state lies on the host
    return float(torch.stack(shares).max().nan_to_num(nan=math.inf, posinf=math.inf))


def check(case: Case, policy: str, device: str, graph: str) -> dict[str, Any]:
    """Train CHECKED_STEPS steps eagerly and with this kind of graph, and return the verdict and the counts."""
    start = case.model(device)
    strict = True
    try:
        with repeatable(strict):
            eager = [train(case, start, policy, device, "off")[0]]
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        strict = False  # a kernel has no deterministic form: measured against the noise of eager runs
        with repeatable(strict):
            eager = [train(case, start, policy, device, "off")[0]]
    with repeatable(strict):
        graphed, report = train(case, start, policy, device, graph)
        if differing(graphed, eager[0]):
            eager += [train(case, start, policy, device, "off")[0] for _ in range(2)]
    verdict = judge(graphed, eager)
    return {
        **verdict._asdict(),
        "differing": differing(graphed, eager[0])[:5],
        "deterministic": strict,
        "last_loss": float(graphed["losses"][-1]),
        "replays": report.replays,
        "skipped": report.skipped,
        "failure": report.failure,
        "graph_mib": round(report.bytes / 2**20, 1),
    }


def train(case: Case, start: nn.Module, policy: str, device: str, graph: str) -> tuple[State, ampkit.Report]:
    """Train a copy of the model; return its losses, parameters, buffers and optimizer state, and the step's report."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, policy=policy, max_norm=MAX_NORM, graph=graph)
    torch.manual_seed(5)
    losses = [step(*case.batch(device, seed)).loss for seed in range(CHECKED_STEPS)]
    state = {"losses": torch.stack(losses)}
    state |= {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for i, values in enumerate(optimizer.state.values()):
        state |= {f"{key} of parameter {i}": value for key, value in values.items() if isinstance(value, Tensor)}
    report = step.report()
    step.close()
    return state, report


@contextmanager
def repeatable(strict: bool) -> Iterator[None]:
    """Make kernels repeatable bit by bit: all of them or an error, or else those that can be.

    Attention is not repeatable unless strict: torch takes its deterministic kernels only where others would be errors.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---------------------------------------------------------------------------------------------------------------- speed


def speed(case: Case, policy: str) -> dict[str, float]:
    """Return milliseconds per step of torch's AMP loop and of graphed_step, on one batch that stays on the GPU."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
        eager, graphed = (median_ms(make(case, policy)) for make in (torch_amp, one_line))
    return {"eager_ms": round(eager, 3), "graphed_ms": round(graphed, 3), "ratio": round(eager / graphed, 2)}


def torch_amp(case: Case, policy: str) -> Callable[[], object]:
    """The loop of torch's AMP examples, with the fused optimizer."""
    model = case.model("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=policy == "float16")
    batch = case.batch("cuda", 0)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=getattr(torch, policy)):
            loss = loss_fn(model, *batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def one_line(case: Case, policy: str) -> Callable[[], object]:
    """The same step by graphed_step, which must have been captured to be timed."""
    model = case.model("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, policy=policy, max_norm=MAX_NORM, on_failure="raise")
    batch = case.batch("cuda", 0)
    return lambda: step(*batch)


def median_ms(step: Callable[[], object]) -> float:
    """Return the median over REPEATS of the mean over about 0.4 s of steps, after a warm-up, in milliseconds."""
    _seconds(step, WARM_UP_STEPS)
    n = max(5, int(0.4 / (_seconds(step, 5) / 5)))
    return statistics.median(_seconds(step, n) / n for _ in range(REPEATS)) * 1e3


def _seconds(step: Callable[[], object], n: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(n):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


# ----------------------------------------------------------------------------------------------------------------- main


def measure(name: str, policy: str, timed: bool) -> dict[str, Any]:
    """Return the row of one model: what it is, the verdict, and times if asked for."""
    case = CASES[name]
    row: dict[str, Any] = {"model": name, "policy": policy, "shape": list(case.shape)}
    if importlib.util.find_spec(case.package) is None:
        return row | {"missing": case.package}
    row |= check(case, policy, "cuda", "auto")
    torch.cuda.empty_cache()
    if timed:
        row |= speed(case, policy)
        torch.cuda.empty_cache()
    return row


def table_line(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    head = f"{row['model']:<14} {row['policy']:<9} {'x'.join(map(str, row['shape'])):<13}"
    if "missing" in row:
        return f"{head} {row['missing']} is not installed"
    ms = f"{row['eager_ms']:8.2f} {row['graphed_ms']:8.2f} {row['ratio']:5.2f}x" if "ratio" in row else f"{'':24}"
    bits = "yes" if row["bitwise"] else f"no: {row['difference']:.1e}, eager from eager {row['noise']:.1e}"
    problem = f"  not captured: {row['failure']}" if row["failure"] else ""
    return f"{head} {ms} {row['graph_mib']:9.1f}  {bits}{problem}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the rows there too; -: print JSON lines, no table")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", choices=["float16", "bfloat16"], help="None: one per model")
    parser.add_argument("--no-speed", action="store_true", help="check the bits alone")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; pytest tests/step/test_models.py tries small models on the CPU.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    rows = []
    if args.json != "-":
        print(
            f"{'model':<14} {'policy':<9} {'batch':<13} {'eager ms':>8} {'graph ms':>8} {'ratio':>6} graph MiB  bitwise"
        )
    for name in args.only:
        for policy in args.policies or [CASES[name].policy]:
            row = measure(name, policy, timed=not args.no_speed)
            rows.append(row)
            print(json.dumps(row) if args.json == "-" else table_line(row), flush=True)
    if args.json not in (None, "-"):
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        Path(args.json).write_text(json.dumps(about, indent=2) + "\n")
    return 0 if all(row.get("passed", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
