"""How far a replayed call, and a batch of a Trainer, travel through ampkit's files: later work may not lengthen it."""

import pytest
from lightning_harness import quiet
from road import Move, road_of_a_batch, road_of_a_call


@pytest.mark.parametrize(("files", "moves"), [(8, 11)])
def test_a_replayed_call_crosses_few_files(files: int, moves: int) -> None:
    """With a debugger, one steps through these files, in this order."""
    road = road_of_a_call()
    check(road, files, moves)
    ends = ("_step/step_calls.py", "_step/window.py")
    assert (road[0].file, road[-1].file) == ends


@quiet
@pytest.mark.parametrize(("files", "moves"), [(12, 17)])
def test_a_batch_of_a_trainer_crosses_few_files(files: int, moves: int) -> None:
    """The same under Lightning, from the beginning of a batch to that of the next."""
    check(road_of_a_batch(), files, moves)


def check(road: list[Move], files: int, moves: int) -> None:
    """Assert that a road is no longer than that, and has a graph on it."""
    listed = "\n".join(map(str, road))
    found = {move.file for move in road}
    assert "_capture/graph/graph.py" in found, listed
    assert (len(found) <= files, len(road) <= moves) == (True, True), f"{len(found)} files, {len(road)} moves\n{listed}"
