"""A Trainer of transformers whose optimizer steps are graphs: one changed line, the class.

    python examples/transformers_trainer.py     needs transformers and accelerate: pip install 'ampkit[transformers]'

A small GPT-2 learns to count. On a GPU steps become graphs; on a CPU these are emulated, and nothing is faster.
"""

import tempfile
from typing import Any, ClassVar

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ampkit.transformers import GraphedTrainerMixin

ON_CUDA = torch.cuda.is_available()
GRAPH = "auto" if ON_CUDA else "emulate"
LENGTH = 16


class GraphedTrainer(GraphedTrainerMixin, Trainer):
    """The Trainer as it is, with graphs."""

    graph_options: ClassVar[dict[str, Any]] = {"graph": GRAPH}  # leave this line out on a GPU


def main(trainer_class: type[Trainer] = GraphedTrainer, steps: int = 30) -> list[float]:
    """Train; print and return the logged losses. `Trainer` itself returns the same ones."""
    set_seed(0)
    begins = torch.randint(64 - LENGTH, (256,))
    data = [{"input_ids": ids, "labels": ids} for ids in begins[:, None] + torch.arange(LENGTH)]
    sizes = {"vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=2**-7,
            max_grad_norm=0.0,  # clipping is captured too; in the optimizer's kernel it may round in another order
            bf16=True,
            use_cpu=not ON_CUDA,
            max_steps=steps,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=ON_CUDA,
        )
        trainer = trainer_class(model, arguments, train_dataset=data)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"losses {', '.join(f'{float(loss):.3f}' for loss in losses)}")
    if isinstance(trainer, GraphedTrainer):
        print(trainer.graph_report())
    return losses


if __name__ == "__main__":
    main()
