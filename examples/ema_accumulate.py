"""Averaged weights, gradient accumulation, a schedule, checkpoints and TensorBoard around one captured step.

    python examples/ema_accumulate.py            train for 6 epochs, or go on from runs/ema/checkpoint.pth
    tensorboard --logdir runs/ema              curves, if tensorboard is installed

On a GPU steps become graphs; on a CPU these are emulated, and nothing is faster.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import ampkit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPH = "auto" if DEVICE == "cuda" else "emulate"


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def writer_in(folder: Path) -> Any:
    """Return a TensorBoard writer, or None without the package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("no TensorBoard curves; for these: pip install tensorboard")
        return None
    return SummaryWriter(str(folder))


def main(folder: Path = Path("runs/ema"), epochs: int = 6, graph: str = GRAPH) -> list[float]:
    """Train up to this epoch; print and return the accuracies of the averaged weights in the epochs of this run."""
    torch.manual_seed(0)
    x = torch.randn(2080, 2)
    data, test = TensorDataset(x, (x.prod(1) > 0).long()), torch.randn(1000, 2).to(DEVICE)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(DEVICE)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * 9)
    scaler = ampkit.GradScaler(DEVICE, init_scale=2.0**10)
    parts = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    checkpoint, first = folder / "checkpoint.pth", 0
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():  # load before the first call of the step
        saved = torch.load(checkpoint, map_location=DEVICE)
        first = saved.pop("epoch")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    step = ampkit.graphed_step(
        loss_fn,
        model,
        optimizer,
        policy="float16" if DEVICE == "cuda" else "bfloat16",
        scaler=scaler if DEVICE == "cuda" else None,
        accumulate=4,  # calls for each optimizer step
        scheduler=scheduler,
        after_step=average.update_parameters,  # in the graph, behind the optimizer
        graph=graph,
    )
    writer, accuracies = writer_in(folder), []
    for epoch in range(first, epochs):
        order = torch.Generator().manual_seed(epoch)  # so that a resumed run goes on as this one would
        for x, y in ampkit.prefetch(DataLoader(data, 64, shuffle=True, generator=order), DEVICE):
            out = step(x, y)
        step.flush()  # 33 batches are 8 windows and a short one
        with torch.no_grad():
            right = average(test).argmax(1) == (test.prod(1) > 0)
        accuracies.append(right.float().mean().item())
        print(f"epoch {epoch + 1}: loss {out.loss.item():.4f}, accuracy of the averaged weights {accuracies[-1]:.3f}")
        if writer is not None:
            for name, value in {"loss": out.loss.item(), "accuracy": accuracies[-1], **step.metrics()}.items():
                writer.add_scalar(name, value, epoch)
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch + 1}, checkpoint)
    if writer is not None:
        writer.close()
    print(step.report())
    return accuracies


if __name__ == "__main__":
    main()
