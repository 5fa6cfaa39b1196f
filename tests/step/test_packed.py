"""Texts packed into one row of fixed capacity: one graph for all lengths, with SDPA and with flex attention."""

import functools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ampkit

CAPACITY, MOST, WORDS = 64, 8, 50
KINDS = ["sdpa", "flex"]
# torch's own, of flex_attention that is not compiled
EAGER_FLEX = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor that is not a leaf"
)


def pack(texts: list[Tensor]) -> dict[str, Tensor]:
    """Return texts in a row of CAPACITY tokens. What is left is one more document, and has no labels."""
    ends = torch.tensor([0, *map(len, texts)]).cumsum(0)
    room = CAPACITY - int(ends[-1])
    labels = [F.pad(text[1:], (0, 1), value=-100) for text in texts]  # the last token of a text has no next one
    return {
        "tokens": F.pad(torch.cat(texts), (0, room)),
        "labels": F.pad(torch.cat(labels), (0, room), value=-100),
        "cu_seqlens": F.pad(ends, (0, MOST - len(texts)), value=CAPACITY),
    }


def packed_batches(count: int, seed: int = 0) -> list[list[Tensor]]:
    """Return texts of random lengths, as many as fit."""
    rng, found = random.Random(seed), []
    torch.manual_seed(seed)
    for _ in range(count):
        texts: list[Tensor] = []
        while len(texts) < MOST - 1 and sum(map(len, texts)) < CAPACITY:
            length = min(rng.randint(3, 25), CAPACITY - sum(map(len, texts)))
            texts.append(torch.randint(1, WORDS, (length,)))
        found.append(texts)
    return found


@functools.cache
def flex(on_cuda: bool) -> Any:
    """Return flex_attention, compiled on CUDA: else its backward, sdpa_dense_backward, copies a host number."""
    return torch.compile(flex_attention) if on_cuda else flex_attention


class Packed(nn.Module):
    """One layer of attention within each document."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.qkv, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, 96), nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        size = len(tokens)
        place = torch.arange(size, device=tokens.device)
        document = torch.bucketize(place, cu_seqlens[1:], right=True)
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).view(1, size, 3, 2, 16).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            mask = (document[:, None] == document) & (place[:, None] >= place)
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:

            def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return (document[i] == document[j]) & (i >= j)

            mask = create_block_mask(within, None, None, size, size, device=str(tokens.device))
            a = flex(tokens.is_cuda)(q, k, v, block_mask=mask)
        return self.head(x + a.transpose(1, 2).reshape(size, 32))


def loss_fn(model: nn.Module, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens, cu_seqlens), labels)  # the mean over labels other than -100


def make(kind: str, device: str, **options: Any) -> tuple[nn.Module, ampkit.GraphedStep]:
    torch.manual_seed(1)
    model = Packed(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, ampkit.graphed_step(loss_fn, model, optimizer, **options)


# On the CPU flex_attention has no backward.
CASES = [("sdpa", "cpu"), *(pytest.param(kind, "cuda", marks=pytest.mark.cuda) for kind in KINDS)]


@EAGER_FLEX
@pytest.mark.parametrize(("kind", "device"), CASES)
def test_one_graph_serves_all_lengths(kind: str, device: str) -> None:
    """Other lengths and numbers of texts in each call: one capture, and the bits of eager calls."""
    found = []
    for how in ("off", "auto" if device == "cuda" else "emulate"):
        with taped() if how == "emulate" else nullcontext():
            model, step = make(kind, device, graph=how)
            losses = [
                step(**{name: tensor.to(device) for name, tensor in pack(texts).items()}).loss
                for texts in packed_batches(12)
            ]
            found.append([*losses, *model.parameters()])
            report = step.report()
    assert all(map(torch.equal, *found))
    assert (report.captures, report.replays, report.failure) == (1, 9, None)


@EAGER_FLEX
def test_a_block_mask_is_made_anew_in_each_replay() -> None:
    """The forward with flex attention is captured, with the mask that the lengths of each call make."""
    model, _ = make("flex", "cpu", graph="off")
    evaluate = ampkit.graphed(modules=(model,), graph="emulate")(lambda batch: loss_fn(model, **batch))
    with torch.no_grad():  # a tape is a dispatch mode, under which torch would compile flex_attention anew
        for texts in packed_batches(8):
            assert torch.equal(evaluate(pack(texts)), loss_fn(model, **pack(texts)))
        assert (evaluate.captures, evaluate.replays) == (1, 5)


@EAGER_FLEX
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_sees_itself_alone(kind: str) -> None:
    """The loss is the mean over the texts one by one, and does not see what stands in the rest of the row."""
    model, _ = make(kind, "cpu", graph="off")
    model = model.double()
    (texts,) = packed_batches(1, seed=3)
    texts = texts[:3]
    batch = pack(texts)
    loss = loss_fn(model, **batch)
    end = sum(map(len, texts))
    one_by_one, count = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        alone = torch.tensor([0, len(text)])
        one_by_one += F.cross_entropy(model(text, alone)[:-1], text[1:], reduction="sum")
        count += len(text) - 1
    torch.testing.assert_close(loss, one_by_one / count, rtol=1e-12, atol=1e-12)
    batch["tokens"][end:] = 7
    assert torch.equal(loss_fn(model, **batch), loss)
