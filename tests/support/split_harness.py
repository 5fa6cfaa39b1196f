"""What several test files of steps in parts share: a module that is large enough to be captured by itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16


class Block(nn.Module):
    """Eight kernels or more. Its input is used twice, and the weight of `first` too."""

    def __init__(self, inputs: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(inputs), nn.Linear(inputs, inputs), nn.Linear(inputs, inputs)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.gelu(self.first(self.norm(x))))
        return x + self.dropout(torch.tanh(self.second(F.gelu(hidden))))
