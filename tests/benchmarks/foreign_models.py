"""Models of transformers with their default flags under one line of graphed_step: are they eager's bits, and how fast.

    python tests/benchmarks/foreign_models.py --json FILE      every model in bfloat16 and float32, checked and timed
    python tests/benchmarks/foreign_models.py --models gpt2 t5 --policies float32 --no-speed
    python tests/benchmarks/foreign_models.py --graph emulate  without a GPU: tiny models, and no times

Unlike the models of tests/benchmarks/models.py, nothing here goes around what these models do by default: the attention
that transformers picks, the masks that it makes, `use_cache`, dropout. The weights are random ones from a config, of
reduced sizes. Nothing is downloaded. Both runs start from the same seed and see the same batches.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import State, differing, distance, repeatable
from torch import Tensor, nn

import ampkit

LEARNING_RATE = 1e-4
POLICIES = ("bfloat16", "float32")
WARM_UP_STEPS = 8  # before times are taken: the graphed step has captured by then
REPEATS = 7
SECONDS = 0.25  # of steps per repeat
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large a model is and what it is trained on."""

    hidden: int
    heads: int
    layers: int
    words: int
    batch: int
    length: int  # tokens
    pixels: int  # side of an image

    def tokens(self, made: torch.Generator) -> Tensor:
        return torch.randint(3, self.words, (self.batch, self.length), generator=made)

    def images(self, made: torch.Generator) -> Tensor:
        return torch.randn(self.batch, 3, self.pixels, self.pixels, generator=made)


SIZES = {"cuda": Sizes(512, 8, 6, 32000, 8, 256, 224), "cpu": Sizes(32, 2, 2, 64, 2, 16, 32)}


# --------------------------------------------------------------------------------------------------------------- models


def gpt2(size: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.words,
            n_embd=size.hidden,
            n_head=size.heads,
            n_layer=size.layers,
            n_positions=size.length,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def llama(size: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=size.heads // 2, **_common(size)))


def bert(size: Sizes) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_common(size)))


def t5(size: Sizes) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=size.words,
            d_model=size.hidden,
            d_kv=size.hidden // size.heads,
            d_ff=4 * size.hidden,
            num_layers=size.layers,
            num_heads=size.heads,
            decoder_start_token_id=0,
        )
    )


def vit_mae(size: Sizes) -> nn.Module:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    return ViTMAEForPreTraining(
        ViTMAEConfig(
            image_size=size.pixels,
            patch_size=16 if size.pixels > 64 else 8,
            decoder_hidden_size=size.hidden // 2,
            decoder_num_attention_heads=size.heads,
            decoder_num_hidden_layers=2,
            decoder_intermediate_size=2 * size.hidden,
            **_common(size, words=False),
        )
    )


def clip(size: Sizes) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(
        **_common(size), max_position_embeddings=size.length, bos_token_id=1, eos_token_id=2, projection_dim=size.hidden
    )
    vision = CLIPVisionConfig(
        image_size=size.pixels,
        patch_size=16 if size.pixels > 64 else 8,
        projection_dim=size.hidden,
        **_common(size, words=False),
    )
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=size.hidden))


def _common(size: Sizes, words: bool = True) -> dict[str, int]:
    """Return the sizes under the names that most configs have for them."""
    sizes = {
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "intermediate_size": 4 * size.hidden,
    }
    return sizes | ({"vocab_size": size.words} if words else {})


def _language(size: Sizes, made: torch.Generator) -> Batch:
    tokens = size.tokens(made)
    return {"input_ids": tokens, "labels": tokens}


def _translation(size: Sizes, made: torch.Generator) -> Batch:
    return {"input_ids": size.tokens(made), "labels": size.tokens(made)}


def _pictures(size: Sizes, made: torch.Generator) -> Batch:
    return {"pixel_values": size.images(made)}


def _pairs(size: Sizes, made: torch.Generator) -> Batch:
    return {"input_ids": size.tokens(made), "pixel_values": size.images(made)}


MODELS: dict[str, tuple[Callable[[Sizes], nn.Module], Callable[[Sizes, torch.Generator], Batch], dict[str, bool]]] = {
    "gpt2": (gpt2, _language, {}),
    "llama": (llama, _language, {}),
    "bert": (bert, _language, {}),
    "t5": (t5, _translation, {}),
    "vit_mae": (vit_mae, _pictures, {}),
    "clip": (clip, _pairs, {"return_loss": True}),
}


class Case:
    """One model on one device: makes the same weights and batches each time.

    Args:
        name: in MODELS.
        device: "cuda", or "cpu".
        size: how large it is; None for what fits the device.
    """

    def __init__(self, name: str, device: str, size: Sizes | None = None) -> None:
        build, self._sample, self._options = MODELS[name]
        self.device, self._size = device, size or SIZES[device]
        torch.manual_seed(0)
        self._start = build(self._size).to(device).train()

    def batch(self, seed: int) -> Batch:
        """Return the batch of this number."""
        made = torch.Generator().manual_seed(seed)
        return {name: tensor.to(self.device) for name, tensor in self._sample(self._size, made).items()}

    def step(self, policy: str, graph: str) -> tuple[ampkit.GraphedStep, nn.Module, torch.optim.Optimizer]:
        """Return a step over a fresh copy of the model, the copy, and its optimizer."""
        model = copy.deepcopy(self._start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        step = ampkit.graphed_step(self._loss, model, optimizer, policy=policy, graph=graph)
        return step, model, optimizer

    def _loss(self, model: nn.Module, **batch: Tensor) -> Tensor:
        loss: Tensor = model(**batch, **self._options).loss
        return loss


# ---------------------------------------------------------------------------------------------------------------- check


def train(case: Case, policy: str, graph: str, steps: int) -> tuple[State, ampkit.Report]:
    """Train from the seed; return losses, parameters, buffers, moments and random state, and the step's report."""
    step, model, optimizer = case.step(policy, graph)
    torch.manual_seed(5)
    losses = [step(**case.batch(seed)).loss for seed in range(steps)]
    state = {"losses": torch.stack(losses), "cpu random state": torch.get_rng_state()}
    if case.device == "cuda":
        state["cuda random state"] = torch.cuda.get_rng_state()
    state |= {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for i, values in enumerate(optimizer.state.values()):
        state |= {f"{key} of parameter {i}": value.clone() for key, value in values.items()}
    report = step.report()
    step.close()
    return state, report


def check(case: Case, policy: str, graph: str, steps: int) -> dict[str, Any]:
    """Compare a graphed run with an eager one under deterministic algorithms; where they differ, eager with itself."""
    try:
        return _check(case, policy, graph, steps, strict=True)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return _check(case, policy, graph, steps, strict=False)  # an operation has no deterministic form


def _check(case: Case, policy: str, graph: str, steps: int, strict: bool) -> dict[str, Any]:
    with repeatable(strict), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=ampkit.AmpkitWarning)
        eager, _ = train(case, policy, "off", steps)
        graphed, report = train(case, policy, graph, steps)
        names = differing(graphed, eager)
        again = train(case, policy, "off", steps)[0] if names else eager
    said = [str(warning.message) for warning in caught if issubclass(warning.category, ampkit.AmpkitWarning)]
    return {
        "bitwise": not names,
        "distance": distance(graphed, eager) if names else 0.0,
        "eager_from_eager": distance(again, eager) if differing(again, eager) else 0.0,
        "deterministic": strict,
        "differing": names[:5],
        "last_loss": float(graphed["losses"][-1]),
        "captures": report.captures,
        "replays": report.replays,
        "failure": report.failure,
        "warnings": said,
    }


# ---------------------------------------------------------------------------------------------------------------- speed


def speed(case: Case, policy: str, graph: str) -> dict[str, Any]:
    """Return milliseconds per step, eager and graphed: the median of the repeats, the smallest and the largest."""
    found: dict[str, Any] = {}
    for name, kind in (("eager", "off"), ("graphed", graph)):
        step, *_ = case.step(policy, kind)
        batch = case.batch(0)
        times = repeats(lambda step=step, batch=batch: step(**batch))
        found[f"{name}_ms"] = round(statistics.median(times), 3)
        found[f"{name}_range_ms"] = [round(min(times), 3), round(max(times), 3)]
        step.close()
        del step
        torch.cuda.empty_cache()
    return found


def repeats(step: Callable[[], object], number: int = REPEATS, seconds: float = SECONDS) -> list[float]:
    """Return the mean time of a step in each repeat, in milliseconds, between two waits for the device."""
    _seconds(step, WARM_UP_STEPS)
    count = max(5, int(seconds / (_seconds(step, 5) / 5)))
    return [1e3 * _seconds(step, count) / count for _ in range(number)]


def _seconds(step: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


# ----------------------------------------------------------------------------------------------------------------- main


def line(row: dict[str, Any]) -> str:
    """Return one line of the table, and one for each thing that the step said."""
    bits = "not repeatable in eager; " * (not row["deterministic"])
    bits += "equal" if row["bitwise"] else f"{row['distance']:.1e} (eager from eager {row['eager_from_eager']:.1e})"
    text = f"{row['model']:<8} {row['policy']:<9} {row['captures']:>3} {row['replays']:>3}  "
    if "eager_ms" in row:
        for name in ("eager", "graphed"):
            low, high = row[f"{name}_range_ms"]
            text += f"{row[f'{name}_ms']:8.2f} ({low:.2f} to {high:.2f})  "
        text += f"{row['eager_ms'] / row['graphed_ms']:5.2f}x  "
    said = [row["failure"]] if row["failure"] else row["warnings"]
    return "\n    ".join([text + bits, *said])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--graph", choices=["auto", "emulate", "off"], default="auto", help="of graphed_step")
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of the comparison, more than 4")
    parser.add_argument("--no-speed", action="store_true", help="check the bits alone; as without a GPU")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows there too")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and args.graph == "auto":
        parser.error("torch finds no CUDA device here. Pass --graph emulate.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    rows = []
    print(f"{'model':<8} {'policy':<9} captures, replays, [ms eager (range), ms graphed (range), ratio,] bits")
    for name in args.models:
        case = Case(name, device)
        for policy in args.policies:
            row = {"model": name, "policy": policy, **check(case, policy, args.graph, args.steps)}
            if device == "cuda" and not args.no_speed:
                row |= speed(case, policy, args.graph)
            rows.append(row)
            print(line(row), flush=True)
    equal = sum(row["bitwise"] for row in rows)
    replayed = sum(row["replays"] > 0 for row in rows)
    print(f"{len(rows)} runs: {equal} have the bits of eager, {replayed} were captured")
    if args.json:
        about = {"torch": torch.__version__, "transformers": _version(), "device": _device_name(device), "rows": rows}
        args.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0 if equal == len(rows) else 1


def _version() -> str:
    import transformers

    version: str = transformers.__version__
    return version


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
