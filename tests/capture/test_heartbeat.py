"""Ranks learn that another one is gone, and why; nobody waits for it; nobody who does not need it is disturbed.

Whole jobs are those of rank_ends.py, in processes of their own.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import rank_ends
import torch
import torch.distributed as dist
from torch import nn

import ampkit
from ampkit._capture.ranks import heartbeat, held_up, job_end
from ampkit._capture.ranks.heartbeat import Heartbeat
from ampkit._capture.ranks.peer_process import PeerProcess, address

ROOT = Path(__file__).parents[2]
ELSEWHERE = "another machine 1"


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts with which waits would have been ended. The times are a hundredth of what they are."""
    texts: list[str] = []

    class NotedWait:
        def __init__(self, text: str, thread: int | None) -> None:
            texts.append(text)

        def join(self) -> None:
            """There is nothing to wait for."""

    monkeypatch.setattr(heartbeat, "EndedWait", NotedWait)
    for name in ("LOOK_S", "HELD_UP_S", "SILENCE_S"):
        monkeypatch.setattr(heartbeat, name, getattr(heartbeat, name) / 100)
    return texts


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return dist.FileStore(str(tmp_path / "store"), 3)


@pytest.fixture
def rank0(store: Any, interrupts: list[str]) -> Iterator[Heartbeat]:
    """The heartbeat of the first of three ranks. What the others say is up to the test."""
    beats = Heartbeat(store.clone(), 0, [0, 1, 2])
    yield beats
    beats.stop()
    assert not beats._thread.is_alive()


def in_a_call(beats: Heartbeat) -> Any:
    """Let the heartbeat see a step that is in a call. Return what has its state."""
    turn = SimpleNamespace(running=True, stream=lambda: None)
    beats.waiting.turns.append(turn)  # type: ignore[arg-type] # all that is read of it
    return turn


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until something is so; a minute is not enough only where it never will be."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def looks(beats: Heartbeat, count: int) -> None:
    """Wait for so many looks of a heartbeat."""
    wanted = beats._looks + count
    wait_until(lambda: beats._looks >= wanted)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def address_of(process: subprocess.Popen[bytes]) -> str:
    return f"{address().rpartition(' ')[0]} {process.pid}"


# ------------------------------------------------------------------------------------------- whom the kernel knows


def test_a_killed_process_is_known_to_be_gone(process: subprocess.Popen[bytes]) -> None:
    """At once and for certain, also before somebody has waited for it, and afterwards."""
    peer = PeerProcess(address_of(process))
    assert peer.known
    assert not peer.has_ended()
    process.send_signal(signal.SIGKILL)
    wait_until(peer.has_ended)
    process.wait()
    assert peer.has_ended()
    late = PeerProcess(address_of(process))
    assert late.known
    assert late.has_ended()


def test_of_another_machine_nothing_is_known() -> None:
    peer = PeerProcess(ELSEWHERE)
    assert not peer.known
    assert not peer.has_ended()


@pytest.mark.slow
def test_a_stopped_process_is_not_lost(rank0: Heartbeat, store: Any, process: subprocess.Popen[bytes]) -> None:
    """R10: a debugger, or a call that keeps Python's lock, stops the beat for long; only death ends the job."""
    store.set("address 1", address_of(process))
    process.send_signal(signal.SIGSTOP)
    in_a_call(rank0)
    looks(rank0, int(2 * heartbeat.SILENCE_S / heartbeat.LOOK_S))
    assert not rank0.lost
    rank0.begin_call()
    process.kill()
    wait_until(lambda: rank0.lost)
    with pytest.raises(ampkit.AmpkitError, match=r"rank 0 stops, because the process of rank 1 is gone .*killed"):
        rank0.begin_call()
    assert store.get("lost").decode() == rank0.lost


# ----------------------------------------------------------------------------------------- who is reached by a store


@pytest.mark.slow
def test_silence_of_another_machine(rank0: Heartbeat, store: Any, interrupts: list[str]) -> None:
    """A rank elsewhere that does not beat is lost if somebody waits for it. Before, it may come back."""
    store.set("address 1", ELSEWHERE)
    store.set("beat 1", "7")
    wait_until(lambda: rank0._silent)
    rank0.begin_call()  # nobody waits: no reason to end
    store.set("beat 1", "8")
    wait_until(lambda: not rank0._silent)
    assert not interrupts
    in_a_call(rank0)
    wait_until(lambda: interrupts)
    assert "rank 1 has not been heard of" in interrupts[0]
    assert "rank 1 has not been heard of" in store.get("lost").decode()


def test_a_reason_reaches_every_rank(rank0: Heartbeat, store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only the rank that watches the one that ends; it is printed, and the next call raises it."""
    store.set("lost", "rank 2 ended: ValueError: too bad")
    wait_until(lambda: rank0.lost)
    assert capsys.readouterr().err == "ampkit, rank 0: rank 2 ended: ValueError: too bad\n"
    with pytest.raises(ampkit.AmpkitError, match="rank 0 stops, because rank 2 ended: ValueError: too bad"):
        rank0.begin_call()


def test_a_rank_that_has_ended_disturbs_only_who_waits(rank0: Heartbeat, store: Any, interrupts: list[str]) -> None:
    """The first rank may evaluate, or write a checkpoint, as long as it likes; a call without an end is ended."""
    store.set("address 1", ELSEWHERE)
    store.set("end 1", "")
    wait_until(lambda: rank0._left)
    for _ in range(3):
        turn = in_a_call(rank0)
        rank0.begin_call()
        turn.running = False
    looks(rank0, int(3 * heartbeat.HELD_UP_S / heartbeat.LOOK_S))
    assert not interrupts
    assert not rank0.lost
    turn.running = True
    wait_until(lambda: interrupts)
    assert interrupts == ["rank 0 stops, because rank 1 has ended, while rank 0 waits for it"]


def test_calls_that_go_on_are_no_wait(rank0: Heartbeat, store: Any, interrupts: list[str]) -> None:
    store.set("address 1", ELSEWHERE)
    store.set("end 1", "")
    in_a_call(rank0)
    for _ in range(int(3 * heartbeat.HELD_UP_S / heartbeat.LOOK_S)):
        rank0.begin_call()
        looks(rank0, 1)
    assert not interrupts


def test_the_next_rank_is_watched_when_one_has_left(rank0: Heartbeat, store: Any) -> None:
    """Ranks watch in a ring, so that each asks for two of them only, whatever their number."""
    store.set("end 1", "")
    store.set("address 1", ELSEWHERE)
    store.set("address 2", ELSEWHERE)
    store.set("end 2", "rank 2 ended: ValueError: too bad")
    wait_until(lambda: rank0.lost)
    assert rank0.lost == "rank 2 ended: ValueError: too bad"


def test_an_error_is_told_with_its_line(store: Any, interrupts: list[str]) -> None:
    """By the rank that ends; a second reason does not hide the first."""
    beats = Heartbeat(store.clone(), 1, [0, 1, 2])
    try:
        raise ValueError("too bad\nand more")
    except ValueError as error:
        beats.end(error)
        line = error.__traceback__.tb_lineno  # type: ignore[union-attr] # it was raised
    beats.stop()
    told = store.get("lost").decode()
    assert told.startswith(f"rank 1 ended: ValueError: too bad (at {__file__}:{line}: ")
    assert store.get("end 1").decode() == told
    later = Heartbeat(store.clone(), 2, [0, 1, 2])
    later.end(KeyboardInterrupt())
    later.stop()
    assert store.get("lost").decode() == told


@pytest.mark.slow
def test_an_error_that_follows_from_a_loss_is_not_the_reason(
    rank0: Heartbeat, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank is killed, gloo raises on the others at once, before the heartbeat has seen why."""
    monkeypatch.setattr(heartbeat, "LOOK_S", 1.0)
    store.set("address 1", ELSEWHERE)
    store.set("end 1", "")
    rank0.end(RuntimeError("Connection closed by peer"))
    assert store.get("lost").decode() == "rank 1 has ended, while rank 0 needs it"


def test_a_fork_does_not_speak_for_its_rank(rank0: Heartbeat, store: Any) -> None:
    """A worker of a data loader ends like a script; the rank trains on."""
    child = os.fork()
    if child == 0:
        rank0.end(None)
        rank0.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    looks(rank0, 3)
    assert not store.check(["end 0"])


# ------------------------------------------------------------------------------------------------ what a thread does


def test_an_exception_is_raised_in_the_thread_that_trains() -> None:
    caught: list[BaseException] = []

    def train() -> None:
        try:
            while True:
                time.sleep(0.001)
        except ampkit.AmpkitError as error:
            caught.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    held_up.raise_in(thread.ident or 0, "because")
    thread.join()
    assert [str(error) for error in caught] == ["because"]


def test_no_thread_without_other_ranks(tmp_path: Path) -> None:
    """Neither for one process, nor for a group of one."""
    before = threading.active_count()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with torch.random.fork_rng():
            model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, graph="emulate")
        for _ in range(6):
            step(torch.ones(2, 4))
        assert step.replays == 3
        assert threading.active_count() == before
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("code", "text"), [(None, None), (0, None), (3, "3"), ("no data", "no data")])
def test_how_a_script_ends(code: Any, text: str | None) -> None:
    """`sys.exit()` is no error, `sys.exit(3)` is one; the error that it was called for says more."""
    try:
        sys.exit(code)
    except SystemExit:
        found = job_end._error()
    assert (None if found is None else str(found)) == text
    try:
        try:
            raise ValueError("too bad")
        finally:
            sys.exit(1)  # as torch.multiprocessing.spawn does for a function that raises
    except SystemExit:
        assert str(job_end._error()) == "too bad"


# ---------------------------------------------------------------------------------------------------------- whole jobs


def run_jobs(*options: str) -> str:
    """Run jobs of rank_ends.py, whose waits are shorter than what ships, and return what it prints."""
    command = [rank_ends.__file__, "--held-up", "3", *options]
    if "cuda" in options:
        command, paths = [sys.executable, *command], [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # ampkit may not be installed
        run = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False, env=environment)
    else:
        run = forks.run(command, timeout=550)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


# A group that is destroyed and one that is forgotten, an error, a death, and an end that others wait for.
SOME_KINDS = (
    "forgotten",
    "own group, step dropped",
    "exception",
    "killed",
    "fewer batches",
    "killed, others elsewhere",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--kinds", *SOME_KINDS], id="two ranks"),
        pytest.param([], id="two ranks, each kind", marks=pytest.mark.ranks),
        pytest.param(["--ranks", "3", "--store", "file"], id="three ranks, store in a file", marks=pytest.mark.ranks),
        pytest.param(["--sharded"], id="fully_shard", marks=pytest.mark.ranks),
    ],
)
def test_every_end(options: list[str]) -> None:
    """R10: each row of the table in docs/distributed.md: exit codes, the reason on every rank, within the bound."""
    printed = run_jobs("--jobs", "1", "--together", "2", *options)
    for kind in SOME_KINDS if "--kinds" in options else rank_ends.KINDS:
        assert f"{kind}: 1 of 1, " in printed


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
def test_every_end_on_two_gpus() -> None:
    """R10: the same with NCCL, whose kernels in a replay nobody else watches."""
    printed = run_jobs("--jobs", "1", "--together", "8", "--device", "cuda")
    for kind in rank_ends.KINDS:
        assert f"{kind}: 1 of 1, " in printed
