"""The smallest loop: `step` takes the place of zero_grad, autocast, backward, clipping and optimizer.step.

python examples/minimal.py      on a GPU steps become graphs; on a CPU these are emulated, and nothing is faster
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ampkit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPH = "auto" if DEVICE == "cuda" else "emulate"


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def main(graph: str = GRAPH) -> list[float]:
    """Learn in which quadrants points lie; print and return the mean loss of each epoch."""
    torch.manual_seed(0)
    x = torch.randn(2048, 2)
    loader = DataLoader(TensorDataset(x, (x.prod(1) > 0).long()), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", max_norm=1.0, graph=graph)
    losses = []
    for epoch in range(4):
        found = [step(*batch).loss for batch in ampkit.prefetch(loader, DEVICE)]
        losses.append(torch.stack(found).mean().item())  # the only line that waits for the device
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
    print(step.report())
    return losses


if __name__ == "__main__":
    main()
