"""torchao's AdamW with stochastic rounding and with states of 8, 4 and float8 bits: captured whole, with eager's bits.

Their states are tensor subclasses, and they make tensors of their rates.
"""

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from tape import taped
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import ampkit
from ampkit._optimizer.rollback import StepChanges
from ampkit._torch.tensors.tensors import inner_tensors

optim = pytest.importorskip("torchao.optim", reason="needs torchao: pip install 'ampkit[float8]'")

KINDS: dict[str, Any] = {
    "stochastic": lambda params, **options: optim._AdamW(params, bf16_stochastic_round=True, **options),
    "8-bit": optim.AdamW8bit,
    "4-bit": optim.AdamW4bit,
    "float8": optim.AdamWFp8,
    "8-bit stochastic": lambda params, **options: optim.AdamW8bit(params, bf16_stochastic_round=True, **options),
}
TAPES = [("cpu", "emulate"), ("cpu", "tape"), *ENGINES[1:]]  # what a capture freezes, too
Engine = tuple[str, str]
COMPILE = torch.compile
pytestmark = pytest.mark.filterwarnings("ignore:.* takes 3 eager steps and a new capture")


@pytest.fixture(autouse=True)
def uncompiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU Inductor compiles C++ for seconds, and its code reads step count and rate on the host."""
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with deterministic():
        yield


class Run:
    """A model, its optimizer and its step."""

    def __init__(self, kind: str, device: str, graph: str, **options: Any) -> None:
        torch.manual_seed(0)
        low = "stochastic" in kind
        # The biases are too small for states of few bits, and keep ordinary ones.
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)
        self.model = self.model.bfloat16() if low else self.model
        self.optimizer = KINDS[kind](self.model.parameters(), lr=2**-6)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda count: 1 / (1 + count))
        self.device, self.tape, self.count = device, graph == "tape", 0
        self.step = ampkit.graphed_step(
            boosted_loss,
            self.model,
            self.optimizer,
            scheduler=self.schedule,
            max_norm=1.0,
            graph="emulate" if self.tape else graph,
            **options,
        )

    def calls(self, count: int, *, bad_at: tuple[int, ...] = (), norms: bool = True) -> list[list[Tensor]]:
        """Return outputs and weights of each call."""
        history = []
        for _ in range(count):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(self.count)).to(self.device)
            boost = torch.tensor(math.inf if self.count in bad_at else 1.0, device=self.device)
            with taped() if self.tape else nullcontext():
                out = self.step(x.to(self.model[0].weight.dtype), boost)
            assert bool(out.skipped) == (self.count in bad_at)
            norm = [out.grad_norm.clone()] if norms else []
            history.append([out.loss.clone(), *norm, *map(bits, self.model.parameters())])
            self.count += 1
        return history

    def state(self) -> list[Any]:
        """Return the bits of the optimizer's state, the rates, and the state of the generator."""
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        random = torch.get_rng_state() if self.device == "cpu" else torch.cuda.get_rng_state()
        return [*flattened([*kept, *rates]), random]

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.model, self.optimizer, self.schedule)], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip((self.model, self.optimizer, self.schedule), states, strict=True):
            part.load_state_dict(state)


def boosted_loss(model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
    return model(x).float().square().mean() * boost


def flattened(tensors: list[Tensor]) -> list[Tensor]:
    found = []
    for tensor in tensors:
        inner = inner_tensors(tensor)
        found += flattened([*inner.values()]) if inner else [tensor.detach().clone()]
    return found


def assert_whole(run: Run) -> None:
    assert run.step.report().outcome == "whole", run.step.report()


@pytest.mark.parametrize("engine", TAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_whole(kind: str, engine: Engine) -> None:
    """E2: a schedule writes to the rate's tensor, so does the user, and another decay is another graph."""
    expected, found = Run(kind, engine[0], "off"), Run(kind, *engine)
    for run in (expected, found):
        torch.manual_seed(1)
        run.history = run.calls(10)
        run.optimizer.param_groups[0]["lr"].fill_(2**-7)
        run.optimizer.param_groups[0]["weight_decay"] = 0.25
        run.history += run.calls(10)
    assert_same(expected.history, found.history)
    assert_same(expected.state(), found.state())
    assert_whole(found)
    assert any(map(inner_tensors, next(iter(found.optimizer.state.values())).values())) == (
        "bit" in kind or kind == "float8"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_loop_without_ampkit(kind: str) -> None:
    """E2: on a CPU. On CUDA such a loop counts steps on the host, where bias corrections may have other bits."""
    plain, found = Run(kind, "cpu", "off"), Run(kind, "cpu", "emulate")
    torch.manual_seed(1)
    for i in range(10):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(i)).to(plain.model[0].weight.dtype)
        plain.optimizer.zero_grad()
        boosted_loss(plain.model, x, torch.tensor(1.0)).backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        plain.optimizer.step()
        plain.schedule.step()
    expected = plain.state()
    torch.manual_seed(1)
    found.calls(10)
    assert_same([*map(bits, plain.model.parameters())], [*map(bits, found.model.parameters())])
    assert_same(expected, found.state())


@pytest.mark.parametrize("engine", TAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_resumed(kind: str, engine: Engine) -> None:
    """E2: a checkpoint goes on in another step, and in the one that has saved it, with the bits of an eager run."""
    expected, first, second = Run(kind, engine[0], "off"), Run(kind, *engine), Run(kind, *engine)
    torch.manual_seed(1)
    history = expected.calls(16)
    torch.manual_seed(1)
    first.calls(8)
    saved, random = first.saved(), (torch.get_rng_state(), torch.cuda.get_rng_state_all())
    for run in (first, second):
        run.calls(2)
        run.load(saved)
        torch.set_rng_state(random[0])
        torch.cuda.set_rng_state_all(random[1])
        run.count = 8
        assert_same(history[8:], run.calls(8))
        assert_same(expected.state()[:-1], run.state()[:-1])
        assert_whole(run)


@pytest.mark.parametrize("engine", TAPES)
@pytest.mark.parametrize("kind", ["8-bit", "4-bit", "float8"])
def test_a_skipped_step(kind: str, engine: Engine) -> None:
    """E2: what lies in tensors of a state is put back on the device, and the rate of the skipped step is not used."""
    bad_at = (1, 7, 11)
    runs = [Run(kind, *each, policy="float16") for each in ((engine[0], "off"), engine)]
    expected, found = (run.calls(14, bad_at=bad_at) for run in runs)
    assert_same(expected, found)
    assert_same(runs[0].state(), runs[1].state())
    assert_whole(runs[1])
    assert_same(found[6][2:], found[7][2:])


@pytest.mark.parametrize("engine", ENGINES)
def test_draws_under_a_loss_scale(engine: Engine) -> None:
    """E2: what a skipped step draws cannot be undone, so the optimizer steps behind graphs, and a warning says so."""
    expected, found = [], []
    for graph, history in (("off", expected), (engine[1], found)):
        scaler = ampkit.GradScaler(engine[0], init_scale=2.0**8)
        run = Run("stochastic", engine[0], graph, scaler=scaler)
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history += run.calls(10, bad_at=(1, 6))
    assert_same(expected, found)
    assert run.step.report().outcome == "in parts"
    assert any("Without a loss scale and nonfinite= it is captured" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("engine", TAPES)
@pytest.mark.parametrize("kind", ["8-bit", "stochastic"])
def test_accumulated(kind: str, engine: Engine) -> None:
    """E2: an update behind two micro-batches."""
    expected, found = Run(kind, engine[0], "off", accumulate=2), Run(kind, *engine, accumulate=2)
    for run in (expected, found):
        torch.manual_seed(1)
        run.history = run.calls(24, norms=False)
    assert_same(expected.history, found.history)
    assert_same(expected.state(), found.state())
    assert_whole(found)


@pytest.mark.parametrize("engine", TAPES)
def test_a_replaced_tensor_of_a_state(engine: Engine) -> None:
    """E2: a graph that has the old one is not replayed."""
    expected, found = Run("8-bit", engine[0], "off"), Run("8-bit", *engine)
    for run in (expected, found):
        run.history = run.calls(8)
        averages = run.optimizer.state[run.model[0].weight]["exp_avg"]
        averages.codes = torch.zeros_like(averages.codes)
        run.history += run.calls(8)
    assert_same(expected.history, found.history)
    assert_same(expected.state(), found.state())


def test_verified() -> None:
    """E2: replays are compared with eager calls, whose states are put back."""
    expected, found = Run("8-bit", "cpu", "off"), Run("8-bit", "cpu", "emulate", verify=3)
    assert_same(expected.calls(12), found.calls(12))
    assert_same(expected.state(), found.state())
    assert_whole(found)
    assert [*found.step.report().eager] == ["warm-up"]  # no replay differed


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_count_that_begins_on_the_host(kind: str) -> None:
    """E2: on a device that is not the host, what the first step does there tells nothing about the next ones."""
    param = nn.Parameter(torch.zeros(64, 64, device="meta"))
    param.grad = torch.zeros_like(param)
    optimizer, changes = KINDS[kind]([param]), StepChanges()
    for i in range(2):
        changes.watch(optimizer, optimizer.step)
        assert (changes.known(optimizer) is None) is (i == 0)
        for state in optimizer.state.values():
            state["step"] = state["step"].to("meta")  # as it is for a captured step


BESIDE: dict[str, tuple[str, str, str]] = {  # on a device, what the compiler does, and what is said of such a step
    "copies": ("meta", "torch.full_like(x, 1.0, device='cpu')", "reads a tensor on the host"),
    "draws": ("cpu", "torch.rand(4)", "draws random numbers"),
    "keeps": ("cpu", "kept.append(x.clone())", "keeps a tensor"),
}


@pytest.mark.parametrize("file", [f"{Path(torch.__file__).parent}/_inductor/runtime/timing.py", "optimizer.py"])
@pytest.mark.parametrize("what", BESIDE)
def test_what_the_compiler_does_beside(what: str, file: str) -> None:
    """E2: to time kernels, Inductor draws numbers and copies to the host; it keeps constants. The step does not."""
    device, source, said = BESIDE[what]
    scope: dict[str, Any] = {"torch": torch, "kept": []}
    exec(compile(f"def beside(x): return {source}", file, "exec"), scope)

    class Compiled(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            scope["beside"](self.param_groups[0]["params"][0].detach())

    param = nn.Parameter(torch.zeros(4, device=device))
    param.grad = torch.zeros_like(param)
    optimizer, changes = Compiled([param], {}), StepChanges()
    changes.watch(optimizer, optimizer.step)
    assert said in changes.incomplete if file == "optimizer.py" else not changes.incomplete


@pytest.mark.parametrize("kind", ["8-bit", "stochastic"])
def test_compiled_before_the_capture(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2: torchao's own compilation of the update happens in eager calls, and captured calls run its code."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    expected, found = Run(kind, "cpu", "off"), Run(kind, "cpu", "emulate")
    torch.manual_seed(1)
    history = expected.calls(12)
    torch._dynamo.reset()
    compiled.clear()
    torch.manual_seed(1)
    calls = found.calls(5)
    assert (found.step.replays, len(compiled)) == (0, 2)  # of weights and of biases
    calls += found.calls(7)
    assert (found.step.replays, len(compiled)) == (7, 2)
    assert_same(history, calls)
    assert_same(expected.state(), found.state())
    assert_whole(found)
