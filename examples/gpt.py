"""A small GPT learns to write like Python's manual, whose text every Python has.

python examples/gpt.py      on a GPU steps become graphs; on a CPU these are emulated, and nothing is faster
"""

from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPH = "auto" if DEVICE == "cuda" else "emulate"
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16


class Block(nn.Module):
    """Attention to what came before, then a layer for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.last_norm(x))


class GPT(nn.Module):
    """Characters of ASCII in, the logits of the next character out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.tokens(text) + self.places(places))))


def loss_fn(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@torch.no_grad()
def write(model: nn.Module, begin: str, count: int) -> str:
    """Return a text that the model continues. An ordinary loop: evaluation needs no graph."""
    text = torch.tensor([*begin.encode()], device=DEVICE)[None]
    for _ in range(count):
        chances = model(text[:, -CONTEXT:])[0, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1)[None]], 1)
    return bytes(text[0].tolist()).decode()


def main(graph: str = GRAPH, steps: int = 100) -> list[float]:
    """Train; print and return the loss of every tenth step, and print what the model writes."""
    torch.manual_seed(0)
    manual = "\n".join(topics.topics.values()).encode("ascii", "ignore")
    text = torch.frombuffer(bytearray(manual), dtype=torch.uint8).long().to(DEVICE)
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    step = ampkit.graphed_step(
        loss_fn, model, optimizer, policy="bfloat16", max_norm=1.0, scheduler=scheduler, graph=graph
    )
    losses = []
    for i in range(steps):
        begins = torch.randint(len(text) - CONTEXT, (BATCH, 1), device=DEVICE)
        out = step(text[begins + torch.arange(CONTEXT + 1, device=DEVICE)])
        if (i + 1) % 10 == 0:
            losses.append(out.loss.item())  # waits for the device, so not in each step
            print(f"step {i + 1}: loss {losses[-1]:.3f}")
    print(repr(write(model, "The ", 60)))
    print(step.report())
    return losses


if __name__ == "__main__":
    main()
