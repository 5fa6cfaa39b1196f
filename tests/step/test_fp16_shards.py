"""float16 under fully_shard: many overflows on single ranks, which all ranks skip, with the bits of torch's loop.

What trains runs in processes of its own, one per rank (fp16_shards.py).
"""

import fp16_shards
import pytest
from rank_cases import Rows, cases_of

FAST = ("graphed, clip as torch",)
OTHERS = tuple(name for name in fp16_shards.CASES if name not in FAST)
on_cpu = cases_of(fp16_shards.__file__, "cpu", FAST, 180)
others_on_cpu = cases_of(fp16_shards.__file__, "cpu", OTHERS, 300)
ON_GPUS = ("clip", *FAST)  # graphed_step, and a function beside torch's loop; the rest is shown on CPUs
on_gpus = cases_of(fp16_shards.__file__, "cuda", ON_GPUS, 240)


def check(name: str, rows: Rows, device: str = "cpu", warmup: int = 3) -> None:
    """Assert that a case left the bits of eager steps and of torch's loop on each rank, and skipped what it had to."""
    calls, overflows = fp16_shards.CALLS[device], fp16_shards.OVERFLOWS[device]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["differ"] == row["differ from torch"] == []
        assert row["not skipped"] == row["moved in skipped"] == row["messages"] == []
        assert row["skipped"] == overflows  # no other call overflows
        assert row["replays"] == calls - warmup
        assert row["rates"] > 4 * calls // 7
        assert (row["clipped"] > 2 * calls // 7) == (fp16_shards.CASES[name].max_norm < 1)
        assert row["scales"] == rows[0]["scales"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST)
def test_ranks_skip_together(on_cpu: dict[str, Rows], case: str) -> None:
    """R12: weights, moments, norm, scale, average and rate behind 16 overflows, also of one rank's shard alone."""
    check(case, on_cpu[case])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_more_cases(others_on_cpu: dict[str, Rows], case: str) -> None:
    """R12: under graphed_step, with clipping in the optimizer's kernel, and with a policy of ampkit."""
    check(case, others_on_cpu[case])


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", ON_GPUS)
def test_on_two_gpus(on_gpus: dict[str, Rows], case: str) -> None:
    """R12: the same behind 100 overflows, with NCCL's collectives in the graph."""
    check(case, on_gpus[case], "cuda")
