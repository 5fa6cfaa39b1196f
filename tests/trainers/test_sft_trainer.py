"""TRL's SFTTrainer with `GraphedTrainerMixin`: in parts, with the bits and the logged figures of SFTTrainer."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import assert_same
from models import repeatable
from trainer_setups import graphed, state_of

import ampkit

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")


def trained(kind: type) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2, use_cache=False))
    arguments = trl.SFTConfig(
        "output",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        logging_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    made = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 64, (22, 2, 12), generator=made).tolist()
    data = datasets.Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in rows])
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<p>": 0, "<e>": 1, "<u>": 2}, unk_token="<u>"))
    ends = {"pad_token": "<p>", "eos_token": "<e>", "unk_token": "<u>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends)
    trainer = kind(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    figures = ("entropy", "mean_token_accuracy", "num_tokens")
    return trainer, {
        **state_of(trainer),
        "figures": [[row[name] for name in figures if name in row] for row in trainer.state.log_history],
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of TRL and datasets
def test_equals_sft_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untimed: None) -> None:
    """Its `compute_loss` reads figures on the host, so its modules are captured one by one."""
    monkeypatch.chdir(tmp_path)
    python, of_numpy = random.getstate(), numpy.random.get_state()  # the Trainer seeds both
    with repeatable(strict=True):
        with pytest.warns(ampkit.CaptureWarning, match="num_tokens_in_batch"):
            trainer, state = trained(graphed(trl.SFTTrainer, graph="emulate"))
        _, plain = trained(trl.SFTTrainer)
    random.setstate(python)
    numpy.random.set_state(of_numpy)
    assert_same(state, plain)
    report = str(trainer.graph_report())
    assert "model.layers.0, model.layers.1" in report
    assert "the update of the parameters is one graph" in report
