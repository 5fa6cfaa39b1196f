"""GPT-2 by the Trainer of transformers, by accelerate and by Fabric, as they are and with ampkit: bits, milliseconds.

    PYTHONPATH=. python tests/benchmarks/trainers.py                        GPT-2 124M on a GPU
    PYTHONPATH=. python tests/benchmarks/trainers.py --device cpu --tiny    does it run

Needs transformers, accelerate and lightning; a library that is missing is left out. bfloat16, two micro-batches per
optimizer step, AdamW with fused=True. First the weights behind some steps with ampkit beside those without, bit by bit,
under deterministic algorithms, without clipping and with a rate that float32 represents. Then milliseconds per
optimizer step, the median over repeats, with the norm clipped to 1.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import ampkit
from tests.benchmarks.models import differing, repeatable

ACCUMULATE, CHECKED, WARM, TIMED, REPEATS, RATE = 2, 12, 24, 20, 5, 2**-13
SIZES = {"vocab_size": 50257, "n_positions": 1024}
TINY = {"vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 16}
State = dict[str, Tensor]


class Clock:
    """Notes the time behind every `TIMED` optimizer steps, once `WARM` are done."""

    def __init__(self, device: str) -> None:
        self._device, self._steps = device, 0
        self._marks: list[float] = []

    def tick(self) -> None:
        self._steps += 1
        if self._steps >= WARM and (self._steps - WARM) % TIMED == 0:
            if self._device == "cuda":
                torch.cuda.synchronize()
            self._marks.append(time.perf_counter())

    def text(self) -> str:
        found = [1e3 * (b - a) / TIMED for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return f"{statistics.median(found):9.2f} ({min(found):.2f} to {max(found):.2f}) ms" if found else ""


class Case:
    """A model and its batches, and how long it trains. `clip` is the greatest norm, 0 for no clipping."""

    def __init__(self, device: str, tiny: bool, steps: int, clip: float) -> None:
        self.device, self.steps, self.clip = device, steps, clip
        self.on_cuda = device == "cuda"
        self.graph = "auto" if self.on_cuda else "emulate"
        self.batch, self.length = (2, 16) if tiny else (8, 256)
        self._sizes = TINY if tiny else SIZES
        self.clock = Clock(device)

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        return GPT2LMHeadModel(GPT2Config(**self._sizes, **ends, use_cache=False)).to(self.device)  # type: ignore[no-any-return]

    def texts(self) -> list[State]:
        """Return the samples of all micro-batches."""
        made = torch.Generator().manual_seed(1)
        shape = (self.steps * ACCUMULATE * self.batch, self.length)
        ids = torch.randint(3, self._sizes["vocab_size"], shape, generator=made)
        return [{"input_ids": row, "labels": row} for row in ids]

    def batches(self) -> list[Tensor]:
        rows = torch.stack([text["input_ids"] for text in self.texts()])
        return [*rows.to(self.device).split(self.batch)]


def by_trainer(case: Case, graphed: bool) -> tuple[nn.Module, str]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ampkit.transformers import GraphedTrainerMixin

    class GraphedTrainer(GraphedTrainerMixin, Trainer):  # type: ignore[misc]
        graph_options: ClassVar[dict[str, Any]] = {"graph": case.graph}

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            case.clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=case.batch,
            gradient_accumulation_steps=ACCUMULATE,
            max_steps=case.steps,
            max_grad_norm=case.clip,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            bf16=True,
            use_cpu=not case.on_cuda,
            dataloader_pin_memory=case.on_cuda,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        kind = GraphedTrainer if graphed else Trainer
        trainer = kind(case.model(), arguments, train_dataset=case.texts(), callbacks=[Ticks()])
        trainer.train()
    return trainer.model, trainer.graph_report().outcome if graphed else ""


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def by_accelerate(case: Case, graphed: bool) -> tuple[nn.Module, str]:
    from accelerate import Accelerator
    from accelerate.state import GradientState

    GradientState._reset_state()  # that of a Trainer before, which has come to the end of its batches
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE, cpu=not case.on_cuda)
    net = case.model()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=RATE, fused=True))
    options: dict[str, Any] = {"max_norm": case.clip or None, "accumulate": ACCUMULATE, "graph": case.graph}
    step = ampkit.graphed_step(loss_of, model, optimizer.optimizer, **options) if graphed else None
    for number, ids in enumerate(case.batches(), 1):
        if step is not None:
            step(ids)
        else:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
        if number % ACCUMULATE == 0:
            case.clock.tick()
    return net, "" if step is None else step.report().outcome


def by_fabric(case: Case, graphed: bool) -> tuple[nn.Module, str]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=case.device, devices=1, precision="bf16-mixed")
    net = case.model()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=RATE, fused=True))

    def train_step(*micro_batches: Tensor) -> None:
        optimizer.zero_grad()
        for ids in micro_batches:
            fabric.backward(loss_of(model, ids) / ACCUMULATE)
        if case.clip:
            fabric.clip_gradients(model, optimizer, max_norm=case.clip, error_if_nonfinite=False)
        optimizer.step()

    decorator = ampkit.graphed(modules=(model,), optimizers=(optimizer.optimizer,), graph=case.graph)
    step: Callable[..., Any] = decorator(train_step) if graphed else train_step
    batches = case.batches()
    for first in range(0, len(batches), ACCUMULATE):
        step(*batches[first : first + ACCUMULATE])
        case.clock.tick()
    return net, step.report().outcome if graphed else ""  # type: ignore[attr-defined]


WAYS = {"transformers": by_trainer, "accelerate": by_accelerate, "lightning": by_fabric}
NEEDS = {"transformers": ("transformers", "accelerate"), "accelerate": ("transformers", "accelerate")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--libraries", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__, flush=True)
    for library in args.libraries:
        train = WAYS[library]
        if not all(map(importlib.util.find_spec, NEEDS.get(library, ("transformers", library)))):
            print(f"{library:13s} is not installed", flush=True)
            continue
        with repeatable(strict=True):
            states = []
            for graphed in (False, True):
                torch.manual_seed(5)
                model, outcome = train(Case(args.device, args.tiny, CHECKED, 0.0), graphed)
                states.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        print(f"{library:13s} bits: {outcome}, differing: {differing(*states)[:3]}", flush=True)
        for graphed in (False, True):
            case = Case(args.device, args.tiny, WARM + TIMED * REPEATS, 1.0)
            _, outcome = train(case, graphed)
            print(f"{library:13s} {'ampkit' if graphed else 'as it is':9s}{case.clock.text()} {outcome}", flush=True)


if __name__ == "__main__":
    main()
