"""The script of doctor_faulty.py with its six faults repaired as `doctor` advises: nothing is left to find."""

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
        weights = scores.softmax(-1)
        return self.head((weights @ v).mean(1))


def loss_fn(model, x, y):
    logits = model(x + 0.1 * torch.randn_like(x))
    loss = F.cross_entropy(logits, y)
    return torch.where(loss > 100, loss * 0.1, loss)


def training():
    torch.manual_seed(0)
    x, y = torch.randn(44, 6, 16), torch.randint(4, (44,))
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=100, cycle_momentum=False)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=8, drop_last=True, pin_memory=torch.cuda.is_available())
    return loss_fn, model, optimizer, loader, {"scheduler": scheduler}
