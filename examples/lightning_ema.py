"""A Lightning Trainer with metrics of torchmetrics and averaged weights: one more callback captures its steps.

    python examples/lightning_ema.py     needs lightning >= 2.6 with torchmetrics: pip install 'ampkit[lightning]'

On a GPU steps become graphs; on a CPU these are emulated, and nothing is faster.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from ampkit.lightning import AmpkitCallback

ON_CUDA = torch.cuda.is_available()
GRAPH = "auto" if ON_CUDA else "emulate"


class Classifier(pl.LightningModule):
    """Learns in which quadrants points lie."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.accuracy, self.val_accuracy = MulticlassAccuracy(2), MulticlassAccuracy(2)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.val_accuracy(self.net(x), y)
        self.log("val_accuracy", self.val_accuracy)  # of the averaged weights

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


def main(graph: str = GRAPH, epochs: int = 3) -> list[float]:
    """Train; print and return both accuracies. graph="off" trains the same bits in eager steps."""
    pl.seed_everything(0, verbose=False)
    x = torch.randn(2048, 2)
    data = TensorDataset(x, (x.prod(1) > 0).long())
    callback = AmpkitCallback(graph=graph)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="gpu" if ON_CUDA else "cpu",
        devices=1,
        precision="bf16-mixed",
        callbacks=[EMAWeightAveraging(decay=0.95), callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, 64, shuffle=True), DataLoader(data, 256))
    accuracies = [trainer.callback_metrics[name].item() for name in ("accuracy", "val_accuracy")]
    print(f"accuracy {accuracies[0]:.3f} in the last epoch, of the averaged weights {accuracies[1]:.3f}")
    print(callback.report())
    return accuracies


if __name__ == "__main__":
    main()
