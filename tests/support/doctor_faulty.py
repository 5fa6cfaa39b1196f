"""A training script with six faults that can be seen on a CPU, each marked: what `doctor` has to find."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        weights = scores.half().softmax(-1).float()  # fault: low precision
        return self.head((weights @ v).mean(1))


def loss_fn(model, x, y):
    noise = torch.from_numpy(np.random.normal(size=x.shape)).float()  # fault: host random numbers
    logits = model(x + 0.1 * noise.to(x.device))
    loss = F.cross_entropy(logits, y)
    if float(loss.detach()) > 100:  # fault: blocking line
        loss = loss * 0.1
    return loss


def training():
    torch.manual_seed(0)
    x, y = torch.randn(44, 6, 16), torch.randint(4, (44,))
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # fault: optimizer
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=100)  # fault: schedule
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=8)  # fault: changing shapes
    return loss_fn, model, optimizer, loader, {"scheduler": scheduler}
