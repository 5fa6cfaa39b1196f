"""doctor: planted faults are found by line, a repaired script has none, and what cannot be run or checked is said."""

import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch

import ampkit
from ampkit.__main__ import main
from ampkit._capture.graph import capture_query
from ampkit._commands.doctor import doctor as _doctor
from ampkit._commands.doctor.doctor import Diagnosis, DoctorError, diagnose
from ampkit._commands.doctor.faults import CHECKS, Fault
from ampkit._text import size_text

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"# fault: ([\w ]+)$")
# What scripts below leave as it is.
COMMON = """
import torch
from functools import partial
from torch import nn
from torch.nn import functional as F

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)

def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True, **options)

def data(*sizes):
    return [(torch.randn(n, 8), torch.randint(4, (n,))) for n in sizes or (8, 8)]
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that writes a module with a function `training` and examines it; it returns path and result."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = iter(f"script_{i}" for i in range(9))

    def examine(text, device="cpu", **options):
        name = next(names)
        path = tmp_path / f"{name}.py"
        path.write_text(f"DEVICE = {device!r}\n" + COMMON + textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return path, diagnose(name, lambda: importlib.import_module(name).training, bar=False, **options)

    return examine


def planted(path: Path) -> list[tuple[str, str]]:
    """Return (line of the file, kind) of each marked line."""
    lines = path.read_text().splitlines()
    found = [(i, match[1]) for i, line in enumerate(lines, 1) if (match := MARK.search(line))]
    return sorted((f"{path}:{i}: `{lines[i - 1].strip()}`", kind) for i, kind in found)


def named(found: Diagnosis) -> list[tuple[str, str]]:
    return sorted((fault.line, fault.kind) for fault in found.findings)


def failed(unchecked: list[str]) -> list[str]:
    """Return the checks that an error kept from their end."""
    return [title for text in unchecked if (title := text.partition(":")[0]) in CHECKS]


def cli(*argv: str) -> subprocess.CompletedProcess[str]:
    return forks.run_ampkit("doctor", *argv, cwd=ROOT / "tests" / "support")


# -------------------------------------------------------------------------------------------------------- whole scripts


@pytest.mark.slow
def test_six_faults(tmp_path):
    """All six planted faults are named by line and nothing else is, worst first; the exit status says so."""
    out = tmp_path / "found.json"
    done = cli("doctor_faulty:training", "--json", str(out))
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(out.read_text())
    expected = planted(ROOT / "tests" / "support" / "doctor_faulty.py")
    assert len(expected) == 6
    assert sorted((fault["line"], fault["kind"]) for fault in found["findings"]) == expected
    assert found["exit_code"] == 1
    severities = [fault["severity"] for fault in found["findings"]]
    assert severities == sorted(severities, key=["high", "medium", "low"].index)
    for fault in found["findings"]:
        assert fault["line"] in done.stdout
        assert fault["advice"] in done.stdout


def test_repaired(capsys):
    """The same script, repaired as advised, has no findings."""
    assert main(["doctor", "doctor_repaired:training", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["findings"], found["exit_code"]) == ([], 0)
    assert failed(found["unchecked"]) == []
    assert not planted(ROOT / "tests" / "support" / "doctor_repaired.py")


# ------------------------------------------------------------------------------------------------------- fault by fault

FAULTS = {
    "reads in the loss and in the backward": """
        class Read(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, grad):
                return grad * float(grad.new_ones(()))  # fault: blocking line
        def loss(model, x, y):
            keep = model(x)[model(x).sum(1) > 0]  # fault: blocking line
            return Read.apply(keep).square().mean() + loss_fn(model, x, y)
        def training():
            model = net()
            return loss, model, sgd(model), data()
        """,
    "Python's random numbers": """
        import random
        def loss(model, x, y):
            scale = random.random()
            return loss_fn(model, x * scale, y)  # fault: host random numbers
        def training():
            model = net()
            return loss, model, sgd(model), data()
        """,
    "a counter that scales the loss": """
        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.calls = net(), 0
            def forward(self, x):
                self.calls += 1
                return self.net(x) / self.calls  # fault: host state
        def training():
            model = Counted()
            return loss_fn, model, sgd(model), data()
        """,
    "random numbers of generators that nothing watches": """
        import random, secrets, time
        import numpy as np
        rng, other = np.random.default_rng(0), random.Random(0)
        def loss(model, x, y):
            x = x + torch.from_numpy(rng.normal(size=(8, 8))).float()  # fault: host state
            x = x * torch.as_tensor(rng.normal(size=8)).float()  # fault: host state
            x = x * other.random()  # fault: host state
            x = F.dropout(x, p=0.1 + 0.1 * rng.random())  # fault: host state
            x = torch.roll(x, secrets.randbelow(2**30) * 2, 0)  # fault: host state
            return loss_fn(model, x, y) * torch.tensor(time.perf_counter())  # fault: host state
        def training():
            model = net()
            return loss, model, sgd(model), data()
        """,
    "another operation in every other step": """
        import itertools
        turns = itertools.cycle([True, False])
        def loss(model, x, y):
            x = x.sin() if next(turns) else x.cos()  # fault: host state
            return loss_fn(model, x, y)
        def training():
            model = net()
            return loss, model, sgd(model), data()
        """,
    "a slice that moves, per micro-batch": """
        import itertools
        places = itertools.count()
        def loss(model, x, y):
            k = next(places)
            x[k % 8, :k % 5] = 0  # fault: host state
            return loss_fn(model, x, y)
        def training():
            model = net()
            return loss, model, sgd(model), data(8, 8, 8), {"accumulate": 2}
        """,
    "a counter in a hook of the backward and in what follows the step": """
        import itertools
        counter = itertools.count(1)
        def training():
            model = net()
            model[0].weight.register_hook(lambda grad: grad * next(counter))  # fault: host state
            def decay(model):
                model[0].bias.mul_(1 - 1e-3 * next(counter))  # fault: host state
            return loss_fn, model, sgd(model), data(), {"after_step": decay}
        """,
    "a batch of another dtype in a list": """
        def training():
            model = net()
            batches = data()
            x = torch.randn(8, 8, dtype=torch.float64).float()
            odd = torch.randn(8, 8).t()  # fault: changing shapes
            return loss_fn, model, sgd(model), [*batches, (odd, batches[0][1]), (x, batches[1][1])]
        """,
    "a user's collate function": """
        def collate(samples):
            width = max(len(text) for text in samples)
            return torch.stack([F.pad(text, (0, width - len(text))) for text in samples])  # fault: changing shapes
        def training():
            model = nn.Sequential(nn.AdaptiveAvgPool1d(8), net())
            texts = [torch.ones(n) for n in (8, 8, 8, 8, 12, 9)]
            batches = torch.utils.data.DataLoader(texts, batch_size=2, collate_fn=collate)
            return lambda model, x: model(x[:, None]).square().mean(), model, sgd(model), batches
        """,
    "a short batch that is not looked at": """
        def training():
            model = net()
            x, y = torch.randn(101, 8), torch.randint(4, (101,))
            samples = torch.utils.data.TensorDataset(x, y)
            return (
                loss_fn, model, sgd(model), torch.utils.data.DataLoader(samples, batch_size=2)  # fault: changing shapes
            )
        """,
    "an optimizer that no graph can hold": """
        def training():
            model = net()
            optimizer = torch.optim.Adafactor(model.parameters())  # fault: optimizer
            return loss_fn, model, optimizer, data()
        """,
    "an optimizer that is capturable but not fused": """
        def training():
            model = net()
            optimizer = torch.optim.AdamW(model.parameters())  # fault: optimizer
            return loss_fn, model, optimizer, data()
        """,
    "betas under a schedule": """
        def training():
            model = net()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)  # fault: schedule
            return loss_fn, model, optimizer, data(), {"scheduler": schedule, "accumulate": 2}
        """,
    "weight decay under a schedule of the user's": """
        class Decay:
            def __init__(self, optimizer):
                self.optimizer = optimizer
            def step(self):
                self.optimizer.param_groups[0]["weight_decay"] += 1e-4
        def training():  # fault: schedule
            model = net()
            optimizer = sgd(model)
            return loss_fn, model, optimizer, data(), {"scheduler": Decay(optimizer)}
        """,
    "a model in half": """
        class Normed(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.norm = net(), nn.BatchNorm1d(4)
            def forward(self, x):
                return self.norm(self.net(x.bfloat16()))  # fault: low precision
        def loss(model, x, y):
            return F.nll_loss(model(x).log_softmax(-1), y)  # fault: low precision
        def training():
            model = Normed().bfloat16()
            return loss, model, torch.optim.AdamW(model.parameters(), fused=True), data()
        """,
    "an operation without determinism": """
        def loss(model, x, y):
            index = torch.arange(8)
            mask = torch.zeros(8).put_(index, torch.ones(8))  # fault: nondeterministic
            return loss_fn(model, x * mask, y)
        def training():
            model = net()
            return loss, model, sgd(model), data()
        """,
    "an operation without determinism in a module of torch": """
        class Unpooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.pool, self.unpool = net(), nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2)
            def forward(self, x):
                pooled, where = self.pool(x[:, None])
                return self.net(self.unpool(pooled, where)[:, 0])  # fault: nondeterministic
        def training():
            model = Unpooled()
            return loss_fn, model, sgd(model), data()
        """,
}


@pytest.mark.parametrize("text", FAULTS.values(), ids=FAULTS)
@pytest.mark.quick(4)
def test_fault(script, text):
    """What is planted is found on its line, and nothing else."""
    path, found = script(text)
    assert named(found) == planted(path)


OUTCOMES = {
    "whole": (
        """
        def training():
            model = net()
            return loss_fn, model, sgd(model), data()
        """,
        "graphed_step captures the whole step.",
        [],
    ),
    "in parts": (
        """
        class Own(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {})
            @torch.no_grad()
            def step(self, closure=None):
                for param in self.param_groups[0]["params"]:
                    param.sub_(param.grad, alpha=0.01 / (1 + float(param.grad.norm())))  # fault: blocking line
        def training():
            model = net()
            return loss_fn, model, Own(model.parameters()), data()
        """,
        "graphed_step captures forward and backward, with Own stepping eagerly behind the graph.",
        [("medium", "optimizer"), ("medium", "blocking line")],
    ),
    "eager": (
        """
        def loss(model, x, y):
            found = loss_fn(model, x, y)
            print(end="" if float(found.detach()) > 0 else "!")  # fault: blocking line
            return found
        def training():
            model = net()
            return loss, model, torch.optim.Adafactor(model.parameters()), data()
        """,
        "` it captures forward and backward, with Adafactor stepping eagerly behind the graph.",
        [("high", "blocking line"), ("medium", "optimizer")],
    ),
    "whole on another branch": (
        """
        def loss(model, x, y):
            if not torch.cuda.is_current_stream_capturing():
                assert float(next(model.parameters()).isfinite().all())  # fault: blocking line
            return loss_fn(model, x, y)
        def training():
            model = net()
            return loss, model, sgd(model), data()
        """,
        "graphed_step captures the whole step.",
        [("low", "blocking line")],
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome(script, monkeypatch, name):
    """What graphed_step captures of the step, and what one line would change."""
    if not torch.cuda.is_available():  # without a driver, torch raises an error where it is asked
        monkeypatch.setattr(capture_query, "_is_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    text, note, faults = OUTCOMES[name]
    path, found = script(text)
    assert sorted((fault.severity, fault.kind) for fault in found.findings) == sorted(faults)
    assert {fault.line for fault in found.findings if fault.kind != "optimizer"} == {line for line, _ in planted(path)}
    assert found.figures["outcome"] == name.removesuffix(" on another branch")
    assert any(text.endswith(note) for text in found.notes)


def test_modules_that_are_captured_one_by_one(script):
    """R4: the modules around an uncapturable line, and why others are not captured, as the report of a run has it."""
    path, found = script(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                layers = lambda: [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
                self.first, self.second = nn.Sequential(*layers()), nn.Sequential(*layers(), nn.Linear(8, 4))
            def forward(self, x):
                hidden = self.first(x)
                return self.second(hidden / (1 + hidden.abs().max().item()))  # fault: blocking line
        def training():
            model = Net()
            return loss_fn, model, sgd(model), data()
        """
    )
    assert {(fault.line, fault.kind) for fault in found.findings} == set(planted(path))
    assert found.figures["outcome"] == "in parts"
    (note,) = [text for text in found.notes if text.startswith("graphed_step captures")]
    assert note.startswith("graphed_step captures modules one by one:\n  captured by itself: first, second\n")
    assert "cannot be captured" not in note, "the line is a finding"
    assert note.endswith("it captures the whole step.")
    assert list(found.figures["shares"]) == ["first", "second", "the update of the parameters", "eager"]
    assert abs(sum(found.figures["shares"].values()) - 1) < 1e-6
    assert any(text.startswith("Of the time of an eager step: first ") for text in found.notes)


def test_the_update_alone(script):
    """R4: where no module can be captured by itself, the update of the parameters still is, and that is said."""
    path, found = script(
        """
        def loss(model, x, y):
            value = loss_fn(model, x, y)
            return value * (1 if float(value.detach()) < 100 else 2)  # fault: blocking line
        def training():
            model = net()
            return loss, model, torch.optim.AdamW(model.parameters(), fused=True), data()
        """
    )
    assert {fault.line for fault in found.findings if fault.severity == "high"} == {line for line, _ in planted(path)}
    assert found.figures["outcome"] == "in parts"
    (note,) = [text for text in found.notes if text.startswith("graphed_step captures")]
    assert note.startswith(
        "graphed_step captures the update of the parameters by itself:\n  captured by itself: no module\n"
    )


def test_modules_of_one_line(script):
    """A line that many modules share is one finding, which says how many."""
    path, found = script(
        """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(8)
            def forward(self, x):
                return self.norm(x)  # fault: low precision
        def training():
            model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 4)).bfloat16()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            return lambda model, x, y: loss_fn(model, x.bfloat16(), y).float(), model, optimizer, data()
        """
    )
    norms = [fault for fault in found.findings if fault.what.startswith("batch_norm")]
    assert [(fault.line, fault.kind) for fault in norms] == planted(path)
    assert norms[0].what == "batch_norm computes in bfloat16 in 0.norm and 2 more modules"
    assert norms[0].count == 3
    assert "Keep the model in float32" in norms[0].advice


def test_what_varies_is_told_with_both_values(script):
    """The first argument that differs is named with its two values, and how to pass it in."""
    _, found = script(
        """
        import itertools
        counter = itertools.count()
        def loss(model, x, y):
            return loss_fn(model, x, y) * torch.full((), next(counter) / 2.0)
        def training():
            model = net()
            return loss, model, sgd(model), data(8)
        """
    )
    (fault,) = found.findings
    values = r"(0\.5 in one step and 1\.0|1\.0 in one step and 1\.5)"  # a step less where dynamo was imported before
    assert re.match(f"full takes {values} in another, for batches of the same layout: a graph would repeat", fault.what)
    assert "Pass the varying value as a tensor of the batch" in fault.advice
    assert fault.severity == "high"
    assert fault.count in (2, 3)  # each step behind the first is compared with the first of these


def test_layouts_that_come_once_are_not_compared(script):
    """What a layout's first call makes may be missing in its second: too few calls are said to be too few."""
    _, found = script(
        """
        def training():
            model = net()
            return loss_fn, model, sgd(model), data(8, 7, 6, 5)
        """
    )
    assert [fault.kind for fault in found.findings] == ["changing shapes"]
    assert "host state: no two steps had batches of the same layout, so none could be compared" in found.unchecked


def test_compiled_code_is_compared_as_it_was_written(script, fresh_dynamo):
    """A counter in compiled code is found, and the code is compiled no more often for that."""
    path, found = script(
        """
        compiled = []
        def backend(graph, inputs):
            compiled.append(graph)
            return graph
        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.calls = net(), 1.0
            def forward(self, x):
                self.calls = self.calls + 0.5
                return self.net(x) / self.calls  # fault: host state
        def training():
            model = Counted()
            return loss_fn, torch.compile(model, backend=backend), sgd(model), data()
        """
    )
    assert planted(path)[0] in named(found)
    assert len(sys.modules[path.stem].compiled) == 2  # with the first number and with any, as without the records


SOUND = {
    "a learning rate under a schedule": """
        def training():
            model = net()
            optimizer = sgd(model)
            return loss_fn, model, optimizer, data(), {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
        """,
    "autocast, which has a softmax in float32 on CUDA": """
        def training():
            model = nn.Sequential(net(), nn.BatchNorm1d(4), nn.LogSoftmax(-1))
            return loss_fn, model, sgd(model), data(), {"policy": "bfloat16"}
        """,
    "float16 with a loss scale and clipping": """
        def training():
            model = net()
            return loss_fn, model, sgd(model), data(), {"policy": "float16", "max_norm": 1.0}
        """,
    "an optimizer of the user's with a step count": """
        class Mine(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": 0.1, "capturable": True})
                self.steps = 0
            @torch.no_grad()
            def step(self, closure=None):
                self.steps += 1
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(p.grad * (group["lr"] / self.steps))
        def training():
            model = net()
            return loss_fn, model, Mine(model.parameters()), data()
        """,
    "a mask that is made once, random numbers of the device, a counter on the device": """
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.mask = net(), None
                self.register_buffer("calls", torch.zeros(()))
            def forward(self, x):
                if self.mask is None:
                    self.mask = torch.ones(8).cumsum(0) / 8
                self.calls += 1
                return self.net(F.dropout(x * self.mask + torch.rand_like(x), 0.3)) / self.calls
        def training():
            model = Masked()
            return loss_fn, model, sgd(model), data()
        """,
    "shapes that buckets make equal": """
        from ampkit import Buckets
        def training():
            model = net()
            loss = lambda model, x, mask: (model(x).square().mean(1) * mask).sum() / mask.sum()
            batches = [(torch.randn(n, 8),) for n in (8, 5)]
            return loss, model, sgd(model), batches, {"buckets": Buckets(batch=(8,))}
        """,
    "shapes that a step makes equal": """
        def training():
            model = net()
            loss = lambda model, x, mask: (model(x).square() * mask[:, :1]).sum() / mask[:, 0].sum()
            batches = [(torch.randn(n, 8),) for n in (8, 5)]
            return loss, model, sgd(model), batches, {"buckets": "auto"}
        """,
    "an optimizer's maker, keyword arguments, what bench takes": """
        def training():
            batches = [{"x": x, "y": y} for x, y in data()]
            return loss_fn, net(), lambda params: torch.optim.Adam(params, fused=True), batches
        """,
    "a batch that is like a dict": """
        from collections import UserDict
        def training():
            model = net()
            return loss_fn, model, sgd(model), [UserDict(x=x, y=y) for x, y in data()]
        """,
    "an optimizer without a fused form that a graph can hold": """
        def training():
            model = net()
            return loss_fn, model, torch.optim.RMSprop(model.parameters()), data()
        """,
    "a loader with one batch, which is short": """
        def training():
            model = net()
            samples = torch.utils.data.TensorDataset(torch.randn(5, 8), torch.randint(4, (5,)))
            return loss_fn, model, sgd(model), torch.utils.data.DataLoader(samples, batch_size=8)
        """,
    "one argument that is no tuple, an iterator": """
        def training():
            model = net()
            return lambda model, x: model(x).square().mean(), model, sgd(model), iter([torch.ones(2, 8)] * 3)
        """,
}


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
@pytest.mark.quick(4)
def test_no_fault(script, text):
    """What is in order is not reported, and every check ran."""
    _, found = script(text)
    assert not found.findings
    assert found.exit_code == 0
    assert failed(found.unchecked) == []
    assert "no findings" in str(found)


def test_decisions_of_the_host(script):
    """R3: draws on the CPU that are only compared can be captured; that each outcome takes a graph is said."""
    _, found = script("""
        class Dropping(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.extra = net(), nn.Linear(8, 8)
            def forward(self, x):
                return self.net(x if torch.rand(()) < 0.5 else self.extra(x))
        def training():
            model = Dropping()
            return loss_fn, model, sgd(model), data()
        """)
    (fault,) = found.findings
    assert (fault.severity, fault.kind) == ("low", "host random numbers")
    assert "decides by 1 comparison(s) of random draws in a step" in fault.what
    assert "captures the whole step" in str(found)


def test_questions_about_the_batch(script):
    """D3: a branch, a selection and a size can be captured; that each combination of answers takes a graph is said."""
    _, found = script("""
        def loss(model, x, y):
            if y.max() >= 4:
                raise ValueError("a label is out of range")
            return loss_fn(model, x[y > 0], y[y > 0]) * int((y > 0).sum())
        def training():
            model = net()
            return loss, model, sgd(model), data()
        """)
    assert {(fault.severity, fault.kind) for fault in found.findings} == {("low", "question about the batch")}
    lines = {fault.line.partition(": ")[2]: fault.count for fault in found.findings}
    selected = "`return loss_fn(model, x[y > 0], y[y > 0]) * int((y > 0).sum())`"
    assert lines == {"`if y.max() >= 4:`": 1, selected: 3}
    assert "captures the whole step" in str(found)


def test_questions_of_a_library(script):
    """D3: the line that makes a distribution, and the one that evaluates it, with what to write instead."""
    path, found = script("""
        def training():
            actor = net()
            def act(x):
                normal = torch.distributions.Normal(actor(x), 1.0, validate_args=True)  # fault: question to the device
                action = normal.sample()
                return normal.log_prob(action)  # fault: question to the device
            return torch.no_grad()(act), [torch.randn(8, 8) for _ in range(3)]
        """)
    assert named(found) == planted(path)
    assert all("pass validate_args=False" in fault.advice for fault in found.findings)
    assert found.notes[0] == "graphed captures the whole function."


# ------------------------------------------------------------------------------------------------------------ Lightning

LIGHTNING = """
    import lightning.pytorch as pl
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            {extra}
            return {returned}
        def configure_optimizers(self):
            {optimizer}
            return {configured}
    def training():
        x, y = torch.randn(20, 8), torch.randint(4, (20,))
        samples = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(samples, {loader})
        return Module(), loader
    """


def test_lightning(script):
    """Faults of a LightningModule, its optimizer, its schedule by step and its loader."""
    pytest.importorskip("lightning.pytorch")
    text = LIGHTNING.format(
        extra="self.seen = loss.item()  # fault: blocking line",
        returned='{"loss": loss}',
        optimizer="optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # fault: optimizer\n"
        "            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)  # fault: schedule",
        configured='{"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}',
        loader="batch_size=8)  # fault: changing shapes\n        loader = (loader",
    )
    path, found = script(text, lightning=True)
    assert named(found) == planted(path)


@pytest.mark.parametrize(
    "configured", ["[optimizer]", "optimizer", "([optimizer], [cycle])", '{"optimizer": optimizer}']
)
@pytest.mark.quick(4)
def test_lightning_without_faults(script, configured):
    """All forms of one optimizer; a scheduler that is stepped per epoch changes nothing between steps."""
    pytest.importorskip("lightning.pytorch")
    text = LIGHTNING.format(
        extra="",
        returned="loss",
        optimizer="optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)\n"
        "            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)",
        configured=configured,
        loader="batch_size=8, drop_last=True",
    )
    _, found = script(text, lightning=True)
    assert not found.findings


def test_lightning_with_two_optimizers(script):
    """What a callback would refuse is refused here."""
    pytest.importorskip("lightning.pytorch")
    text = LIGHTNING.format(
        extra="", returned="loss", optimizer="a, b = sgd(self), sgd(self)", configured="[a, b]", loader="batch_size=8"
    )
    with pytest.raises(DoctorError, match="expected a single optimizer"):
        script(text, lightning=True)


def test_without_lightning(script, monkeypatch):
    """The message has the command that installs it."""
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(DoctorError, match=re.escape("pip install 'ampkit[lightning]'")):
        script("def training(): ...", lightning=True)


# ---------------------------------------------------------------------------------------------------- graphed functions


GAN = """
gen, disc = nn.Linear(8, 8), nn.Linear(8, 1)
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, fused=True)
opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3{fused})  {mark}

def update(real):
    fake = gen(real)
    for optimizer in (opt_d, opt_g):
        loss = disc(fake.detach()).mean() - disc(real).mean() if optimizer is opt_d else -disc(fake).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {line}
    return loss.detach()

def training():
    return update, [torch.randn(8, 8) for _ in range(3)]{options}
"""
DECLARED = ", {'modules': (gen, disc), 'optimizers': (opt_g, opt_d)}"


@pytest.mark.parametrize("options", ["", DECLARED])
def test_a_function_for_graphed(script, options):
    """Two optimizers, stepped by the function itself; they are found, or declared."""
    fault = {"fused": "", "mark": "# fault: optimizer", "line": "loss.item()  # fault: blocking line"}
    path, found = script(GAN.format(options=options, **fault))
    assert named(found) == planted(path)
    assert found.figures["outcome"] == "eager"
    assert not any("aux" in fault.advice for fault in found.findings)
    assert found.notes[-1].startswith("graphed captures nothing. Without ")
    assert found.notes[-1].endswith("it captures the whole function.")
    clean = {"fused": ", fused=True", "mark": "", "line": ""}
    _, found = script(GAN.format(options=options, **clean))
    assert not found.findings
    assert found.notes[0] == "graphed captures the whole function."
    assert failed(found.unchecked) == []
    assert any("memory: it is forecast for one loss and one optimizer" in text for text in found.unchecked)


def test_a_line_of_a_package(script, tmp_path):
    """The line of the user's own that led to it stands below it."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "somebodys.py").write_text("def read(x):\n    return float(x)\n")
    path, found = script(f"""
        import sys
        sys.path.insert(0, {str(tmp_path / "site-packages")!r})
        import somebodys
        def loss(model, x, y):
            found = loss_fn(model, x, y)
            somebodys.read(found.detach())  # fault: blocking line
            return found
        def training():
            model = net()
            return loss, model, sgd(model), data()
    """)
    (fault,) = found.findings
    ((line, kind),) = planted(path)
    assert (fault.kind, fault.caller) == (kind, line)
    assert "somebodys.py:2" in fault.line
    assert f"called from {line}" in str(found)


def test_constants_of_the_batch(script):
    """A kind of update that a constant tells has a graph of its own, which is no fault of its shapes."""
    _, found = script("""
        def training():
            actor = net()
            batches = [(torch.randn(8, 8), k % 2 == 0) for k in range(4)]
            return torch.no_grad()(lambda x, moves: actor(x) * moves), batches
        """)
    (fault,) = found.findings
    assert (fault.severity, fault.kind) == ("low", "constants of the batch")
    assert "batch[1] is False, not True" in fault.what
    assert "in a tensor" in fault.advice
    assert "drop_last" not in fault.advice


def test_what_no_single_step_shows(script):
    """A target whose parameters get other memory in each call: the function has no graph, and the doctor says why."""
    _, found = script("""
        def training():
            q, target = nn.Linear(8, 4), nn.Linear(8, 4)
            optimizer = torch.optim.SGD(q.parameters(), lr=0.1, fused=True)
            def update(x):
                with torch.no_grad():
                    wanted = target(x)
                optimizer.zero_grad()
                loss = (q(x) - wanted).square().mean()
                loss.backward()
                optimizer.step()
                for param, followed in zip(q.parameters(), target.parameters(), strict=True):
                    followed.data = 0.1 * param.data + 0.9 * followed.data
                return loss.detach()
            return update, [torch.randn(8, 8) for _ in range(3)]
        """)
    (fault,) = found.findings
    assert (fault.severity, fault.kind) == ("high", "capture")
    assert re.search("moved to other memory|got other memory", fault.what)
    assert found.figures["outcome"] == "eager"
    assert found.notes[-1] == "graphed captures nothing. Without that finding it captures the whole function."


def test_functions_of_other_kinds(script):
    """One that changes nothing, batches of a generator, an optimizer that no graph can hold; what is refused."""
    _, found = script("""
        def training():
            model = net()
            return torch.no_grad()(lambda x: model(x)), (torch.randn(8, 8) for _ in range(3))
    """)
    assert not found.findings
    path, found = script("""
        def training():
            model = net()
            optimizer = torch.optim.Adafactor(model.parameters())  # fault: optimizer
            def update(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()
            return update, iter([torch.randn(8, 8) for _ in range(3)])
    """)
    assert [(fault.severity, fault.line) for fault in found.findings] == [("high", line) for line, _ in planted(path)]
    assert found.figures["outcome"] == "eager"
    with pytest.raises(DoctorError, match="Return the one that it was given"):
        script("import ampkit\ndef training():\n    return ampkit.graphed(modules=())(net()), data()")
    made = "ampkit.graphed_step(loss_fn, model, sgd(model), graph='emulate')"
    with pytest.raises(DoctorError, match=r"graphed_step has made. Return what .*, batches, options"):
        script(f"import ampkit\ndef training():\n    model = net()\n    return {made}, data()")
    with pytest.raises(DoctorError, match="'lr', expected a dict of arguments of graphed: modules"):
        script("def training():\n    return (lambda x, y: x), data(), {'lr': 1}")
    with pytest.raises(DoctorError, match="Leave out --policy"):
        script("def training():\n    return (lambda x, y: x), data()", policy=ampkit.Policy.parse("bfloat16"))


def test_several_optimizers(script):
    """Those of `graphed_step`, of which one is not fused."""
    path, found = script("""
        def training():
            model = net()
            first = torch.optim.AdamW(model[0].parameters(), fused=True)
            second = torch.optim.AdamW(model[2].parameters())  # fault: optimizer
            return loss_fn, model, [first, second], data()
    """)
    assert named(found) == planted(path)


# -------------------------------------------------------------------------------------------------------- cannot be run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def training():\n    return 3", r"returned int, expected \(loss_fn, model, optimizer, batches\)"),
        (
            "def training():\n    return loss_fn, net(), 0.1, data()",
            r"optimizer=float\): expected a torch.optim.Optimizer",
        ),
        ("def training():\n    model = net()\n    return loss_fn, model, sgd(model), []", "there is no batch"),
        ("def training():\n    model = net()\n    return 3, model, sgd(model), data()", "returned int for loss_fn"),
        ("def training():\n    model = net()\n    return loss_fn, 3, sgd(model), data()", "expected a torch.nn.Module"),
        ("def training():\n    model = net()\n    return loss_fn, model, sgd(model), data(), {'lr': 1}", "'lr'"),
        ("def training():\n    return 1 / 0", r"ZeroDivisionError: .*:\d+: `return 1 / 0`"),
        (
            "def training():\n    model = net()\n    return lambda model, x, y: model(x), model, sgd(model), data()",
            "loss_fn returned a loss of shape",
        ),
    ],
)
def test_cannot_be_run(script, text, message):
    """The message says what came, and names the line of an error in the user's code."""
    with pytest.raises(DoctorError, match=message):
        script(text)


def test_exit_status_2(capsys):
    """Also for a module that is not there, which is Python's 1 elsewhere."""
    for call, message in (("nope:x", "No module named 'nope'"), ("nope", "expected module:function")):
        assert main(["doctor", call]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert message in printed.err


def test_a_check_that_fails(script):
    """An error after the first step costs one check, which is said; the others go on."""
    path, found = script(
        """
        def training():
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # fault: optimizer
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3, cycle_momentum=False)
            return loss_fn, model, optimizer, data(), {"scheduler": schedule}
        """
    )
    assert named(found) == planted(path)
    assert failed(found.unchecked) == ["schedule", "kernels", "host state"]
    why = "torch.optim.lr_scheduler raised an exception, which --json names"
    assert f"schedule: {why}" in found.unchecked
    assert "Tried to step 4 times" not in str(found)
    assert "ValueError: Tried to step 4 times" in found.figures["errors"]["schedule"]
    assert json.loads(found.to_json())["figures"]["errors"].keys() == {"schedule", "kernels"}


def test_why_a_check_was_not_made(script):
    """The user's line where there is one, or what a forecast cannot do; no text of an exception."""
    path, found = script(
        """
        calls = []

        def loss(model, x, y):
            calls.append(None)
            if len(calls) > 1:
                raise KeyError("later")
            return loss_fn(model, x, y)

        def training():
            model = net()
            return loss, model, sgd(model), data()
        """
    )
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "later" in text)
    where = f'{path}:{line}: `raise KeyError("later")`'
    assert f"kernels: your code raised an exception, which --json names: {where}" in found.unchecked
    assert f"memory: your code raised an exception, which --json names: {where}" in found.unchecked
    path, found = script(
        """
        def training():
            model = net()
            return lambda model, x, y: loss_fn(model, x[y > 0], y[y > 0]), model, sgd(model), data()
        """
    )
    (memory,) = (text for text in found.unchecked if text.startswith("memory"))
    assert re.match("memory: the step needs the value of a tensor, and a forecast computes shapes alone: /.*`$", memory)
    path, found = script(
        """
        class Odd(torch.optim.SGD):
            def step(self, closure=None, *, scale):
                return super().step(closure)

        def training():
            model = net()
            optimizer = Odd(model.parameters(), lr=0.1)
            optimizer.step = partial(optimizer.step, scale=1)
            return loss_fn, model, optimizer, data()
        """
    )
    (memory,) = (text for text in found.unchecked if text.startswith("memory"))
    assert memory.startswith("memory: debug.forecast: Odd.step needs scale, and the forecast calls optimizer.step().")


def test_the_policy_of_the_command(script):
    """It takes the place of the one among the options."""
    text = """
        def training():
            model = net()
            return loss_fn, model, sgd(model), data(), {"policy": "float16"}
        """
    for policy in ("bfloat16", "float32"):
        _, found = script(text, policy=ampkit.Policy.parse(policy))
        peaks = found.figures["memory"]["peak_bytes"]
        assert list(peaks) == ["None", str(ampkit.Policy.parse(policy))]


# --------------------------------------------------------------------------------------------------------------- report


def test_order_and_text():
    """By severity, then by time waited, then by count; times and counts stand in the text."""
    faults = [
        Fault("low", "c", "f:1: `c`", "is c", "Do."),
        Fault("high", "a", "f:2: `a`", "is a", "Do.", ms=1.0),
        Fault("medium", "b", "f:3: `b`", "is b", "Do.", count=3),
        Fault("high", "d", "", "is d", "Do.", ms=2.0),
    ]
    found = Diagnosis("m:f", "cpu", sorted(faults, key=lambda fault: fault.rank))
    assert [fault.kind for fault in found.findings] == ["d", "a", "b", "c"]
    text = str(found)
    assert "m:f on cpu" in text
    assert "4 findings" in text
    assert "high    d: (no line of yours)" in text
    assert "is b (3 times)" in text
    assert "is d, 2.000 ms" in text
    assert found.exit_code == 1


def test_progress(script, monkeypatch):
    """A line on a terminal, which is gone at the end; none where there is no terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    written = []
    monkeypatch.setattr(sys.stderr, "write", written.append)
    text = "def training():\n    model = net()\n    return loss_fn, model, sgd(model), data()"
    script(text)
    assert not written  # bar=False
    sys.modules.pop("script_1", None)
    diagnose("again", lambda: sys.modules["script_0"].training)
    shown = "".join(written)
    assert all(title in shown for title in CHECKS)
    assert shown.endswith("\r\033[K")
    before = len(written)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    diagnose("again", lambda: sys.modules["script_0"].training)
    assert len(written) == before


def test_gain(script, monkeypatch):
    """Step and host time are measured, the device's is the profiler's; a schedule that is at its end is left alone."""
    calls, profiled, kept = [], [], []

    class Profiler:
        def __init__(self, **options):
            profiled.append(-len(calls))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            profiled[-1] += len(calls)

        def events(self):
            kernel = {"device_type": SimpleNamespace(name="CUDA"), "is_user_annotation": False, "name": "gemm"}
            spans = [SimpleNamespace(start=10 * i, end=10 * i + 5) for i in range(2 * profiled[-1])]  # microseconds
            return [SimpleNamespace(**kernel, time_range=span, id=i) for i, span in enumerate(spans)]

    trial_of = _doctor.Trial
    monkeypatch.setattr(_doctor, "Trial", lambda subject: kept.append(trial_of(subject)) or kept[-1])
    _, found = script(
        """
        def training():
            model = net()
            optimizer = sgd(model)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5, cycle_momentum=False)
            return loss_fn, model, optimizer, data(), {"scheduler": schedule}
        """
    )
    assert not found.findings
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    loss_fn = kept[0].subject.loss_fn
    kept[0].subject.loss_fn = lambda *args: calls.append(1) or loss_fn(*args)
    _doctor._add_speed_up(found, kept[0])
    gain = found.figures["capture"]
    assert gain["kernels"] == 2
    assert gain["device_ms"] == pytest.approx(0.01)
    assert gain["step_ms"] > 0
    assert gain["host_ms"] > 0
    assert f"up to {gain['step_ms'] / 0.01:.1f} times as fast" in str(found)


@pytest.mark.parametrize("batch", ["(x, y)", pytest.param("{'x': x, 'y': y}", marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_memory(script, batch):
    """The forecast for CUDA before and after the policy, of batches in any form."""
    if not torch.backends.cuda.is_built():
        pytest.skip("torch was built without CUDA")
    _, found = script(
        f"""
        def training():
            x, y = torch.randn(65536, 8), torch.randint(4, (65536,))
            optimizer = partial(torch.optim.AdamW, fused=True)
            return loss_fn, net(), optimizer, [{batch}], {{"policy": "bfloat16"}}
        """
    )
    memory = found.figures["memory"]
    policy = "params=float32,compute=bfloat16,output=float32"
    assert memory["device"] == "cuda"
    assert list(memory["peak_bytes"]) == ["None", policy]
    before, after = memory["peak_bytes"].values()
    assert 4 * 65536 * (8 + 16 + 4) < after < before
    told = f"{size_text(before)} without a policy, {size_text(after)} under {policy}"
    assert f"Memory of a step on cuda, forecast: {told}." in str(found)


def test_memory_of_a_loss_with_tensors(script):
    """A loss that is a module is brought to the forecast's device with its tensors."""
    _, found = script(
        """
        class Weighted(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("weight", torch.ones(4))

            def forward(self, model, x, y):
                return F.cross_entropy(model(x), y, weight=self.weight)

        def training():
            model = net()
            return Weighted(), model, torch.optim.NAdam(model.parameters()), data()
        """
    )
    assert not [text for text in found.unchecked if text.startswith("memory")]
    assert found.figures["memory"]["peak_bytes"]["None"] > 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_runs_on_behind_it(script):
    """What was compiled in the first step runs compiled in a step behind all checks."""
    path, _ = script(
        """
        calls = []

        def counted(graph, inputs):
            return lambda *args: calls.append(None) or graph.forward(*args)

        def training():
            global compiled
            model = net()
            compiled = torch.compile(model, backend=counted)
            return loss_fn, compiled, sgd(model), data()
        """
    )
    ours = sys.modules[path.stem]
    before = len(ours.calls)
    assert before > 0
    ours.compiled(torch.randn(8, 8))
    assert len(ours.calls) == before + 1


@pytest.mark.cuda
def test_on_cuda(script):
    """What a CPU cannot show: copies, waits in the optimizer, determinism in a backward, the speed-up by a capture."""
    path, found = script(
        """
        def loss(model, x, y):
            weight = torch.tensor([1.0, 2.0, 3.0, 4.0] * 20, device=x.device)[:4]  # fault: pageable copy
            wide = F.adaptive_avg_pool2d(x[:, None, None], (4, 8))[:, 0]  # fault: nondeterministic
            return F.cross_entropy(model(wide).mean(1), y, weight)
        def training():
            model = nn.Sequential(nn.Linear(8, 8), net()).to(DEVICE)
            inner = model[0]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # fault: optimizer
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
            def embedded(model, x, y):
                return loss(model, inner(x), y)
            return embedded, model, optimizer, data(), {"scheduler": schedule}
        """,
        device="cuda",
    )
    assert named(found) == planted(path)
    assert failed(found.unchecked) == []
    gain = found.figures["capture"]
    assert 0 < gain["device_ms"] <= gain["step_ms"]
    assert gain["kernels"] >= 10
    assert "A capture can make it up to" in str(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_cuda(script):
    """It says what it could not check."""
    _, found = script("def training():\n    return loss_fn, net(), partial(torch.optim.AdamW, fused=True), data()")
    assert len(found.unchecked) == 3
    assert "Not checked:\n  copies from pageable memory" in str(found)
    assert json.loads(found.to_json())["unchecked"] == found.unchecked
