"""annotate=True and name_kernels: module names over the kernels of replays, certain ones only, and the same bits.

On the CPU the graph is emulated, and operations stand in for kernels. How traces of a GPU are read is tested on events
written here, as Kineto of torch 2.11 writes them.
"""

import gzip
import itertools
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import ENGINES, Net, assert_same, deterministic, make_net, training_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit._capture.graph.kernel_names import KernelName, KernelTable
from ampkit._capture.graph.profiled_calls import Owner, ProfiledCalls
from ampkit.debug import NamedTrace, name_kernels
from ampkit.debug._kernels import alignment
from ampkit.debug._kernels.alignment import certain_places


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(4, 3, 8, 8, generator=generator).to(device),
        torch.randint(10, (4,), generator=generator).to(device),
    )


def make_step(device: str, graph: str, model: nn.Module | None = None, **options: Any) -> ampkit.GraphedStep:
    model = make_net(device) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options = {"annotate": True, "on_failure": "raise", **options}
    return ampkit.graphed_step(cross_entropy, model, optimizer, graph=graph, **options)


def exported(path: Path, fn: Callable[[], object], device: str, host: bool = True) -> Path:
    """Profile a call, and return the file of its trace."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] * host + [kinds.CUDA] * (device == "cuda")
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        fn()
        if device == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return path


def named_replay(path: Path, step: Any, device: str, *args: Tensor, calls: int = 6) -> NamedTrace:
    """Return the names of the kernels of one replay, after so many calls."""
    for _ in range(calls):
        step(*args)
    return name_kernels(exported(path / "replay.json", lambda: step(*args), device), step)


def assert_named(named: NamedTrace, device: str) -> None:
    """Assert that all kernels have names; on a GPU those of 95% of the time."""
    assert named.problems == ()
    if device == "cpu":
        assert named.unmatched == ()
    assert named.named_share >= 0.95, f"{named}\n{named.unmatched}"


# ------------------------------------------------------------------------------------------------- real replays


@pytest.mark.parametrize("engine", ENGINES)
def test_every_kernel_of_a_replay_has_the_name_of_its_module(engine: tuple[str, str], tmp_path: Path) -> None:
    """Forward, backward and optimizer, with a policy, a loss scale and clipping."""
    device, graph = engine
    step = make_step(device, graph, policy="float16" if device == "cuda" else "bfloat16", max_norm=1.0)
    named = named_replay(tmp_path, step, device, *batch(device))
    assert len(named.replays) == 1
    assert_named(named, device)
    found = {(row.phase, row.module) for row in named.rows()}
    parts = ("conv", "norm", "dropout", "head", "(model)", "")
    expected = {(phase, module) for phase in ("forward", "backward") for module in parts} | {("optimizer", "")}
    assert expected - {("backward", "")} <= found, named
    assert {phase for phase, _ in found} == {"forward", "backward", "optimizer"}
    assert sum(row.share for row in named.rows()) == pytest.approx(1)
    nodes = {kernel.operation for kernel in named.replays[0] if kernel.module == "conv" and kernel.phase == "backward"}
    assert any(node.startswith("ConvolutionBackward") for node in nodes), nodes


@pytest.mark.cuda
def test_the_kernels_of_a_small_resnet_are_named(tmp_path: Path) -> None:
    """At least 95% of the time of a captured ResNet has names: on this model all of it."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(10, (8,), device="cuda")
    step = make_step("cuda", "auto", model, policy="float16", max_norm=1.0)
    named = named_replay(tmp_path, step, "cuda", x, y)
    assert named.named_share >= 0.95, named
    modules = {row.module for row in named.rows() if row.phase == "backward"}
    convolutions = {path for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert convolutions <= modules, (convolutions - modules, str(named))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{"policy": "float16", "max_norm": 1.0}, {"accumulate": 2}, {}])
@pytest.mark.sampled(3)
def test_the_bits_are_those_without_names(engine: tuple[str, str], options: dict[str, Any]) -> None:
    """Parameters, buffers, moments, loss scale and losses of warm-up, capture and replays."""
    device, graph = engine
    states = []
    with deterministic():
        for annotate in (False, True):
            torch.manual_seed(7)
            model = make_net(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            step = ampkit.graphed_step(
                cross_entropy, model, optimizer, graph=graph, annotate=annotate, on_failure="raise", **options
            )
            x, y = batch(device)
            losses = [step(x, y).loss.clone() for _ in range(10)]
            assert step.captures == options.get("accumulate", 1)
            states.append((training_state(model, optimizer, step.scaler), losses))
    assert_same(states[0][0], states[1][0])
    assert all(map(torch.equal, states[0][1], states[1][1]))


def test_without_annotate_nothing_is_profiled_and_no_replay_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default costs nothing, and says what to pass."""
    step = make_step("cpu", "emulate", annotate=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler, "profile", None)  # which would raise
        for _ in range(5):
            step(*batch("cpu"))
    assert step.replays == 2
    assert step.kernel_tables() is None
    path = exported(tmp_path / "replay.json", lambda: step(*batch("cpu")), "cpu")
    assert "ampkit: " not in path.read_text()
    with pytest.raises(ValueError, match="a step that was made with annotate=True"):
        name_kernels(path, step)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_graph_has_a_table_of_its_own(engine: tuple[str, str], tmp_path: Path) -> None:
    """The first and the last micro-batch of a window, in one trace with another step's replay."""
    device, graph = engine
    step, other = make_step(device, graph, accumulate=2), make_step(device, graph)
    x, y = batch(device)
    for _ in range(10):
        step(x, y)
        other(x, y)

    def calls() -> None:
        step(x, y)
        other(x, y)
        step(x, y)

    path = exported(tmp_path / "replay.json", calls, device)
    named = name_kernels(path, step)
    assert_named(named, device)
    first, last = ({kernel.phase for kernel in replay if kernel.phase} for replay in named.replays)
    stepping = [
        any("adamw" in f"{kernel.kernel}{kernel.operation}".lower() for kernel in replay) for replay in named.replays
    ]
    assert (stepping, first <= last) == ([False, True], True)
    assert len(name_kernels(path, other).replays) == 1


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(192, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 10)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.block, self.stem(x.flatten(1)), use_reentrant=self.reentrant))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_belongs_to_its_module(
    engine: tuple[str, str], reentrant: bool, tmp_path: Path
) -> None:
    """The forward that runs again in backward is backward of the same module; the capture repeats its rehearsal."""
    device, graph = engine
    torch.manual_seed(0)
    step = make_step(device, graph, Checkpointed(reentrant).to(device))
    named = named_replay(tmp_path, step, device, *batch(device))
    assert_named(named, device)
    for phase in ("forward", "backward"):
        assert {row.module for row in named.rows() if row.phase == phase} >= {"block.0", "block.1", "stem", "head"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_scan_is_named_step_by_step(engine: tuple[str, str], tmp_path: Path) -> None:
    """A graph of several steps has their tables one behind the other; what runs between the steps has no name."""
    device, graph = engine
    step = make_step(device, graph, max_norm=1.0)
    x, y = batch(device)
    xs, ys = (tensor.expand(20, *tensor.shape) for tensor in (x, y))
    for _ in range(3):
        step.scan(xs, ys)
    named = name_kernels(exported(tmp_path / "replay.json", lambda: step.scan(xs, ys), device), step)
    assert len(named.replays) == 2  # 16 steps and 4
    assert named.named_share >= 0.9, named
    assert sum(kernel.phase == "forward" and kernel.module == "conv" for kernel in named.replays[0]) % 16 == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_graphed_function_without_gradients_is_named(engine: tuple[str, str], tmp_path: Path) -> None:
    """An evaluation takes torch's fast path with names as without: it would not, if modules had hooks of their own."""
    device, graph = engine
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).to(device).eval()

    @ampkit.graphed(modules=(model,), graph=graph, annotate=True, on_failure="raise")
    def evaluate(x: Tensor) -> Any:
        with torch.no_grad():
            return model(x)

    assert evaluate.kernel_tables() == []
    x = torch.randn(2, 5, 16, device=device)
    named = named_replay(tmp_path, evaluate, device, x)
    assert evaluate.replays > 1
    assert_named(named, device)
    assert {row.phase for row in named.rows()} == {"forward"}
    assert any(row.module.startswith("layers.0") for row in named.rows())


def test_paths_begin_with_the_names_of_several_modules(tmp_path: Path) -> None:
    """Two declared modules, and a third that is not declared, by the variables of the function."""
    torch.manual_seed(0)
    one, two, teacher = nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, fused=True)

    @ampkit.graphed(modules=(one, two), optimizers=(optimizer,), graph="emulate", annotate=True, on_failure="raise")
    def train(x: Tensor) -> Tensor:
        loss = (two(one(x)) - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    named = named_replay(tmp_path, train, "cpu", torch.randn(3, 4))
    assert {row.module for row in named.rows()} >= {"one", "two", "teacher.0", ""}


@pytest.mark.slow
def test_compiled_code_is_named_by_its_region(tmp_path: Path) -> None:
    """Hooks would make torch.compile compile again, so there are none; the profiler shows compiled regions."""
    torch.manual_seed(0)
    step = make_step("cpu", "emulate", torch.compile(make_net("cpu"), backend="aot_eager"))
    named = named_replay(tmp_path, step, "cpu", *batch("cpu"))
    assert named.unmatched == ()
    regions = {row.phase for row in named.rows() if row.module.startswith("Torch-Compiled Region")}
    assert regions >= {"forward", "backward"}


def test_a_profiler_that_is_on_before_the_capture_leaves_the_graph_without_names(tmp_path: Path) -> None:
    """Two profilers cannot run at once: a warning, the user's trace, and the reason in the table."""
    step = make_step("cpu", "emulate")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = exported(tmp_path / "all.json", lambda: [step(*batch("cpu")) for _ in range(6)], "cpu")
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]
    assert len(texts) == 1
    assert "switch it on after the capture" in texts[0]
    named = name_kernels(path, step)
    assert step.replays == len(named.replays) == 3
    assert named.named_share == 0
    assert "a profiler was on" in str(named)


def test_an_error_in_the_profiled_call_leaves_nothing_behind() -> None:
    """No hook, no profiler, no mark; the next call is the rehearsal."""
    net = make_net("cpu")
    raising = numpy.zeros(100)  # what large arrays hold is not compared from call to call

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        if raising[0]:
            raise KeyError("of the user")
        return F.cross_entropy(out, y)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(loss, net, optimizer, graph="emulate", annotate=True, on_failure="raise")
    for _ in range(2):
        step(*batch("cpu"))
    raising[0] = 1
    with pytest.raises(KeyError, match="of the user"):
        step(*batch("cpu"))
    assert not global_hooks._global_forward_hooks
    assert not global_hooks._global_forward_pre_hooks
    assert not torch._C._autograd._profiler_enabled()
    raising[0] = 0
    for _ in range(3):
        step(*batch("cpu"))
    assert (step.captures, step.replays) == (1, 2)
    assert step.kernel_tables()[0].streams


# ------------------------------------------------------------------------------------------------ the merged trace


def test_the_trace_gets_a_row_of_nested_spans(tmp_path: Path) -> None:
    """Phase, then module, then kernel; spans of a row nest; the trace that was passed is as it was."""
    step = make_step("cpu", "emulate")
    for _ in range(5):
        step(*batch("cpu"))
    path = exported(tmp_path / "replay.json", lambda: step(*batch("cpu")), "cpu")
    before = json.loads(path.read_text())
    named = name_kernels(before, step)
    assert before == json.loads(path.read_text())
    spans = [event for event in named.trace["traceEvents"] if event.get("cat") == "ampkit"]
    names = {event["name"] for event in spans}
    assert {"forward", "backward", "optimizer", "conv", "norm", "head"} <= names
    assert_nested(spans)
    (conv,) = (e for e in spans if e["name"] == "conv" and e["ts"] < spans[0]["ts"] + spans_of(spans, "forward"))
    inside = [e for e in spans if e["args"].get("module") == "conv" and e["args"]["phase"] == "forward"]
    assert inside
    assert all(conv["ts"] <= e["ts"] <= conv["ts"] + conv["dur"] for e in inside)
    shown = [e for e in named.trace["traceEvents"] if e.get("cat") == "cpu_op" and e["args"].get("module") == "conv"]
    assert shown
    for target in ("named.json", "named.json.gz"):
        named.save(tmp_path / target)
        data = (tmp_path / target).read_bytes()
        data = gzip.decompress(data) if target.endswith("gz") else data
        assert json.loads(data) == named.trace
        assert len(name_kernels(tmp_path / target, step).replays) == 1


def spans_of(spans: list[Any], name: str) -> float:
    return float(next(event["dur"] for event in spans if event["name"] == name))


def assert_nested(spans: list[Any]) -> None:
    """Assert that two spans of one row are apart, or one contains the other."""
    for row in {event["tid"] for event in spans}:
        times = sorted((e["ts"], -e["dur"]) for e in spans if e["tid"] == row)
        ends: list[float] = []
        for start, negative in times:
            end = start - negative
            while ends and ends[-1] <= start + 0.002:  # timestamps are rounded to nanoseconds
                ends.pop()
            assert not ends or end <= ends[-1] + 0.002, (start, end, ends)
            ends.append(end)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    """No trace, a trace without a replay, no step."""
    step = make_step("cpu", "emulate")
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match=r"empty\.json: expected a trace as"):
        name_kernels(tmp_path / "empty.json", step)
    with pytest.raises(ValueError, match="it has no replay of this step in it"):
        name_kernels({"traceEvents": []}, step)
    with pytest.raises(ValueError, match="annotate=True"):
        name_kernels({"traceEvents": []}, nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"annotate='yes'.*True or False"):
        make_step("cpu", "emulate", annotate="yes")
    with pytest.raises(OSError, match=r"missing\.json"):
        name_kernels(tmp_path / "missing.json", step)


def test_a_callback_has_the_names_of_its_fit(tmp_path: Path) -> None:
    """A Trainer's step, profiled within the fit, named behind it."""
    pl = pytest.importorskip("lightning.pytorch")
    from ampkit.lightning import AmpkitCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, data: Any) -> Tensor:
            return F.cross_entropy(self.net(data[0]), data[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)

    torch.manual_seed(0)
    callback, loader = AmpkitCallback(graph="emulate", annotate=True, on_failure="raise"), [batch("cpu")] * 8
    loader = torch.utils.data.DataLoader(loader, batch_size=None)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    profilers = []

    class Profile(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, data: Any, i: int) -> None:
            if i == 6:
                kinds = [torch.profiler.ProfilerActivity.CPU]
                profilers.append(torch.profiler.profile(activities=kinds, acc_events=True))
                profilers[0].start()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            profilers[0].stop()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(max_epochs=1, callbacks=[callback, Profile()], enable_model_summary=False, **quiet)
        trainer.fit(Module(), loader)
    profilers[0].export_chrome_trace(str(tmp_path / "fit.json"))
    named = name_kernels(tmp_path / "fit.json", callback)
    assert len(named.replays) == 2
    assert named.unmatched == ()
    assert any(row.module == "net.conv" for row in named.rows())


# --------------------------------------------------------------------------------------- traces of a GPU, as events


class Events:
    """Makes the events of a trace in order of time: 10 us of the host each, 5 us on the GPU."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._time, self._id = 1000.0, itertools.count(1)
        self._device_time = 5000.0

    def host(self, name: str, kind: str = "cpu_op", thread: int = 1, inside: Callable[[], None] | None = None) -> Any:
        """Add an event of the host around those that `inside` makes."""
        event = {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": thread, "ts": self._time, "dur": 0.0}
        self.all.append({**event, "args": {"External id": next(self._id)}})
        added = self.all[-1]
        self._time += 10
        if inside is not None:
            inside()
        self._time += 10
        added["dur"] = self._time - added["ts"] - 1
        return added

    def launch(self, *kernels: str, stream: int = 7, thread: int = 1, call: str = "cudaLaunchKernel") -> None:
        """Add a launch, and what it runs on the GPU."""
        correlation = next(self._id)
        event = {"ph": "X", "cat": "cuda_runtime", "name": call, "pid": 7, "tid": thread, "ts": self._time}
        self.all.append({**event, "dur": 2.0, "args": {"correlation": correlation, "cbid": 211}})
        self._time += 5
        for kernel in kernels:
            kind = {"Memset": "gpu_memset", "Memcpy": "gpu_memcpy"}.get(kernel.partition(" ")[0], "kernel")
            args = {"correlation": correlation, "device": 0, "stream": stream}
            event = {"ph": "X", "cat": kind, "name": kernel, "pid": 0, "tid": stream, "ts": self._device_time}
            self.all.append({**event, "dur": 5.0, "args": args})
            self._device_time += 5

    def flow(self, forward: Any, backward: Any) -> None:
        """Link an operation of the forward and its autograd node."""
        number = next(self._id)
        for phase, event in (("s", forward), ("f", backward)):
            flow = {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": number}
            self.all.append({**flow, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]})


def eager_call() -> list[dict[str, Any]]:
    """A call with a convolution, its backward on a thread of autograd's, an optimizer, and a loader's copy."""
    events, made = Events(), {}

    def conv() -> None:
        made["conv"] = events.host("aten::cudnn_convolution", inside=lambda: events.launch("fprop"))

    def model() -> None:
        events.host("ampkit: module conv", "user_annotation", inside=conv)
        events.host("aten::relu", inside=lambda: events.launch("relu"))

    def loss() -> None:
        made["loss"] = events.host("aten::mean", inside=lambda: events.launch("reduce"))

    def backward() -> None:
        events.launch("dgrad", "wgrad", thread=2)
        events.host("aten::add", thread=2, inside=lambda: events.launch("sum", thread=2))

    def node() -> None:
        made["node"] = events.host("ConvolutionBackward0", thread=2, inside=backward)
        events.launch("hook", thread=2)

    def step() -> None:
        events.launch("Memset (Device)")
        events.host("ampkit: module (model)", "user_annotation", inside=model)
        loss()
        events.host("aten::ones_like", inside=lambda: events.launch("fill"))
        events.host("autograd::engine::evaluate_function: ConvolutionBackward0", thread=2, inside=node)
        events.launch("Memcpy HtoD (Pinned -> Device)", thread=9, stream=20)  # of a loader
        events.launch("norm")
        events.host("Optimizer.step#AdamW.step", "user_annotation", inside=lambda: events.launch("adam"))

    events.host("ampkit: call", "user_annotation", inside=step)
    events.flow(made["conv"], made["node"])
    return events.all


def test_the_owners_of_kernels_on_a_gpu() -> None:
    """By the scope around the launch; in backward by the operation that made the node, in whatever thread."""
    calls = ProfiledCalls(eager_call())
    (call,) = calls.marked("ampkit: call")
    found = {k.name: tuple(owner) for k, owner in zip(call.kernels, calls.owners(call.kernels), strict=True)}
    assert found == {
        "Memset (Device)": ("forward", "", ""),
        "fprop": ("forward", "conv", "aten::cudnn_convolution"),
        "relu": ("forward", "(model)", "aten::relu"),
        "reduce": ("forward", "", "aten::mean"),
        "fill": ("forward", "", "aten::ones_like"),
        "dgrad": ("backward", "conv", "ConvolutionBackward0"),
        "wgrad": ("backward", "conv", "ConvolutionBackward0"),
        "sum": ("backward", "conv", "ConvolutionBackward0"),
        "hook": ("backward", "conv", "ConvolutionBackward0"),
        "norm": ("optimizer", "", ""),
        "adam": ("optimizer", "", ""),
    }
    assert {kernel.stream for kernel in call.kernels} == {"device 0, stream 7"}


class TablesOnly:
    """A step that has nothing but tables."""

    def __init__(self, *streams: dict[str, list[str]]) -> None:
        self.tables = [
            KernelTable(
                f"ampkit: graph {number}",
                tuple(
                    tuple(KernelName(name, Owner("forward", f"{module}{i}", "")) for i, name in enumerate(names))
                    for module, names in each.items()
                ),
                "",
            )
            for number, each in enumerate(streams, 1)
        ]

    def kernel_tables(self) -> list[KernelTable]:
        return self.tables


def replayed(*launches: dict[int, list[str]], mark: str = "ampkit: graph 1") -> dict[str, Any]:
    """A trace with a graph launch of these kernels by stream, under a mark, behind the fills of the generator."""
    events = Events()

    def graph() -> None:
        events.launch("fill seed")
        for kernels in launches:
            first = len(events.all)
            for stream, names in kernels.items():
                events.launch(*names, stream=stream, call="cudaGraphLaunch")
            (correlation,) = {events.all[first]["args"]["correlation"]}
            for event in events.all[first:]:
                event["args"]["correlation"] = correlation
            extra = [e for e in events.all[first + 1 :] if e["cat"] == "cuda_runtime"]
            events.all[:] = [e for e in events.all if all(e is not other for other in extra)]

    events.host(mark, "user_annotation", inside=graph) if mark else graph()
    return {"traceEvents": events.all}


def modules_of(named: NamedTrace) -> list[str]:
    return [kernel.module for replay in named.replays for kernel in replay]


def test_only_the_kernels_of_the_launch_are_named() -> None:
    """What the replay launches beside the graph, to set the generator, is no part of the table."""
    named = name_kernels(replayed({7: ["a", "b", "a"]}), TablesOnly({"m": ["a", "b", "a"]}))
    assert modules_of(named) == ["m0", "m1", "m2"]
    assert {kernel.stream for kernel in named.replays[0]} == {"device 0, stream 7"}


def test_a_kernel_that_is_not_certain_has_no_name() -> None:
    """One kernel more than in the table, among two of one name: either may be the new one. The rest is named."""
    named = name_kernels(replayed({7: ["x", "a", "b", "b", "c"]}), TablesOnly({"m": ["a", "b", "c"]}))
    assert modules_of(named) == ["", "m0", "", "", "m2"]
    assert [kernel.kernel for kernel in named.unmatched] == ["x", "b", "b"]
    assert named.named_share == pytest.approx(2 / 5)
    assert "3 kernels unmatched" in str(named)
    assert ("", "") in {(row.phase, row.module) for row in named.rows()}


def test_streams_are_matched_by_what_runs_on_them() -> None:
    """The driver numbers the side streams of a graph itself."""
    step = TablesOnly({"m": ["a", "b", "c"], "n": ["all_reduce", "all_reduce"]})
    named = name_kernels(replayed({31: ["all_reduce", "all_reduce"], 7: ["a", "b", "c"]}), step)
    assert sorted(modules_of(named)) == ["m0", "m1", "m2", "n0", "n1"]
    rows = {e["tid"] for e in named.trace["traceEvents"] if e.get("cat") == "ampkit"}
    assert len(rows) == 2


def test_without_marks_a_launch_is_named_if_one_graph_alone_has_its_kernels() -> None:
    """A profile of the GPU alone shows no marks."""
    step = TablesOnly({"m": ["a", "b"]}, {"n": ["a", "c"]})
    assert modules_of(name_kernels(replayed({7: ["a", "c"]}, mark=""), step)) == ["n0", "n1"]
    twice = TablesOnly({"m": ["a", "b"]}, {"n": ["a", "b"]})
    named = name_kernels(replayed({7: ["a", "b"]}, mark=""), twice)
    assert modules_of(named) == ["", ""]
    assert "profile the CPU too" in str(named)


def test_kernels_that_overlap_do_not_break_the_spans() -> None:
    """With programmatic launches a kernel may begin before the one before it has ended."""
    trace = replayed({7: ["a", "b", "c"]})
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel":
            event["dur"] = 7.5
    named = name_kernels(trace, TablesOnly({"m": ["a", "b", "c"]}))
    assert_nested([event for event in named.trace["traceEvents"] if event.get("cat") == "ampkit"])


# ----------------------------------------------------------------------------------------------------- alignment


def every_alignment(found: str, known: str) -> list[dict[int, int]]:
    """Return all alignments with as many pairs as possible, by trying all of them."""
    best: list[dict[int, int]] = [{}]
    for size in range(1, min(len(found), len(known)) + 1):
        for places in itertools.combinations(range(len(found)), size):
            for others in itertools.combinations(range(len(known)), size):
                if all(found[i] == known[j] for i, j in zip(places, others, strict=True)):
                    pairs = dict(zip(places, others, strict=True))
                    best = [*best, pairs] if len(best[0]) == size else [pairs]
    return best


def test_a_place_is_certain_only_if_every_alignment_agrees() -> None:
    """Against all alignments of short random sequences: no place is given that one of them does not have."""
    pick, given = random.Random(11), 0
    for _ in range(400):
        found = "".join(pick.choices("abc", k=pick.randrange(6)))
        known = "".join(pick.choices("abc", k=pick.randrange(6)))
        alignments = every_alignment(found, known)
        for i, places in enumerate(certain_places(found, known)):
            if places and found != known:
                given += 1
                assert {alignment.get(i) for alignment in alignments} <= set(places), (found, known, i, places)
    assert given > 200


def test_long_sequences_with_little_in_common_get_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table of gigabytes: two graphs of other models are given up."""
    monkeypatch.setattr(alignment, "_MOST_CELLS", 40_000)  # as 4 million for ten times as many names
    assert certain_places(["a"] * 300, ["b"] * 300) == [[]] * 300
    known = [str(i % 50) for i in range(300)]
    found = [*known[:100], "extra", *known[100:]]
    places = certain_places(found, known)
    assert (places[100], sum(map(bool, places))) == ([], 300)
