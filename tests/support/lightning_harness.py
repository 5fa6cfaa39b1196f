"""What the tests of ampkit.lightning share: a small LightningModule, a run of a Trainer, and all that came of it."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same, bits, deterministic
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ampkit.lightning import AmpkitCallback

RATE = 2.0**-7  # in float32, as a captured step reads it, exactly what it is in Python
BATCHES = 11  # per epoch: with accumulate_grad_batches=3 the last window is short

# What Lightning itself warns of, in set-ups as small as these.
QUIET = [
    "ignore:.*does not have many workers",
    "ignore:.*is smaller than the logging interval",
    "ignore:.*exists and is not empty",
    "ignore:.*you defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*You defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*GPU available but not used",
    "ignore:.*`isinstance.treespec, LeafSpec.` is deprecated",  # of torch, by Lightning's own trees
    "ignore:.*logger=True.* but have no logger configured",
    "ignore:.*in the `DataLoader` during `training` and `validation`",
    "ignore:.*callbacks used to create the checkpoint need to be provided",  # the tests' ModelCheckpoint
    "ignore:.*The dirpath has changed from",
    "ignore:.*Detected call of `lr_scheduler.step",  # where the loss scale has skipped the first step
    "ignore:.*You're resuming from a checkpoint that ended before the epoch ended",
    "ignore:.*It is recommended to use `self.log.*sync_dist=True",
    "ignore:.*HooksAmidAStep.on_before_backward",  # of the counter below; test_hooks_are_told has the warning
]


def quiet(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test: what Lightning warns of is not ours."""
    for text in QUIET:
        test = pytest.mark.filterwarnings(text)(test)
    return test


class Net(pl.LightningModule):
    """Linear layers, BatchNorm and dropout on 8 numbers in 4 classes; logs in every way that a value can be reduced."""

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        interval: str = "epoch",
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
        self._optimizer, self._scheduler, self._interval = optimizer or adamw, scheduler, interval

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), on_step=False, on_epoch=True)
        self.log_dict({"highest": logits.amax().float(), "width": logits.shape[1]}, on_epoch=True, reduce_fx="max")
        self.log("total", loss.detach() * 2, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=len(x))
        return {"loss": loss, "correct": (logits.argmax(1) == y).sum(), "name": "batch"}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        if self._scheduler is None:
            return optimizer
        config = {"scheduler": self._scheduler(optimizer), "interval": self._interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, fused=True)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Hooks(Callback):
    """Counts the hooks that are called, and keeps what the end of each batch is told."""

    HOOKS = (
        "on_train_batch_start",
        "on_train_epoch_end",
        "on_validation_end",
    )

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.outputs: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counts["on_train_batch_end"] += 1
        kept = {
            key: value.detach().cpu().clone() if isinstance(value, Tensor) else value for key, value in outputs.items()
        }
        self.outputs.append(kept)


def _counted(name: str) -> Callable[..., None]:
    def hook(self: Hooks, *args: Any, **kwargs: Any) -> None:
        self.counts[name] += 1

    return hook


for _name in Hooks.HOOKS:
    setattr(Hooks, _name, _counted(_name))


class HooksAmidAStep(Hooks):
    """Counts those that Lightning calls between backward and the optimizer's step, too."""

    HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


for _name in HooksAmidAStep.HOOKS:
    setattr(HooksAmidAStep, _name, _counted(_name))


class Run(NamedTuple):
    """What came of a `fit`."""

    trainer: pl.Trainer
    module: pl.LightningModule
    hooks: Hooks
    callback: AmpkitCallback | None
    checkpoint: Path

    @property
    def report(self) -> Any:
        return None if self.callback is None else self.callback.report()

    def state(self) -> dict[str, Any]:
        """Return everything by which two runs are compared, on the host."""
        saved = torch.load(self.checkpoint, weights_only=False, map_location="cpu")
        loops = saved["loops"]["fit_loop"]
        return {
            "weights": {name: bits(tensor) for name, tensor in self.module.state_dict().items()},
            "global step": self.trainer.global_step,
            "metrics": {name: bits(value) for name, value in self.trainer.callback_metrics.items()},
            "hooks": dict(self.hooks.counts),
            "outputs": self.hooks.outputs,
            "keys": [*sorted(saved), *sorted(key.partition("{")[0] for key in saved["callbacks"])],
            "loss scale": saved.get("MixedPrecision"),
            "progress": loops,
            "schedulers": saved["lr_schedulers"],
            "rates": [group["lr"] for state in saved["optimizer_states"] for group in state["param_groups"]],
            "moments": [_by_parameter(state["state"]) for state in saved["optimizer_states"]],
        }

    def logged(self) -> list[dict[str, str]]:
        """Return the rows of metrics.csv that are the module's own: without ampkit's readings."""
        file = Path(self.trainer.logger.log_dir) / "metrics.csv"
        text = file.read_text().splitlines() if file.exists() else [""]
        names = text[0].split(",")
        rows = [dict(zip(names, line.split(","), strict=True)) for line in text[1:]]
        own = [{name: value for name, value in row.items() if value and not name.startswith("ampkit/")} for row in rows]
        return [row for row in own if row.keys() != {"step"}]


def _by_parameter(state: dict[int, Any]) -> dict[str, Any]:
    return {f"{i} {key}": value for i, moments in state.items() for key, value in moments.items()}


def loader(device: str, batches: int = BATCHES, size: int = 8, seed: int = 0) -> DataLoader[Any]:
    """Return a loader of the same batches in the same order each time."""
    made = torch.Generator().manual_seed(seed)
    x, y = torch.randn(batches * size, 8, generator=made), torch.randint(4, (batches * size,), generator=made)
    return DataLoader(TensorDataset(x, y), size)


class Batches:
    """Batches in order, which go on where they were when their state was saved."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)
        self._at = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._at %= len(self._batches)
        while self._at < len(self._batches):
            self._at += 1
            yield self._batches[self._at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def precision(name: str, device: str) -> dict[str, Any]:
    """Return the arguments of a Trainer. With float16 the scale grows and overflows within a few steps."""
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler(device, init_scale=2.0**17, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", device, scaler=scaler)]}  # `precision` refuses it on the CPU


def fit(
    folder: Path,
    device: str,
    graph: str | None,
    *,
    make: Callable[[], pl.LightningModule] | None = None,
    kind: str = "32-true",
    ckpt_path: Path | None = None,
    validate: bool = False,
    seed: int = 3,
    options: dict[str, Any] | None = None,
    data: Any = None,
    counts: type[Hooks] = Hooks,
    **trainer: Any,
) -> Run:
    """Train from the same start, without ampkit where `graph` is None."""
    torch.manual_seed(seed)
    module = (make or Net)()
    hooks, callback = counts(), None
    if graph is not None:
        callback = AmpkitCallback(graph=graph, **{"on_failure": "raise", **(options or {})})
    saved = ModelCheckpoint(dirpath=folder / "checkpoints", save_last=True, save_top_k=-1, every_n_epochs=1)
    arguments = {
        "max_epochs": 2,
        "accelerator": "gpu" if device == "cuda" else "cpu",
        "devices": 1,
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **precision(kind, device),
        **trainer,
    }
    arguments["callbacks"] = [hooks, saved, *arguments.get("callbacks", []), *([callback] if callback else [])]
    engine = pl.Trainer(**arguments)
    batches = loader(device) if data is None else data
    with deterministic():
        torch.manual_seed(seed + 1)
        engine.fit(module, batches, loader(device, 3, seed=1) if validate else None, ckpt_path=ckpt_path)
    return Run(engine, module, hooks, callback, Path(saved.last_model_path))


def assert_same_runs(left: Run, right: Run) -> None:
    """Assert that two runs did the same, bit by bit."""
    assert_same(left.state(), right.state())
    assert left.logged() == right.logged()


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """Keep what Lightning prints about itself out of the tests' output, and its settings out of other tests."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [log.level for log in loggers]
    for log in loggers:
        log.setLevel(logging.ERROR)
    yield
    for log, level in zip(loggers, levels, strict=True):
        log.setLevel(level)
