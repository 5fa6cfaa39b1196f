"""What a row of tests/benchmarks/zoo.py is, and the rows of timm and torchvision.

A row builds a model with its default flags and random weights, on the CPU, and makes batches from a seed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

LEARNING_RATE = 1e-4
CLASSES = 10
Batch = dict[str, Any]  # tensors, by the argument of the loss function that they are
Sample = Callable[[torch.Generator], Batch]


class Training(NamedTuple):
    """A step under way, and all that it changes."""

    step: Callable[..., Any]  # a GraphedStep or a function under ampkit.graphed
    modules: dict[str, nn.Module]
    optimizers: list[torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)


@dataclass(frozen=True)
class Row:
    """One model, what it is trained on, and how.

    Attributes:
        library: the distribution package that it is of.
        build: makes the model, on the CPU.
        sample: makes a batch on the CPU.
        loss: called with the model and the batch.
        optimizer: makes the optimizer of the model.
        policy: the precision.
        average: makes a module with `update(model)` that is called after each step.
        start: makes the training of a copy of the model, in place of `graphed_step`: (model, policy, options) -> it.
        note: what a reader of the table must know.
    """

    library: str
    build: Callable[[], nn.Module]
    sample: Sample
    loss: Callable[..., Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    policy: str = "bfloat16"
    average: Callable[[nn.Module], Any] | None = None
    start: Callable[[nn.Module, str, dict[str, Any]], Training] | None = None
    note: str = ""

    def training(self, model: nn.Module, options: dict[str, Any]) -> Training:
        """Return a step over this model; `options` are passed on to ampkit."""
        if self.start is not None:
            return self.start(model, self.policy, options)
        modules, optimizer = {"model": model}, self.optimizer(model)
        if self.average is not None:
            modules["average"] = average = self.average(model)
            options = {**options, "after_step": average.update}
        return Training(
            ampkit.graphed_step(self.loss, model, optimizer, policy=self.policy, **options), modules, [optimizer]
        )


def classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def images(side: int, batch: int = 4, *, frames: int = 0) -> Sample:
    """Return what makes images (videos, if they have frames) and their classes."""
    shape = (batch, 3, *([frames] if frames else []), side, side)
    return lambda made: {
        "images": torch.randn(shape, generator=made),
        "labels": torch.randint(CLASSES, (batch,), generator=made),
    }


# ----------------------------------------------------------------------------------------------------------------- timm

SIDE = 64  # of an image, where the model takes it
SIZED: dict[str, Any] = {"img_size": SIDE}  # for models that are built for one size
PLAIN = """
    resnet18 resnext50_32x4d seresnet18 resnest14d res2net50_26w_4s skresnet18 convnext_atto convnextv2_atto
    efficientnet_b0 tf_efficientnetv2_b0 mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small mobilevit_xxs
    regnetx_002 regnety_002 densenet121 vgg11 dla34 davit_tiny edgenext_xx_small efficientvit_b0 fastvit_t8
    focalnet_tiny_srf ghostnet_100 hgnetv2_b0 hrnet_w18_small inception_next_atto mambaout_femto eca_nfnet_l0
    nf_regnet_b0 poolformer_s12 pvt_v2_b0 repvgg_a0 rexnet_100 xception41
"""
OF_A_SIZE = """
    vit_tiny_patch16_224 vit_relpos_small_patch16_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    coat_lite_tiny convit_tiny hiera_tiny_224 levit_128s maxvit_rmlp_pico_rw_256 mixer_s32_224 mvitv2_tiny
    resmlp_12_224 sequencer2d_s twins_svt_small volo_d1_224 xcit_nano_12_p16_224
"""
TIMM: dict[str, tuple[int, dict[str, Any]]] = {  # the side of an image, and what is not the default
    **dict.fromkeys(PLAIN.split(), (SIDE, {})),
    **dict.fromkeys(OF_A_SIZE.split(), (SIDE, SIZED)),
    "vit_small_patch16_dinov3": (SIDE, {**SIZED, "depth": 4}),
    "deit3_small_patch16_224": (SIDE, {**SIZED, "depth": 4}),
    "beit_base_patch16_224": (SIDE, {**SIZED, "depth": 3}),
    "cait_xxs24_224": (SIDE, {**SIZED, "depth": 6}),
    "crossvit_9_240": (240, {}),
    "efficientformer_l1": (224, {}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56}),
    "inception_v3": (96, {}),
    "pit_ti_224": (224, {}),
    "tiny_vit_5m_224": (224, {}),
}


def timm_model(name: str, **flags: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **flags)
    return model


def lion(model: nn.Module) -> torch.optim.Optimizer:
    from timm.optim import Lion

    return Lion(model.parameters(), lr=LEARNING_RATE)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=LEARNING_RATE)


def model_ema(model: nn.Module) -> Any:
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=0.99)


def mixed(made: torch.Generator) -> Batch:
    """Return images mixed in pairs and their soft labels. timm's Mixup draws from numpy's generator."""
    import numpy
    from timm.data import Mixup

    batch = images(64)(made)
    before = numpy.random.get_state()
    numpy.random.seed(made.initial_seed())
    mixed_images, targets = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES)(*batch.values())
    numpy.random.set_state(before)
    return {"images": mixed_images, "labels": targets}


def timm_rows() -> dict[str, Row]:
    rows = {
        name: Row("timm", lambda name=name, flags=flags: timm_model(name, **flags), images(side), classify)
        for name, (side, flags) in TIMM.items()
    }
    vit, made = TIMM["vit_tiny_patch16_224"][1], images(64)
    tiny = lambda: timm_model("vit_tiny_patch16_224", **vit)  # noqa: E731
    rows["vit_tiny_patch16_224, Lion"] = Row("timm", tiny, made, classify, lion, note="timm.optim.Lion")
    rows["vit_tiny_patch16_224, Muon"] = Row("timm", tiny, made, classify, muon, note="torch's Muon over the matrices")
    rows["resnet18, Mixup, ModelEmaV3"] = Row(
        "timm", lambda: timm_model("resnet18"), mixed, classify, average=model_ema, note="the average is compared too"
    )
    return {f"timm/{name}": row for name, row in rows.items()}


# ---------------------------------------------------------------------------------------------------------- torchvision


def torchvision_model(name: str, **flags: Any) -> nn.Module:
    from torchvision import models

    model: nn.Module = models.get_model(name, weights=None, **flags)
    return model


def tiny_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def tiny_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return VisionTransformer(image_size=64, patch_size=16, num_classes=CLASSES, **sizes)


def small_faster_rcnn() -> nn.Module:
    from torchvision import models

    flags = {"min_size": 64, "max_size": 64}
    return models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=CLASSES, **flags
    )


def small_retinanet() -> nn.Module:
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    anchors = AnchorGenerator(((16,), (32,), (64,), (96,), (128,)), ((0.5, 1.0, 2.0),) * 5)
    return RetinaNet(backbone, CLASSES, min_size=96, max_size=96, anchor_generator=anchors)


def segmentation(made: torch.Generator) -> Batch:
    labels = torch.randint(CLASSES, (2, 64, 64), generator=made)
    return {"images": torch.randn(2, 3, 64, 64, generator=made), "labels": labels}


def boxes(made: torch.Generator) -> Batch:
    corners = 48 * torch.rand(2, 3, 2, generator=made)
    sides = 8 + 24 * torch.rand(2, 3, 2, generator=made)
    labels = torch.randint(1, CLASSES, (2, 3), generator=made)
    pictures = torch.rand(2, 3, 96, 96, generator=made)
    return {"images": pictures, "boxes": torch.cat([corners, corners + sides], 2), "labels": labels}


def flow(made: torch.Generator) -> Batch:
    frames = torch.rand(2, 1, 3, 128, 128, generator=made)
    return {"first": frames[0], "second": frames[1], "truth": torch.randn(1, 2, 128, 128, generator=made)}


def segment(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images)["out"], labels)


def detect(model: nn.Module, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    targets = [{"boxes": b, "labels": k} for b, k in zip(boxes, labels, strict=True)]
    losses: dict[str, Tensor] = model(list(images), targets)
    return torch.stack([loss.float() for loss in losses.values()]).sum()


def follow(model: nn.Module, first: Tensor, second: Tensor, truth: Tensor) -> Tensor:
    guesses: list[Tensor] = model(first, second, num_flow_updates=2)
    return torch.stack([F.l1_loss(guess.float(), truth) for guess in guesses]).mean()


def torchvision_rows() -> dict[str, Row]:
    def row(build: str | Callable[[], nn.Module], sample: Sample, loss: Callable[..., Tensor], **flags: Any) -> Row:
        if isinstance(build, str):
            return Row("torchvision", lambda: torchvision_model(build, num_classes=CLASSES, **flags), sample, loss)
        return Row("torchvision", build, sample, loss)

    no_weights = {"weights_backbone": None}
    rows = {
        "resnet, tiny": row(tiny_resnet, images(32), classify),
        "resnet18": row("resnet18", images(64), classify),
        "mobilenet_v3_small": row("mobilenet_v3_small", images(64), classify),
        "vit, tiny": row(tiny_vit, images(64), classify),
        "convnext_tiny": row("convnext_tiny", images(64), classify),
        "fcn_resnet50": row("fcn_resnet50", segmentation, segment, **no_weights),
        "deeplabv3_mobilenet_v3_large": row("deeplabv3_mobilenet_v3_large", segmentation, segment, **no_weights),
        "lraspp_mobilenet_v3_large": row("lraspp_mobilenet_v3_large", segmentation, segment, **no_weights),
        "fasterrcnn_mobilenet_v3_large_320_fpn": row(small_faster_rcnn, boxes, detect),
        "retinanet, resnet18": row(small_retinanet, boxes, detect),
        "ssdlite320_mobilenet_v3_large": row("ssdlite320_mobilenet_v3_large", boxes, detect, **no_weights),
        "r3d_18": row("r3d_18", images(32, batch=2, frames=4), classify),
        "raft_small": Row("torchvision", lambda: torchvision_model("raft_small"), flow, follow),
    }
    return {f"torchvision/{name}": row for name, row in rows.items()}


ROWS: dict[str, Row] = {**timm_rows(), **torchvision_rows()}
