"""What many_gpus.py trains, each model in its full size and in a small one: ResNet-50, GPT-2 and a Llama."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit._commands.bench.cases import GPT, WORDS

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """A model and the shape of its batches.

    Attributes:
        build: makes the model, on the device that `with torch.device(...)` names.
        shape: of a rank's inputs: (batch, channels, height, width), or (batch, tokens).
        labels: how many classes or words there are.
        sharded: whether it is split by `fully_shard`, each block and the rest. Otherwise it is under DDP.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    labels: int
    sharded: bool = False

    def on(self, device: torch.device) -> nn.Module:
        """Return the model with the same weights on every rank, images in channels-last layout."""
        torch.manual_seed(0)
        with device:
            model = self.build()
        return model.to(memory_format=torch.channels_last) if len(self.shape) == 4 else model

    def batch(self, device: torch.device, seed: int) -> Batch:
        """Return inputs, and a label for each image or word."""
        made = torch.Generator().manual_seed(seed)
        if len(self.shape) == 2:
            words = torch.randint(self.labels, (self.shape[0], self.shape[1] + 1), generator=made).to(device)
            return words[:, :-1].contiguous(), words[:, 1:].contiguous()
        images = torch.randn(self.shape, generator=made).to(device, memory_format=torch.channels_last)
        return images, torch.randint(self.labels, self.shape[:1], generator=made).to(device)


def loss_fn(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32, also of logits that `fully_shard` leaves in bfloat16."""
    return F.cross_entropy(model(inputs).float().flatten(0, -2), labels.flatten())


class Rotary(nn.Module):
    """Turns pairs of channels by an angle that grows with the position (Su et al. 2021)."""

    def __init__(self, channels: int, tokens: int) -> None:
        super().__init__()
        rates = 10_000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float32), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the queries or keys (batch, heads, tokens, channels), turned in float32."""
        first, second = x.float().chunk(2, -1)
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).type_as(x)


class Block(nn.Module):
    """Attention with fewer keys than queries, and SwiGLU, each behind an RMSNorm and with a residual connection."""

    def __init__(self, width: int, heads: int, keys: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.keys, channels = heads, keys, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, keys * channels, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.rotary = Rotary(channels, tokens)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self.rotary(self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        k = self.rotary(self.k(y).unflatten(-1, (self.keys, -1)).transpose(1, 2))
        v = self.v(y).unflatten(-1, (self.keys, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder as Llama's (Touvron et al. 2023). The defaults are the sizes of TinyLlama: 1.1 billion parameters."""

    def __init__(
        self,
        words: int = 32_000,
        width: int = 2048,
        layers: int = 22,
        heads: int = 32,
        keys: int = 4,
        hidden: int = 5632,
        tokens: int = 2048,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, keys, hidden, tokens) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, words, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def small_resnet() -> nn.Module:
    return torchvision.models.resnet.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10)


def small_llama() -> nn.Module:
    return Llama(words=64, width=32, layers=2, heads=4, keys=2, hidden=48, tokens=16)


MODELS = {
    "resnet50": Model(lambda: torchvision.models.resnet50(), (32, 3, 224, 224), 1000),
    "gpt2": Model(lambda: GPT(tokens=512), (8, 512), WORDS),
    "llama": Model(Llama, (2, 2048), 32_000, sharded=True),
    "llama-short": Model(Llama, (1, 1024), 32_000, sharded=True),
}
SMALL_LLAMA = Model(small_llama, (2, 16), 64, sharded=True)
SMALL = {
    "resnet50": Model(small_resnet, (4, 3, 32, 32), 10),
    "gpt2": Model(lambda: GPT(words=64, tokens=16, width=32, layers=2, heads=2), (2, 16), 64),
    "llama": SMALL_LLAMA,
    "llama-short": SMALL_LLAMA,
}
