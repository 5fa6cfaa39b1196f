"""A ResNet-18 as it is often trained, and repaired: what `doctor` and `find_syncs` look at in idle.md."""

import random

import torch
import torchvision
from torch.nn import functional as F


def loss_fn(model, images, labels):
    if random.random() < 0.5:
        images = images.flip(-1)
    known = labels >= 0  # unlabelled images have -1
    loss = F.cross_entropy(model(images)[known], labels[known])
    if loss.item() > 100:
        print("diverged")
    return loss


def training():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=100)
    data = torch.utils.data.TensorDataset(torch.randn(44, 3, 64, 64), torch.randint(10, (44,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    return loss_fn, model, optimizer, loader, {"scheduler": scheduler, "policy": "float16"}


def repaired_loss_fn(model, images, labels):
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    images = torch.where(flip, images.flip(-1), images)
    return F.cross_entropy(model(images), labels, ignore_index=-1)


def repaired():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=100, cycle_momentum=False)
    data = torch.utils.data.TensorDataset(torch.randn(44, 3, 64, 64), torch.randint(10, (44,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, drop_last=True, pin_memory=torch.cuda.is_available())
    return repaired_loss_fn, model, optimizer, loader, {"scheduler": scheduler, "policy": "float16"}
