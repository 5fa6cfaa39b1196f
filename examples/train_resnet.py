"""Train a ResNet in mixed precision, with the whole training step captured as one CUDA graph.

    python examples/train_resnet.py                        # scikit-learn's handwritten digits: nothing to download
    python examples/train_resnet.py --dataset cifar10 --data-path data --model resnet18
    torchrun --nproc-per-node=2 examples/train_resnet.py   # one process per GPU: DistributedDataParallel
    torchrun --nproc-per-node=2 examples/train_resnet.py --strategy fsdp  # each process has a part of the parameters
    python examples/train_resnet.py --help

Read the file from top to bottom: options, processes, data, model, one epoch, checkpoint, results, main. It differs from
a script without ampkit in two places: `make_step` makes the training step, and `train_epoch` calls it.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchvision
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision import transforms
from torchvision.models.resnet import BasicBlock, Bottleneck
from tqdm import tqdm

import ampkit

# --------------------------------------------------------------------------------------------------------- options

MODELS = ["resnet8", *torchvision.models.list_models(torchvision.models, include=["resnet*", "resnext*", "wide_*"])]
DEFAULT_LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter)
    add_data_options(parser.add_argument_group("data"))
    add_model_options(parser.add_argument_group("model"))
    add_optimizer_options(parser.add_argument_group("optimizer and schedule"))
    add_speed_options(parser.add_argument_group("precision and speed"))
    add_run_options(parser.add_argument_group("run and results"))
    args = parser.parse_args(argv)
    on_cuda = args.device.startswith("cuda")
    if on_cuda and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no CUDA device here. Use --device cpu.")
    if args.cuda_graph == "on" and not on_cuda:
        parser.error(
            f"--cuda-graph on needs a CUDA device, but --device is {args.device}. Use --cuda-graph auto or off."
        )
    if args.model == "auto":
        args.model = "resnet18" if on_cuda else "resnet8"
    if args.policy == "auto":
        args.policy = "float16" if on_cuda else "float32"
    try:
        ampkit.Policy.parse(args.policy)
    except ValueError as error:
        parser.error(f"--policy {args.policy}: {error}")
    choose_optimizer(parser, args)
    if args.channels_last is None:
        args.channels_last = on_cuda and args.strategy == "ddp"
    if args.strategy == "fsdp" and (args.channels_last or args.torchcompile):
        parser.error("--strategy fsdp: fully_shard takes contiguous, uncompiled modules. Leave out the other option.")
    if args.workers is None:
        args.workers = 0 if args.dataset in ("digits", "synthetic") else 4
    return args


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of every option, in two columns that leave room for the text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset",
        choices=["digits", "cifar10", "imagefolder", "synthetic"],
        default="digits",
        help="digits: 1797 scans that come with scikit-learn; cifar10 and imagefolder: from --data-path; "
        "synthetic: random images, to measure the speed of a model",
    )
    group.add_argument("--data-path", default="data", metavar="DIR", help="folder of cifar10 or imagefolder")
    group.add_argument(
        "-b", "--batch-size", type=positive, default=64, metavar="N", help="images per training step, in each process"
    )
    group.add_argument(
        "-j", "--workers", type=int, metavar="N", help="loader processes; None: 0 for data in memory, else 4"
    )


def add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        choices=["auto", *MODELS],
        default="auto",
        metavar="NAME",
        help="the name of a ResNet in torchvision (resnet18, resnet50, resnext50_32x4d, wide_resnet50_2, ...), or "
        "resnet8, which a CPU trains in seconds; auto: resnet18 on CUDA, resnet8 elsewhere",
    )


def add_strategy_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategy",
        choices=["ddp", "fsdp"],
        default="ddp",
        help="what each of several processes keeps; ddp: all parameters; fsdp: a part of each of them (fully_shard)",
    )


def add_optimizer_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--epochs", type=positive, default=20, metavar="N", help="passes over the training images")
    group.add_argument(
        "--opt", choices=list(DEFAULT_LR), help="optimizer, in its fused form; None: sgd, or adamw with --strategy fsdp"
    )
    group.add_argument("--lr", type=float, help="learning rate; None: 0.05 for sgd, 0.001 for adam and adamw")
    group.add_argument("--momentum", type=float, default=0.9, metavar="M", help="momentum of sgd")
    group.add_argument("--weight-decay", type=float, default=1e-4, metavar="W", help="weight decay")
    group.add_argument("--label-smoothing", type=float, default=0.0, metavar="S", help="label smoothing, 0 to 1")
    group.add_argument("--clip-grad", type=float, metavar="NORM", help="clip the gradient norm; None: no clipping")
    group.add_argument(
        "--lr-scheduler",
        choices=["cosine", "step", "none"],
        default="cosine",
        help="cosine: down to 0 over all epochs; step: times --lr-gamma every --lr-step-size epochs",
    )
    group.add_argument(
        "--lr-step-size", type=positive, default=8, metavar="N", help="epochs between two steps of `step`"
    )
    group.add_argument("--lr-gamma", type=float, default=0.1, metavar="G", help="factor of one step of `step`")


def choose_optimizer(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    args.opt = args.opt or ("sgd" if args.strategy == "ddp" else "adamw")
    if (args.strategy, args.opt) == ("fsdp", "sgd"):
        parser.error("--strategy fsdp --opt sgd: torch 2.11 has no fused SGD for fully_shard. Pass --opt adamw.")
    if args.lr is None:
        args.lr = DEFAULT_LR[args.opt]


def add_speed_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy",
        default="auto",
        help="float32, bfloat16, float16, or any other ampkit policy, such as bf16-true or "
        "params=float32,compute=float16,output=float32; auto: float16 on CUDA, float32 elsewhere "
        "(on a CPU, bfloat16 is faster only where it has instructions for it, and float16 is slow)",
    )
    group.add_argument(
        "--cuda-graph",
        choices=["auto", "on", "off"],
        default="auto",
        help="auto: capture on CUDA, eager elsewhere or if the capture fails; on: an error if it fails; off: eager",
    )
    group.add_argument(
        "--torchcompile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="compile the model with torch.compile; without BACKEND: inductor",
    )
    group.add_argument(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        help="weights in channels-last layout; None: on CUDA, unless --strategy is fsdp",
    )
    group.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    group.add_argument("--deterministic", action="store_true", help="use deterministic algorithms only")


def add_run_options(group: argparse._ArgumentGroup) -> None:
    add_strategy_option(group)
    group.add_argument("--seed", type=int, default=0, help="seed of weights, shuffling and augmentation")
    group.add_argument(
        "--resume",
        metavar="FILE",
        help="checkpoint.pth of an earlier run, which is continued; pass the same other options",
    )
    group.add_argument(
        "--output-dir",
        default="runs/train_resnet",
        metavar="DIR",
        help="folder for checkpoint.pth, curves.png and summary.json",
    )
    group.add_argument(
        "--print-freq", type=positive, default=20, metavar="N", help="steps between two updates of the bar's numbers"
    )
    group.add_argument(
        "--json", action="store_true", help="print the summary as one line of JSON, and nothing else to stdout"
    )


# ------------------------------------------------------------------------------------------------------- processes


def join_processes(args: argparse.Namespace) -> None:
    """Join the other processes that torchrun started, each with its own GPU. Without torchrun there is one process."""
    args.rank, args.processes = 0, 1
    if not dist.is_torchelastic_launched():
        if args.strategy == "fsdp":
            raise SystemExit("--strategy fsdp: there is one process. Start several: torchrun --nproc-per-node=2 ...")
        return
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    elif args.device != "cpu":
        raise SystemExit(f"--device {args.device}: torchrun gives each process a device. Use --device cuda or cpu.")
    on_cuda = args.device != "cpu"
    dist.init_process_group("nccl" if on_cuda else "gloo", device_id=torch.device(args.device) if on_cuda else None)
    args.rank, args.processes = dist.get_rank(), dist.get_world_size()


def shard(args: argparse.Namespace, model: nn.Module) -> None:
    """With --strategy fsdp, leave this process a part of each parameter. Call it before the optimizer is made."""
    if args.strategy != "fsdp":
        return
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # as DistributedDataParallel does
    mesh = init_device_mesh(torch.device(args.device).type, (args.processes,))
    for module in model.modules():
        if isinstance(module, (BasicBlock, Bottleneck)):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def distribute(args: argparse.Namespace, model: nn.Module) -> nn.Module:
    """Return the model to train. With several processes it averages gradients over all of them."""
    if not dist.is_initialized() or args.strategy == "fsdp":
        return model
    device_ids = None if args.device == "cpu" else [args.device]
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def sum_over_processes(totals: Tensor) -> Tensor:
    if dist.is_initialized():
        totals = totals.clone()
        dist.all_reduce(totals)
    return totals


def share_buffers(model: nn.Module) -> None:
    """Give every process the BatchNorm statistics of the first process, which a checkpoint contains too."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, in order of rank."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


# ------------------------------------------------------------------------------------------------------------ data


class Data(NamedTuple):
    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    image_size: int


def load_data(args: argparse.Namespace) -> Data:
    loaders = {"digits": digits, "synthetic": synthetic, "cifar10": cifar10, "imagefolder": imagefolder}
    try:
        return loaders[args.dataset](Path(args.data_path))
    except (FileNotFoundError, RuntimeError) as error:
        if args.dataset not in WHAT_TO_PUT_WHERE:
            raise
        hint = WHAT_TO_PUT_WHERE[args.dataset].format(path=args.data_path)
        problem = str(error).split(". ")[0]  # the rest is advice for callers of torchvision
        raise SystemExit(f"--dataset {args.dataset} --data-path {args.data_path}: {problem}.\n{hint}") from error


WHAT_TO_PUT_WHERE = {
    "cifar10": "Download https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz and unpack it in {path}, so that "
    "{path}/cifar-10-batches-py/data_batch_1 exists; or name the folder that contains cifar-10-batches-py.",
    "imagefolder": "Put one folder per class there: {path}/train/<class>/<image>.jpg for training and "
    "{path}/val/<class>/<image>.jpg for testing.",
}


def digits(path: Path) -> Data:
    """Return 1437 training and 360 test digits, 10 classes, as normalised 3 x 16 x 16 images."""
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16  # the scans have values from 0 to 16
    images = nn.functional.interpolate(images, size=16, mode="bilinear")  # 8 x 8 is too small for the last layers
    # The split does not depend on --seed, so that accuracies of different runs can be compared.
    train, test = train_test_split(torch.arange(len(labels)).numpy(), test_size=0.2, stratify=labels, random_state=0)
    images = (images - images[train].mean()) / images[train].std()
    images = images.expand(-1, 3, -1, -1).contiguous()
    return Data(
        train=TensorDataset(images[train], labels[train]),
        test=TensorDataset(images[test], labels[test]),
        classes=10,
        image_size=16,
    )


def synthetic(path: Path) -> Data:
    """Return random 3 x 32 x 32 images with random labels, to measure speed only."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2560, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (2560,), generator=generator)
    return Data(
        train=TensorDataset(images[:2048], labels[:2048]),
        test=TensorDataset(images[2048:], labels[2048:]),
        classes=10,
        image_size=32,
    )


def cifar10(path: Path) -> Data:
    to_tensor = [transforms.ToTensor(), transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
    augment = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *to_tensor])
    train = torchvision.datasets.CIFAR10(path, train=True, transform=augment, download=False)
    test = torchvision.datasets.CIFAR10(path, train=False, transform=transforms.Compose(to_tensor), download=False)
    return Data(train, test, classes=10, image_size=32)


def imagefolder(path: Path) -> Data:
    to_tensor = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    augment = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *to_tensor])
    centre = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *to_tensor])
    train = torchvision.datasets.ImageFolder(path / "train", transform=augment)
    test = torchvision.datasets.ImageFolder(path / "val", transform=centre)
    if train.classes != test.classes:
        raise FileNotFoundError(f"{path}/train and {path}/val contain different classes.")
    return Data(train, test, classes=len(train.classes), image_size=224)


def make_loader(dataset: Dataset[Any], args: argparse.Namespace, *, train: bool) -> DataLoader[Any]:
    sampler: Iterable[int] | None = None
    if dist.is_initialized() and train:
        sampler = DistributedSampler(dataset, seed=1_000_000 * args.seed, drop_last=True)
    elif dist.is_initialized():
        sampler = range(args.rank, len(dataset), args.processes)  # DistributedSampler would test some images twice
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=train and sampler is None,
        sampler=sampler,
        drop_last=train,  # a graph has one batch size; the images left over are used in other epochs
        num_workers=args.workers,
        generator=torch.Generator(),  # train_epoch seeds it, so the order in an epoch depends only on its number
    )


# ----------------------------------------------------------------------------------------------------------- model


def make_model(args: argparse.Namespace, data: Data) -> nn.Module:
    if args.model == "resnet8":
        model = ResNet8(data.classes)
    else:
        model = torchvision.models.get_model(args.model, weights=None, num_classes=data.classes)
        if data.image_size <= 64:  # the stem of the CIFAR ResNets: the usual one shrinks images to a quarter
            model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
            model.maxpool = nn.Identity()
    # Convolutions take the layout of their weights, so that the images need no conversion.
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(args.device, dtype=ampkit.Policy.parse(args.policy).params, memory_format=layout)
    if args.torchcompile:
        model.compile(backend=args.torchcompile)  # in place: the checkpoint keeps the names of the plain model
    return model


class ResNet8(nn.Module):
    """A ResNet of 8 layers and 78 thousand parameters: torchvision's blocks with few channels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(
            BasicBlock(16, 16),
            BasicBlock(16, 32, stride=2, downsample=self.shortcut(16, 32)),
            BasicBlock(32, 64, stride=2, downsample=self.shortcut(32, 64)),
        )
        self.fc = nn.Linear(64, classes)

    @staticmethod
    def shortcut(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    # Fused: one kernel for all parameters, which also divides by the loss scale and skips a step that overflowed.
    options: dict[str, Any] = {"lr": args.lr, "weight_decay": args.weight_decay, "fused": True}
    if args.opt == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=args.momentum, **options)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[args.opt](model.parameters(), **options)


def make_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return a schedule that is stepped after every training step, not after every epoch."""
    if args.lr_scheduler == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * steps_per_epoch)
    if args.lr_scheduler == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, args.lr_step_size * steps_per_epoch, args.lr_gamma)
    return None


# ------------------------------------------------------------------------------------------- training, evaluation


class Training(NamedTuple):
    """Everything that a checkpoint must restore, and the policy."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    scaler: ampkit.GradScaler
    policy: ampkit.Policy


def make_training(args: argparse.Namespace, data: Data, steps_per_epoch: int) -> Training:
    model = make_model(args, data)
    shard(args, model)
    optimizer = make_optimizer(args, model)
    scheduler = make_scheduler(args, optimizer, steps_per_epoch)
    policy = ampkit.Policy.parse(args.policy)
    scaler = ampkit.GradScaler(torch.device(args.device).type, enabled=policy.needs_scaling)
    return Training(model, optimizer, scheduler, scaler, policy)


def make_step(args: argparse.Namespace, training: Training) -> ampkit.GraphedStep:
    """Return the training step: forward, backward, unscale, clip, optimizer, loss scale, learning rate."""

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(images.to(training.policy.params))  # copies only under policies such as bf16-true
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
        return loss, (logits.argmax(1) == labels).float().mean()

    return ampkit.graphed_step(
        loss_fn,
        distribute(args, training.model),
        training.optimizer,
        policy=training.policy,
        scaler=training.scaler,
        scheduler=training.scheduler,
        max_norm=args.clip_grad,
        graph="off" if args.cuda_graph == "off" or torch.device(args.device).type != "cuda" else "auto",
        on_failure="raise" if args.cuda_graph == "on" else "eager",
    )


def train_epoch(
    args: argparse.Namespace, training: Training, step: ampkit.GraphedStep, loader: DataLoader[Any], epoch: int
) -> dict[str, float]:
    training.model.train()
    loader.generator.manual_seed(1_000_000 * args.seed + 10_000 * args.rank + epoch)
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    device = torch.device(args.device)
    totals = torch.zeros(2, device=device)  # loss and accuracy, summed on the device: reading them would wait for it
    skipped_before = step.skipped
    start = time.perf_counter()
    hidden = None if args.rank == 0 else True  # None: hidden unless on a terminal
    with tqdm(total=len(loader), desc=f"epoch {epoch + 1}/{args.epochs}", leave=False, disable=hidden) as bar:
        for count, (images, labels) in enumerate(ampkit.prefetch(loader, device), start=1):
            out = step(images, labels)
            totals += torch.stack([out.loss, out.aux])
            bar.update()
            if count % args.print_freq == 0 or count == len(loader):  # the only steps that wait for the device
                loss, accuracy = (sum_over_processes(totals) / (count * args.processes)).tolist()
                metrics = {
                    "train_loss": loss,
                    "train_accuracy": accuracy,
                    "loss_scale": training.scaler.get_scale(),
                    "skipped": step.skipped - skipped_before,
                    "images_per_second": count * args.batch_size * args.processes / (time.perf_counter() - start),
                }
                bar.set_postfix_str(describe(metrics))
    return metrics


def describe(metrics: dict[str, float]) -> str:
    return (
        f"loss {metrics['train_loss']:.4f}, accuracy {metrics['train_accuracy']:.2%}, "
        f"scale {metrics['loss_scale']:g}, skipped {metrics['skipped']}, {metrics['images_per_second']:.0f} images/s"
    )


@torch.inference_mode()
def evaluate(args: argparse.Namespace, training: Training, loader: DataLoader[Any]) -> dict[str, float]:
    training.model.eval()
    share_buffers(training.model)
    device = torch.device(args.device)
    totals = torch.zeros(2, device=device)
    for images, labels in ampkit.prefetch(loader, device):
        with training.policy.autocast(device.type):
            logits = training.model(images.to(training.policy.params))
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        totals += torch.stack([loss, (logits.argmax(1) == labels).sum()])
    most = math.ceil(math.ceil(len(loader.dataset) / args.processes) / args.batch_size)  # batches of any process
    for _ in range(most - len(loader) if args.strategy == "fsdp" else 0):
        training.model(images.to(training.policy.params))  # it gathers parameters, which all processes must do as often
    loss, accuracy = (total / len(loader.dataset) for total in sum_over_processes(totals).tolist())
    return {"test_loss": loss, "test_accuracy": accuracy}


# ------------------------------------------------------------------------------------------------------ checkpoint

# Options that may differ in a resumed run.
FREE_OPTIONS = {"resume", "output_dir", "json", "print_freq", "data_path", "device", "cuda_graph", "strategy", "rank"}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # of fully_shard's parts, for the first process


def save_checkpoint(args: argparse.Namespace, training: Training, history: list[dict[str, float]]) -> None:
    """Write everything that a later run needs, with or without torchrun. All processes call this; the first writes."""
    model, optimizer = get_state_dict(training.model, training.optimizer, options=WHOLE)
    checkpoint = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": training.scheduler.state_dict() if training.scheduler else None,
        "scaler": training.scaler.state_dict(),
        "history": history,  # one entry per epoch
        "options": vars(args),
        "rng_cpu": gather(torch.get_rng_state()),  # one per process
        "rng_cuda": gather(torch.cuda.get_rng_state(args.device)) if args.device.startswith("cuda") else [],
    }
    if args.rank > 0:
        return
    path = Path(args.output_dir) / "checkpoint.pth"
    torch.save(checkpoint, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)  # a run that dies while it writes leaves the last good checkpoint


def load_checkpoint(args: argparse.Namespace, training: Training) -> list[dict[str, float]]:
    """Restore the state of `--resume` and return the history of its epochs."""
    try:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SystemExit(f"--resume {args.resume}: there is no such file. A run writes DIR/checkpoint.pth.") from None
    then, now = checkpoint["options"], vars(args)
    changed = {name for name in now.keys() - FREE_OPTIONS if then.get(name) != now[name]}
    if then["batch_size"] * then["processes"] == args.batch_size * args.processes:  # equal global batch size
        changed -= {"batch_size", "processes"}
    if args.lr_scheduler != "cosine":  # only the cosine depends on where the run ends
        changed.discard("epochs")
    if changed:
        options = ", ".join(
            f"--{name.replace('_', '-')} {then.get(name)} (now {now[name]})" for name in sorted(changed)
        )
        raise SystemExit(f"--resume {args.resume}: that run had {options}. Pass the same options to continue it.")
    parts = {"model_state_dict": checkpoint["model"], "optim_state_dict": checkpoint["optimizer"]}
    set_state_dict(training.model, training.optimizer, **parts, options=StateDictOptions(full_state_dict=True))
    training.scaler.load_state_dict(checkpoint["scaler"])
    if training.scheduler:
        training.scheduler.load_state_dict(checkpoint["scheduler"])
    if then["processes"] == args.processes:
        torch.set_rng_state(checkpoint["rng_cpu"][args.rank])
        if checkpoint["rng_cuda"] and args.device.startswith("cuda"):
            torch.cuda.set_rng_state(checkpoint["rng_cuda"][args.rank], args.device)
    return checkpoint["history"]


# --------------------------------------------------------------------------------------------------------- results


def weights_sha256(model: nn.Module) -> str:
    """Return a checksum of all weights and buffers: equal for two runs only if they are bitwise equal.

    All processes call this. It is right in the first one.
    """
    digest = hashlib.sha256()
    for name, tensor in get_model_state_dict(model, options=WHOLE).items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def plot_curves(args: argparse.Namespace, training: Training, history: list[dict[str, float]]) -> None:
    curves = {name: [metrics[name] for metrics in history] for name in history[0]}
    figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
    figure.suptitle(
        f"{args.model} on {args.dataset}, {args.policy} on {args.device}: "
        f"test accuracy {curves['test_accuracy'][-1]:.2%} after {len(history)} epochs",
        fontweight="bold",
    )
    loss, accuracy, scale, speed = figure.subplots(2, 2).flat
    plot_train_and_test(loss, curves["train_loss"], curves["test_loss"], "{:.3g}")
    loss.set(title="Loss", ylabel="cross entropy (nats)", yscale="log")
    plot_train_and_test(accuracy, curves["train_accuracy"], curves["test_accuracy"], "{:.2%}")
    accuracy.set(title="Accuracy", ylabel="share of images classified correctly")
    accuracy.yaxis.set_major_formatter("{x:.0%}")
    plot_loss_scale(scale, curves, scaled=training.scaler.is_enabled())
    speed.bar(range(1, len(history) + 1), curves["images_per_second"], width=0.6, color="tab:green", alpha=0.7)
    median = statistics.median(curves["images_per_second"])
    speed.axhline(median, color="black", linestyle="--", linewidth=1)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.set(title=f"Training speed, median {median:,.0f} images/s", ylabel="images/s")
    for axes in (loss, accuracy, scale, speed):
        axes.set_xlabel("epoch")
        axes.set_xlim(0.4, len(history) + 0.6)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.savefig(Path(args.output_dir) / "curves.png")


def plot_train_and_test(axes: Axes, train: list[float], test: list[float], number: str) -> None:
    epochs = range(1, len(train) + 1)
    axes.plot(epochs, train, "o-", markersize=3, color="tab:blue", label="train, last " + number.format(train[-1]))
    axes.plot(epochs, test, "o-", markersize=3, color="tab:orange", label="test, last " + number.format(test[-1]))
    axes.legend()


def plot_loss_scale(axes: Axes, curves: dict[str, list[float]], *, scaled: bool) -> None:
    """Draw the loss scale at the end of each epoch, and below it how many steps overflowed and were skipped."""
    axes.set_title("Loss scale and skipped steps")
    if not scaled:
        axes.text(0.5, 0.5, "this policy needs no loss scale", transform=axes.transAxes, ha="center", va="center")
        axes.set_yticks([])
        return
    epochs = range(1, len(curves["loss_scale"]) + 1)
    axes.plot(epochs, curves["loss_scale"], "o-", markersize=3, color="tab:purple")
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(curves["loss_scale"]) / 8, max(curves["loss_scale"]) * 4)
    axes.set_ylabel("loss scale at the end of the epoch", color="tab:purple")
    skipped = axes.twinx()
    skipped.bar(epochs, curves["skipped"], width=0.6, color="tab:red", alpha=0.5)
    skipped.set_ylim(0, max(4, 2 * max(curves["skipped"])))  # the bars stay in the lower half, below the scale
    skipped.set_ylabel("skipped steps per epoch", color="tab:red")
    skipped.yaxis.get_major_locator().set_params(integer=True)


def summarize(
    args: argparse.Namespace,
    training: Training,
    history: list[dict[str, float]],
    report: ampkit.Report,
    weights: str,
    seconds: float,
) -> dict[str, Any]:
    device = torch.device(args.device)
    return {
        "accuracy": history[-1]["test_accuracy"],
        "images_per_second": round(statistics.median(metrics["images_per_second"] for metrics in history), 1),
        "skipped_steps": sum(metrics["skipped"] for metrics in history),
        "loss_scale": history[-1]["loss_scale"],
        "graph": report.to_dict(),
        "weights_sha256": weights,
        "model": args.model,
        "dataset": args.dataset,
        "optimizer": args.opt,
        "policy": str(training.policy),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "epochs": len(history),
        "batch_size": args.batch_size,
        "processes": args.processes,
        "strategy": args.strategy if args.processes > 1 else None,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "curves": str(Path(args.output_dir) / "curves.png"),
        "checkpoint": str(Path(args.output_dir) / "checkpoint.pth"),
    }


def show_summary(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    """Write summary.json. Print the same on one line with --json, else a sentence."""
    path = Path(args.output_dir) / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    figures = f"accuracy {summary['accuracy']:.2%}, {summary['images_per_second']:.0f} images/s"
    print(json.dumps(summary) if args.json else f"{figures}, {summary['seconds']:.0f} s; more in {path}", flush=True)


# ------------------------------------------------------------------------------------------------------------ main


def main(argv: list[str] | None = None) -> None:
    start = time.perf_counter()
    args = parse_args(argv)
    join_processes(args)
    log = sys.stderr if args.json else sys.stdout
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed + 10_000 * args.rank)  # DDP copies the weights of the first process to all
    set_algorithms(args)
    data = load_data(args)
    train_loader = make_loader(data.train, args, train=True)
    test_loader = make_loader(data.test, args, train=False)
    if len(train_loader) == 0:
        share = " in each process" if args.processes > 1 else ""
        count = len(train_loader.sampler)
        raise SystemExit(f"--batch-size {args.batch_size}: there are only {count} training images{share}.")

    training = make_training(args, data, len(train_loader))
    history = load_checkpoint(args, training) if args.resume else []
    step = make_step(args, training)

    for epoch in range(len(history), args.epochs):
        metrics = train_epoch(args, training, step, train_loader, epoch)
        metrics |= evaluate(args, training, test_loader)
        history.append(metrics)
        save_checkpoint(args, training, history)
        if args.rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}: {describe(metrics)}; "
                f"test loss {metrics['test_loss']:.4f}, accuracy {metrics['test_accuracy']:.2%}",
                file=log,
                flush=True,
            )

    weights = weights_sha256(training.model)
    if args.rank == 0:
        plot_curves(args, training, history)
        report = step.report()
        print(report, file=log)
        summary = summarize(args, training, history, report, weights, time.perf_counter() - start)
        show_summary(args, summary)
    if dist.is_initialized():
        dist.destroy_process_group()


def set_algorithms(args: argparse.Namespace) -> None:
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be set before cuBLAS is first used
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not args.deterministic  # True: cuDNN measures its algorithms and uses the fastest


if __name__ == "__main__":
    main()
