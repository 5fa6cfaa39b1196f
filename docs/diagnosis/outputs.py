"""Print what the pages of docs/diagnosis show, one output by name, and draw their picture.

    python docs/diagnosis/outputs.py overflow

Needs torchvision, Lightning and matplotlib. trace, snapshot and measured need a GPU; syncs, overflow and underflow
use one if it is there. Paths are shortened. What `doctor` says is printed by the commands on the pages.
"""

import argparse
import csv
import sysconfig
import tempfile
import warnings
from pathlib import Path

import slow
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ampkit
from ampkit import debug

FOLDER = Path(__file__).resolve().parent
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STEPS = 8 if CUDA else 4  # on a GPU the last ones are replays
SHORTENED = sysconfig.get_path("purelib"), str(FOLDER.parent.parent)  # the first may lie in the second


def show(text: object) -> None:
    """Print without the paths of this machine."""
    shown = str(text)
    for folder in SHORTENED:
        shown = shown.replace(f"{folder}/", "")
    print(shown)


def classify(model, images, labels):
    return F.cross_entropy(model(images), labels)


def resnet50() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet50(num_classes=10)


def batch(rows: int, side: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, side, side, generator=made), torch.randint(10, (rows,), generator=made)


def plant_overflow(model: nn.Module) -> None:
    with torch.no_grad():
        model.layer1[0].conv1.weight.mul_(1e4)


def plant_underflow(model: nn.Module) -> None:
    with torch.no_grad():
        model.layer3[0].bn2.weight.fill_(1e-7)


def train_step(loss_fn, model, optimizer, tensors):
    optimizer.zero_grad()
    loss = loss_fn(model, *tensors)
    loss.backward()
    optimizer.step()
    return loss.detach()


# ------------------------------------------------------------------------------------------------------------- idle.md


def syncs() -> None:
    """Show the lines of slow.py that wait in one step."""
    loss_fn, model, optimizer, loader, _ = slow.training()
    tensors = next(iter(loader))

    def on_device() -> None:
        train_step(loss_fn, model, optimizer, [tensor.to(DEVICE) for tensor in tensors])

    show(debug.find_syncs(on_device))


def trace() -> None:
    """Show what torch does on a GPU in a step of a ResNet-18."""
    loss_fn, model, optimizer, loader, _ = slow.training()
    tensors = [tensor.to(DEVICE) for tensor in next(iter(loader))]
    with debug.trace() as recorded:
        train_step(loss_fn, model, optimizer, tensors)
    show(recorded)


# ---------------------------------------------------------------------------------------------------------- numbers.md


def overflow() -> None:
    """Show a ResNet-50 whose last step overflows in forward, and the same model with what is advised."""
    report = trained("float16", plant_overflow, init_scale=1024.0, at=STEPS - 1)
    show(head(report))
    show(report.table(5))
    show("\nwith that policy:")
    show(head(trained(advised(report), plant_overflow, init_scale=1024.0, at=0)))


def underflow() -> None:
    """Show a ResNet-50 whose gradients vanish in the last step, and the same model with what is advised."""
    report = trained("float16", plant_underflow, init_scale=16.0, at=STEPS - 1)
    show(head(report))
    show(report.table(5))
    show("\nwith that scale:")
    larger = trained("float16", plant_underflow, init_scale=report.safe_scale, at=0)
    show(head(larger))
    show("\nwith that policy:")
    show(head(trained(advised(larger), plant_underflow, init_scale=1.0, at=0)))


def trained(policy: str, plant, *, init_scale: float, at: int) -> debug.NumericsReport:
    """Train for some steps, each observed, with the fault planted before step `at`."""
    model, tensors = resnet50().to(DEVICE), [tensor.to(DEVICE) for tensor in batch(8)]
    parsed = ampkit.Policy.parse(policy)
    if parsed.modules:
        parsed.apply(model)
    watch = debug.numerics(model, every=1)
    step = ampkit.graphed_step(
        classify,
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3, fused=True),
        policy=parsed,
        scaler=ampkit.GradScaler(DEVICE, init_scale=init_scale) if parsed.needs_scaling else None,
        numerics=watch,
        graph="auto" if CUDA else "emulate",
    )
    for number in range(STEPS):
        if number == at:
            plant(model)
        step(*tensors)
    if CUDA:
        show(str(step.report()).splitlines()[0])
    return watch.report()


def advised(report: debug.NumericsReport) -> str:
    """Return the policy that a report advises first."""
    return report.advice[0].split("Policy.parse('")[1].split("')")[0]


def head(report: debug.NumericsReport) -> str:
    """Return the text of a report without its table."""
    return str(report).partition("\nstep ")[0]


def compare() -> None:
    """Show where float16 parts from float32, in a good ResNet-50 and in one that overflows."""
    model, tensors = resnet50(), batch(8)

    def run(enabled: bool) -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            loss = classify(model, *tensors)
        loss.backward()

    for plant in (lambda model: None, plant_overflow):
        plant(model)
        found = debug.compare(lambda: run(False), lambda: run(True), model=model, min_db=20)
        show(found.table().splitlines()[0])


def fit(callback, *, planted: bool) -> Path:
    """Train a ResNet-50 for four steps under a Trainer, and return the file of its logger."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = resnet50()
            if planted:
                plant_overflow(self.net)

        def training_step(self, tensors):
            return classify(self.net, *tensors)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, fused=True)

    # Trainer(precision="16-mixed") is for GPUs; on a CPU, Lightning takes float16 as a plugin alone.
    float16 = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = pl.Trainer(
        accelerator="cpu",
        plugins=float16,
        callbacks=[callback],
        logger=CSVLogger(tempfile.mkdtemp()),
        log_every_n_steps=1,
        max_steps=4,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(Classifier(), DataLoader(TensorDataset(*batch(32)), batch_size=8))
    return Path(trainer.logger.log_dir) / "metrics.csv"


def lightning_numerics() -> None:
    """Show what a Trainer's callback and loggers get of a ResNet-50 that overflows from the first step on."""
    from ampkit.lightning import AmpkitCallback

    callback = AmpkitCallback(graph="emulate", numerics=100)
    logged = fit(callback, planted=True)
    show(head(callback.numerics.report()))
    show_logged(logged, "ampkit/numerics/")


def show_logged(path: Path, prefix: str) -> None:
    """Show the first row of the logger's file that has columns with this prefix."""
    with path.open() as file:
        rows = [{name: row[name] for name in row if name.startswith(prefix)} for row in csv.DictReader(file)]
    row = next(row for row in rows if any(row.values()))
    for name, value in row.items():
        show(f"{name:38}{float(value):.6g}")


# ----------------------------------------------------------------------------------------------------------- memory.md


def forecast() -> None:
    """Show the forecast of a ResNet-50 on a GPU in float32 and float16, and draw it."""
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        tensors = torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    at32, at16 = (
        debug.forecast(classify, model, optimizer, tensors, policy=policy, label=policy)
        for policy in ("float32", "float16")
    )
    show(at16.beside(at32))
    show(f"\n{at16.table(4)}")
    debug.plot_memory(at32, at16, path=FOLDER / "memory.png")


def measured() -> None:
    """Show who held the memory of a GPU in two steps of a ResNet-50, in float32 and under float16 autocast."""
    profiles = []
    for policy in ("float32", "float16"):
        model, (images, labels) = torchvision.models.resnet50().cuda(), batch(32, 224)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        tensors = images.cuda(), labels.cuda()

        def autocast_loss(model, images, labels, policy=policy):
            with ampkit.Policy.parse(policy).autocast("cuda"):
                return classify(model, images, labels)

        parts = train_step, autocast_loss, model, optimizer, tensors
        profiles.append(debug.memory(*parts, model=model, optimizer=optimizer, steps=2, label=policy))
        del model, images, labels, optimizer, tensors, parts
    at32, at16 = profiles
    show(at16.beside(at32))
    debug.plot_memory(at32, at16, path=FOLDER / "measured.png")


def snapshot() -> None:
    """Show what the allocator gave out in a step of a ResNet-18, by line."""
    model = torchvision.models.resnet18(num_classes=10).cuda()
    optimizer, tensors = torch.optim.SGD(model.parameters(), lr=1e-3), [tensor.cuda() for tensor in batch(8)]
    with tempfile.TemporaryDirectory() as folder:
        with debug.snapshot(f"{folder}/memory") as path:
            loss = classify(model, *tensors)
            loss.backward()
            optimizer.step()
        show(" ".join(sorted(part.name for part in path.iterdir())))
        show("\n".join((path / "blocks.txt").read_text().splitlines()[:12]))
    del loss  # it was alive until here, with its graph


def memory() -> None:
    """Show who held the memory in two steps of a ResNet-50 on this CPU."""
    model, tensors = resnet50(), batch(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    profile = debug.memory(train_step, classify, model, optimizer, tensors, model=model, optimizer=optimizer, steps=2)
    show(profile.table(3))


def lightning_memory() -> None:
    """Show what a Trainer's callback and loggers get of the memory of a step."""
    from ampkit.lightning import AmpkitCallback

    callback = AmpkitCallback(graph="emulate", memory=True)
    logged = fit(callback, planted=False)
    show(callback.memory.table(0))
    show_logged(logged, "ampkit/memory/")


def oom() -> None:
    """Show what is written when memory ends in a step of a ResNet-18."""
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def greedy_loss(model, images, labels):
        loss = classify(model, images, labels)
        return loss + torch.empty(2**50).sum()

    recorded, tensors = debug.memory(model, optimizer), batch(8)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)  # what the error's note says
        try:
            with debug.on_oom(f"{folder}/oom", profile=recorded), recorded:
                train_step(greedy_loss, model, optimizer, tensors)
        except RuntimeError as error:
            show("\n".join([str(error), *error.__notes__]).replace(folder, "run"))
        (written,) = Path(folder, "oom").iterdir()
        show(" ".join(sorted(path.name for path in written.iterdir())))
        kept = ("error:", "line:", "missing:")
        lines = (written / "summary.txt").read_text().splitlines()
        show("\n".join([*(line for line in lines[:8] if line.startswith(kept)), *lines[8:30]]))


def cycles() -> None:
    """Show a cycle that keeps the activations of a ResNet-18."""
    model, (images, _) = torchvision.models.resnet18(num_classes=10), batch(8)

    class Epoch:
        def __init__(self):
            self.on_end = lambda: print(self.logits.mean())  # a cell of the lambda refers to the epoch

        def run(self):
            self.logits = model(images)

    show(debug.cycles(lambda: Epoch().run()))


def main() -> None:
    idle, numbers = (syncs, trace), (overflow, underflow, compare, lightning_numerics)
    bytes_held = forecast, measured, memory, lightning_memory, oom, snapshot, cycles
    by_name = {function.__name__: function for function in (*idle, *numbers, *bytes_held)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=by_name)
    by_name[parser.parse_args().name]()


if __name__ == "__main__":
    main()
