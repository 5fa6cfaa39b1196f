"""CudaGraph: capture, replay, reset, recovery, random numbers. What provokes failures runs in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import uncapturable
from harness import assert_same
from torch.nn import functional as F

import ampkit
from ampkit._capture.graph.graph import CudaGraph, Pool, describe_failure
from ampkit._torch.autograd.autograd import one_stream

BEFORE = [kind.__name__ for kind in uncapturable.FOUND_BEFORE]
IN_CAPTURE = [kind.__name__ for kind in uncapturable.FOUND_IN_CAPTURE]


@pytest.fixture(scope="module")
def failures() -> dict[str, dict[str, Any]]:
    """Run tests/support/uncapturable.py and return its rows by kind."""
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, uncapturable.__file__],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {row["kind"]: row for row in map(json.loads, run.stdout.splitlines())}


@pytest.mark.cuda
@pytest.mark.parametrize("kind", BEFORE)
def test_g2_found_before_the_capture(failures: dict[str, dict[str, Any]], kind: str) -> None:
    """G2, X2: the preflight names the line, nothing is captured, and training equals eager training."""
    row = failures[kind]
    assert uncapturable.verdict(row) == [True] * 5, row
    if kind == "exception":  # it comes out of the call, in which nothing was done, and later calls are captured
        assert (row["messages"], row["replays"]) == ([], 3)
        assert row["errors"] == [row["raised"]]
    else:
        assert row["eager"] == {"warm-up": 3, "cannot be captured": 4}
        assert row["failure"] in row["messages"][0]


@pytest.mark.cuda
@pytest.mark.parametrize("kind", IN_CAPTURE)
def test_g2_failed_capture(failures: dict[str, dict[str, Any]], kind: str) -> None:
    """G2: a failed capture names the user's line. The step is done once, and training equals eager training."""
    row = failures[kind]
    assert uncapturable.verdict(row) == [False, True, True, True, True], row
    assert row["eager"] == {"warm-up": 3, "capture failed": 4}
    for message in (row["messages"][0], row["raised"]):
        assert message.startswith("graphed_step: capture failed")
    assert row["failure"] in row["messages"][0]


ADVICE = {
    "item_in_forward": "waits for the device",
    "to_cpu": "copies",
    "pageable_copy_non_blocking": "copies",
    "random_number": "random",
    "other_generator": "generators=[generator]",
    "item_in_capture": "waits for the device",
    "copy_in_capture": "copies between host and device",
    "out_of_memory": "Reduce the batch",
    "exception_in_capture": "ValueError: a mistake of the user",
    "swallowed_in_capture": "a try/except caught it",
}


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ADVICE)
def test_g2_message_says_what_to_write(failures: dict[str, dict[str, Any]], kind: str) -> None:
    """G2: the message ends in advice that fits the failure."""
    assert ADVICE[kind] in failures[kind]["raised"]


@pytest.mark.parametrize(
    ("error", "asks"),
    [
        (RuntimeError("CUDA error: an error of next year"), True),
        (RuntimeError("CUDA out of memory"), False),  # there is advice
        (
            RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream"),
            False,
        ),
        (ValueError("a mistake of the user"), False),
    ],
)
def test_a_failure_that_is_not_known_asks_for_a_report(error: Exception, asks: bool) -> None:
    """G2: where there is no advice, the fault may be ampkit's, so the message asks for what a report needs."""
    message = describe_failure(error)
    assert message.startswith("capture failed: ")
    assert message.endswith("`python -m ampkit env`.") == asks


needs_override = pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"), reason="torch is older"
)


@needs_override
@pytest.mark.parametrize("before", [False, True])
def test_the_stream_of_nodes_is_overridden_in_captures_only(before: bool) -> None:
    """What the user has set for the process is set again."""
    is_set, was = torch._C._override_stale_capture_stream, torch._C._override_stale_capture_stream()
    torch.autograd.graph.set_override_stale_capture_stream(before)
    try:
        with one_stream():
            assert is_set()
        assert is_set() is before
    finally:
        torch.autograd.graph.set_override_stale_capture_stream(was)


@pytest.mark.cuda
def test_g2_all_lines_in_one_go(failures: dict[str, dict[str, Any]]) -> None:
    """G2: a step with two blocking lines, one of them in a backward hook, has both in one message."""
    message = failures["two_lines"]["messages"][0]
    number = int(failures["two_lines"]["line"].split(":")[-2])
    assert f"uncapturable.py:{number}:" in message
    assert f"uncapturable.py:{number + 1}:" in message


@pytest.mark.cuda
def test_g1_capture_replay_reset_recapture() -> None:
    """G1: nothing runs at capture, each replay runs once, reset gives memory back, a new graph can be captured."""
    x = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    for round_ in range(2):
        pool = Pool()
        graph = CudaGraph(stream, pool)
        start = float(x[0])
        graph.capture(lambda: x.add_(1).mul(2))
        assert float(x[0]) == start
        for i in range(3):
            out = graph.replay()
            assert float(out[0]) == 2 * (start + i + 1)
        assert pool.nbytes >= 4 << 20
        reserved = torch.cuda.memory_reserved()
        del out
        graph.reset()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved - (4 << 20)
        assert pool.nbytes == 0
        assert float(x[0]) == 3 * (round_ + 1)


@pytest.mark.cuda
def test_g1_empty_capture_warns() -> None:
    """G1: a warning says that a function launches nothing on the device."""
    graph = CudaGraph(torch.cuda.Stream(), Pool())
    with pytest.warns(ampkit.CaptureWarning, match="launched no CUDA kernel"):
        graph.capture(lambda: None)
    graph.replay()


@pytest.mark.cuda
@pytest.mark.parametrize("generators", [0, 2])
def test_g5_random_numbers(generators: int) -> None:
    """G5: each replay draws new numbers, the ones that eager draws from the same seed, from several generators too."""
    own = [torch.Generator("cuda") for _ in range(generators)]

    def draw() -> list[torch.Tensor]:
        more = [torch.randn(7, device="cuda", generator=generator) for generator in own]
        return [F.dropout(torch.ones(1000, device="cuda")), torch.rand(3, device="cuda"), *more]

    def seed() -> None:
        torch.manual_seed(11)
        for i, generator in enumerate(own):
            generator.manual_seed(20 + i)

    graph = CudaGraph(torch.cuda.Stream(), Pool(), own)
    graph.capture(draw)
    seed()
    eager = [draw() for _ in range(4)]
    after = torch.rand(2, device="cuda")
    seed()
    for drawn in eager:
        assert all(torch.equal(a, b) for a, b in zip(drawn, graph.replay(), strict=True))
    assert torch.equal(after, torch.rand(2, device="cuda"))
    assert not torch.equal(eager[0][0], eager[1][0])


@pytest.mark.cuda
def test_g5_a_registered_generator_in_a_step() -> None:
    """G5: graphed_step(generators=...) captures a step that draws from a generator of the user's, with eager's bits."""

    def run(graph: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1).cuda()
        generator = torch.Generator("cuda").manual_seed(3)

        def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x + torch.randn(x.shape, device="cuda", generator=generator)).square().mean()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(loss_fn, model, optimizer, generators=[generator], graph=graph, on_failure="raise")
        losses = [step(torch.ones(4, 8, device="cuda")).loss for _ in range(8)]
        assert step.replays == (5 if graph == "auto" else 0)
        return torch.stack(losses)

    assert torch.equal(run("off"), run("auto"))


@pytest.mark.cuda
def test_state_made_during_capture_is_refused() -> None:
    """Optimizer state made in the capture would be made in every replay. It is named and undone; calls are eager."""

    def run(graph: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)]).cuda()
        calls = []

        def loss_fn(model: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            used = model if len(calls) > 3 else model[:1]  # the second layer's moments are made in the fourth call
            return sum(layer(x).square().mean() for layer in used)  # type: ignore[return-value]

        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph, host_writes="ignore")
        x = torch.arange(32.0, device="cuda").reshape(4, 8) / 32
        for i in range(7):
            if graph == "auto" and i == 3:
                with pytest.warns(
                    ampkit.CaptureWarning, match=r"optimizer\[0\].model.1.weight.step, .*: made or rebound"
                ):
                    step(x)
            else:
                step(x)
        return model.state_dict()

    assert_same(run("off"), run("auto"))
