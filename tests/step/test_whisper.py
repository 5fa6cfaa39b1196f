"""Whisper of transformers: its layers are dropped by draws on the host (`layerdrop`)."""

import copy
import warnings
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic, training_state
from torch import Tensor, nn

import ampkit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", exc_type=ImportError)

Engine = tuple[str, str]


def make_whisper(layerdrop: float) -> nn.Module:
    torch.manual_seed(3)
    config = transformers.WhisperConfig(
        vocab_size=48,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=12,
        max_target_positions=8,
        encoder_layerdrop=layerdrop,
        decoder_layerdrop=layerdrop,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.WhisperForConditionalGeneration(config).train()
    return model


def loss_fn(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_features=features, labels=labels, use_cache=False).loss
    return loss


def batch(device: str, number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    features, labels = torch.randn(2, 8, 24, generator=made), torch.randint(3, 48, (2, 6), generator=made)
    return features.to(device), labels.to(device)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("layerdrop", "calls"), [(0.0, 8), (0.1, 24)])
def test_whisper_is_captured_whole(engine: Engine, layerdrop: float, calls: int) -> None:
    """R3: with layerdrop 0 one graph; with 0.1 the bits of the eager step in each call, the CPU generator in step."""
    device, graph = engine
    model = make_whisper(layerdrop).to(device)
    results = []
    with deterministic():
        for kind in (graph, "off"):
            mine = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, fused=True)
            step = ampkit.graphed_step(loss_fn, mine, optimizer, max_norm=1.0, graph=kind, capturing=True)
            torch.manual_seed(5)
            trace: list[Any] = []
            for number in range(calls):
                loss = step(*batch(device, number)).loss
                trace.append([loss, training_state(mine, optimizer, step.scaler)])
            results.append((trace, step.report()))
    (mine_trace, report), (eager_trace, _) = results
    for number, (mine_state, eager_state) in enumerate(zip(mine_trace, eager_trace, strict=True)):
        assert_same(mine_state, eager_state, f"call {number}")
    assert report.failure is None
    assert report.graphs >= 1
    if not layerdrop:
        assert (report.graphs, set(report.eager)) == (1, {"warm-up"})
        assert report.replays >= calls - 4  # the preflight may have to look twice
