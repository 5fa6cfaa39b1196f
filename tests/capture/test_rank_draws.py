"""Draws of the host with several ranks: the outcomes on all ranks together choose the graph, with the bits of eager.

What trains runs in processes of its own, one per rank (rank_draws.py). One start of the ranks does many cases.
"""

import pytest
import rank_draws
from harness import WARMUP_DDP
from rank_cases import Cases, Rows, cases_of

FAST = ("own",)
OTHERS = tuple(name for name in rank_draws.CASES if name not in FAST)
on_cpu = cases_of(rank_draws.__file__, "cpu", FAST, 240)
others_on_cpu = cases_of(rank_draws.__file__, "cpu", OTHERS, 500)
on_gpus = cases_of(rank_draws.__file__, "cuda", rank_draws.ON_GPUS, 240)


def check(name: str, rows: Rows, device: str = "cpu") -> None:
    """Assert that a case left the bits of eager steps on each rank, and that all ranks replayed in the same calls."""
    case = rank_draws.CASES[name]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["differ"] == []
    if case.drops and case.wrapper == "ddp":
        # Torch raises in the forward behind the one that left out a layer, which would be a replay.
        for row in rows:
            (call, torchs), (graphed_call, text) = row["raised"]
            assert graphed_call == call
            assert "Expected to have finished reduction in the prior iteration" in torchs
            ours = "AmpkitError: DistributedDataParallel: the last step had no gradients for some parameters"
            assert text.startswith(ours if name == "rare layerdrop" else "RuntimeError: Expected to have finished")
        return
    first = rows[0]
    assert all((row["captures"], row["replays"]) == (first["captures"], first["replays"]) for row in rows)
    # With NCCL the rare outcome does not come often enough for the calls that warm it up.
    assert first["captures"] > (0 if (name, device) == ("rare", "cuda") else 1)
    assert first["replays"] >= 7
    if case.wrapper == "ddp":
        assert all(row["weights"] == first["weights"] for row in rows), "the ranks have different weights"
    if not (case.own or case.window):  # four outcomes with a warm-up each
        warm_up = 4 * (WARMUP_DDP if device == "cuda" and case.wrapper == "ddp" else 3)
        assert (first["captures"], first["replays"]) == (4, rank_draws.CALLS[device] - warm_up)
        assert all(sum(row["eager"].values()) == warm_up for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_ranks_that_draw(on_cpu: Cases, name: str) -> None:
    """R3, L4: each rank draws from its own generator; losses, weights and generator after each call are eager's."""
    check(name, on_cpu[name])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_draw_otherwise(others_on_cpu: Cases, name: str) -> None:
    """R3, L4: the same outcomes on all ranks, rare ones, windows, batches of another size, a rate that changes."""
    check(name, others_on_cpu[name])


@pytest.mark.multigpu
@pytest.mark.parametrize("name", rank_draws.ON_GPUS)
def test_ranks_that_draw_on_gpus(on_gpus: Cases, name: str) -> None:
    """R3, L4: the same with NCCL in the graphs."""
    check(name, on_gpus[name], "cuda")
