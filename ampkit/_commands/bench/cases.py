"""What the benchmark trains: models, losses, optimizers and batches, built in or made by the user's function."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._errors import UsageError
from ..._text import type_text
from ..._torch.tensors.tree import tree_flatten, tree_unflatten
from ..users_function import takes

Batch = tuple[Any, ...]
TOKENS = 256  # per sequence of the language model
WORDS = 50257  # the vocabulary of GPT-2, which no power of two divides
INPUTS = {
    "device": "batches lie on the device",
    "prefetch": "batches from pinned memory by ampkit.prefetch",
    "uint8": "uint8 images from pinned memory by ampkit.prefetch, decoded and normalised on the device",
}
# Per channel of ImageNet, where 1 is the brightest, as in torchvision's reference training (transforms.Normalize).
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class CaseError(UsageError):
    """What the user's function returned cannot be trained."""


@dataclass(frozen=True)
class Case:
    """A model, its loss, optimizer and batches. Model and batches are in host memory."""

    loss_fn: Callable[..., Tensor]  # loss_fn(model, *batch) returns the loss, a tensor of shape ()
    model: nn.Module  # copied for each variant, so that all start from the same weights
    # optimizer(params) makes torch's default implementation, optimizer(params, fused=True) the fused one.
    optimizer: Callable[..., torch.optim.Optimizer]
    batches: Sequence[Batch]  # used in order, again and again
    decode: Callable[[Batch], Batch] | None = None  # makes the arguments of `loss_fn` of a batch on the device

    @property
    def batch_size(self) -> int:
        """The first dimension of the first tensor of a batch."""
        tensors = (leaf for leaf in tree_flatten(self.batches[0])[0] if isinstance(leaf, Tensor) and leaf.dim())
        return next((len(tensor) for tensor in tensors), 1)


def ready(case: Case, dtype: torch.dtype, device: torch.device, source: str = "prefetch") -> Case:
    """Return the case with its batches on the device or in pinned memory, and floating tensors in this dtype.

    The source is a key of `INPUTS`. With "uint8", images become uint8 ones, which `decode` normalises on the device.

    Raises:
        CaseError: if the source is "uint8" and the case has no images.
    """
    first = tree_flatten(case.batches[0])[0]
    floats = {i for i, leaf in enumerate(first) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    images = {i for i in floats if source == "uint8" and first[i].dim() == 4 and first[i].shape[1] == 3}
    if source == "uint8" and not images:
        raise CaseError("--input uint8: the batches contain no images, which are floating tensors (N, 3, H, W).")

    def leaf_ready(i: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if i in images:  # in the format of image decoders: (N, H, W, 3), from 0 to 255
            pixels = leaf.float().permute(0, 2, 3, 1) * torch.tensor(STD) + torch.tensor(MEAN)
            leaf = (255 * pixels).round().clamp(0, 255).to(torch.uint8).contiguous()
        elif leaf.is_floating_point():
            leaf = leaf.to(dtype)
        if source == "device":
            return leaf.to(device)
        return leaf.pin_memory() if device.type == "cuda" else leaf

    batches = [_map_leaves(leaf_ready, batch) for batch in case.batches]
    decode = None
    if images:  # normalise them, each with one kernel, to images in channels_last
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
        scale, shift = (part.to(device, dtype) for part in (1 / (255 * std), -mean / std))
        decode = functools.partial(
            _map_leaves, lambda i, leaf: torch.addcmul(shift, leaf.permute(0, 3, 1, 2), scale) if i in images else leaf
        )
    return replace(case, batches=batches, decode=decode)


def _map_leaves(fn: Callable[[int, Any], Any], batch: Batch) -> Batch:
    leaves, tree = tree_flatten(batch)
    mapped: Batch = tree_unflatten([fn(i, leaf) for i, leaf in enumerate(leaves)], tree)
    return mapped


Maker = Callable[..., Case]  # maker(batch_size, *, seed, count): the seed of weights and data, the number of batches


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _case(build: Callable[[], nn.Module], draw: Callable[[torch.Generator], Batch], seed: int, count: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    batches = [draw(generator) for _ in range(count)]
    optimizer = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Case(_loss, build(), optimizer, batches)


def _mlp() -> nn.Module:
    layers = [nn.Linear(512, 512) for _ in range(16)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # with torch's default, 17 layers learn nothing
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(512, 10))


def _relu_mlp(widths: tuple[int, ...]) -> nn.Module:
    parts: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # as in `_mlp`
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _trained_by_adamw(batch: int, *, widths: tuple[int, ...], seed: int = 0, count: int = 4) -> Case:
    """Return a case that people train in JAX: a small MLP, and AdamW."""
    case = _classifier(functools.partial(_relu_mlp, widths), widths[:1], 10, batch, seed=seed, count=count)
    return replace(case, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))


def _torchvision(name: str, classes: int = 1000) -> Any:
    try:
        import torchvision
    except ImportError as error:
        raise ImportError(f"{name} needs torchvision: pip install 'ampkit[examples]'") from error
    model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    return model.to(memory_format=torch.channels_last)


def _resnet18_cifar() -> nn.Module:
    model = _torchvision("resnet18", 10)
    # The CIFAR stem of He et al. 2016, section 4.2: no stride and no pooling before the first block.
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]  # a module


def _classifier(
    build: Callable[[], nn.Module], image: tuple[int, ...], classes: int, batch: int, *, seed: int = 0, count: int = 4
) -> Case:
    layout = torch.channels_last if len(image) == 3 else torch.contiguous_format

    def draw(generator: torch.Generator) -> Batch:
        inputs = torch.randn(batch, *image, generator=generator).contiguous(memory_format=layout)
        return inputs, torch.randint(classes, (batch,), generator=generator)

    return _case(build, draw, seed, count)


class _Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and with a residual connection, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self._heads, width // self._heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]  # a tensor


class GPT(nn.Module):
    """A decoder like GPT-2 (Radford et al. 2019), without dropout; the defaults are the sizes of GPT-2 small.

    The output layer uses the weights of the embedding.
    """

    def __init__(
        self, words: int = WORDS, tokens: int = TOKENS, width: int = 768, layers: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Parameter(torch.empty(tokens, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the word that follows each token: (batch, tokens, words)."""
        x = self.blocks(self.words(tokens) + self.positions[: tokens.shape[1]])
        return F.linear(self.norm(x), self.words.weight)


def _language(batch: int, *, seed: int = 0, count: int = 4) -> Case:
    # Small numbers are more frequent than large ones, as some words are, so that there is something to learn.
    return _case(
        GPT,
        lambda generator: tuple((torch.rand(batch, TOKENS, generator=generator) ** 8 * WORDS).long() for _ in range(2)),
        seed,
        count,
    )


CASES: dict[str, Maker] = {
    "mlp": functools.partial(_classifier, _mlp, (512,), 10),
    "mlp-tiny": functools.partial(_trained_by_adamw, widths=(32, 64, 64, 10)),
    "mlp-small": functools.partial(_trained_by_adamw, widths=(64, 256, 256, 256, 10)),
    "mlp-deep": functools.partial(_trained_by_adamw, widths=(512,) * 18),
    "resnet18-cifar": functools.partial(_classifier, _resnet18_cifar, (3, 32, 32), 10),
    "resnet50": functools.partial(_classifier, functools.partial(_torchvision, "resnet50"), (3, 224, 224), 1000),
    "vit_b_16": functools.partial(_classifier, functools.partial(_torchvision, "vit_b_16"), (3, 224, 224), 1000),
    "gpt2-like": _language,
}

BATCH = 64  # the batch size if none is given
BATCHES = {"mlp-small": 256}  # the same for models that are usually trained on another one

# -------------------------------------------------------------------------------------------------- the user's function

RETURNED = (
    "(loss_fn, model, optimizer, batches): loss_fn(model, *batch) returns the loss; optimizer(params) and "
    "optimizer(params, fused=True) return an optimizer; batches is a list of tuples of tensors in host memory"
)


def user_case(name: str, function: Callable[..., Any], batch: int, *, seed: int = 0, count: int | None = None) -> Case:
    """Return the case that the user's function makes: a `Maker` that ignores the number of batches.

    The function is called with the batch size if it takes a parameter.

    Raises:
        CaseError: if the function returned something else than `RETURNED` describes, which the message names.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = function(batch) if takes(function, 1) else function()
    if not isinstance(made, tuple) or len(made) != 4:
        raise CaseError(f"{name} returned {type_text(made)}, expected {RETURNED}.")
    loss_fn, model, optimizer, batches = made
    if problem := _problem(loss_fn, model, optimizer, batches):
        raise CaseError(f"{name} returned {problem}. Expected {RETURNED}.")
    return Case(loss_fn, model.cpu(), optimizer, [tuple(part) for part in batches])


def _problem(loss_fn: Any, model: Any, optimizer: Any, batches: Any) -> str:
    """Return what is wrong with the four parts, "" if nothing is."""
    if not callable(loss_fn) or not callable(optimizer):
        return "a loss_fn or an optimizer that cannot be called"
    if not isinstance(model, nn.Module):
        return f"{type_text(model)} for the model"
    if not isinstance(batches, (list, tuple)) or not batches:
        return f"{type_text(batches) if batches else 'an empty sequence'} for the batches"
    if not all(isinstance(batch, (list, tuple)) for batch in batches):
        return "a batch that is not a tuple"
    leaves = [leaf for leaf in tree_flatten(list(batches))[0] if isinstance(leaf, Tensor)]
    elsewhere = next((leaf.device for leaf in leaves if leaf.device.type != "cpu"), None)
    return "" if elsewhere is None else f"a batch on {elsewhere}"
