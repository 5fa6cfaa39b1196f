"""ampkit.lightning under ModelParallelStrategy: the bits of the same Trainer without graphs on every rank.

What trains runs in processes of its own, one per rank (lightning_fsdp.py). One start of the ranks does many cases.
"""

import lightning_fsdp
import pytest
from rank_cases import Cases, Rows, cases_of

pytestmark = pytest.mark.slow

RESUMED = ("resume", "resume whole by Lightning")
OTHERS = tuple(name for name in lightning_fsdp.CASES if name not in RESUMED)
MODULES = ("lightning.pytorch",)
on_cpu = cases_of(lightning_fsdp.__file__, "cpu", OTHERS, 500, modules=MODULES)
resumed_on_cpu = cases_of(lightning_fsdp.__file__, "cpu", RESUMED, 300, modules=MODULES)
on_gpus = cases_of(lightning_fsdp.__file__, "cuda", lightning_fsdp.ON_GPUS, 240)


def check(case: str, rows: Rows) -> None:
    """Assert that a case left the bits of Lightning's steps on each rank, and was captured unless it is refused."""
    kind = lightning_fsdp.CASES[case]
    batches = lightning_fsdp.BATCHES * (1 if kind.resume[1] else 2)
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["differ"] == []
        assert row["differ from Lightning"] == []
    if kind.refused:
        assert [row["replays"] for row in rows] == [0] * len(rows)
        assert kind.refused in rows[0]["failure"]
        assert any(kind.refused in message for message in rows[0]["messages"])
        return
    assert [row["failure"] for row in rows] == [None] * len(rows)
    if kind.resume[1] == "lightning":
        return
    # Lightning does the first window, unless it refuses to clip for this optimizer. A first, a middle and a last batch
    # of a window have graphs of their own.
    by_lightning = 0 if kind.kind == "16-mixed" and kind.trainer else kind.accumulate
    phases = min(3, kind.accumulate) * (2 if "numerics" in kind.options else 1)
    assert [sum(row["eager"].values()) for row in rows] == [3 * phases] * len(rows)
    assert [row["replays"] for row in rows] == [batches - by_lightning - 3 * phases] * len(rows)


@pytest.mark.ranks
@pytest.mark.parametrize("case", OTHERS)
def test_ranks_train_the_bits_of_lightning(on_cpu: Cases, case: str) -> None:
    """R12: parameters, moments, metrics, hooks and scale of a sharded model are those without graphs."""
    check(case, on_cpu[case])


@pytest.mark.parametrize("case", ["resume", pytest.param("resume whole by Lightning", marks=pytest.mark.ranks)])
def test_checkpoints_go_both_ways(resumed_on_cpu: Cases, case: str) -> None:
    """R12: one with a file for each rank, or one file with whole tensors, written and read with and without ampkit."""
    check(case, resumed_on_cpu[case])


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.parametrize("case", lightning_fsdp.ON_GPUS)
def test_on_two_gpus(on_gpus: Cases, case: str) -> None:
    """R12: the same with NCCL's collectives in the graph."""
    check(case, on_gpus[case])
