"""How far a replayed call travels through ampkit's files: a road that later work may shorten, and not lengthen."""

from road import replayed_call, road

# The aim is 8 files in 12 moves.
MOST_FILES, MOST_MOVES = 18, 37


def test_a_replayed_call_crosses_few_files() -> None:
    """Whoever follows a batch with a debugger steps through these files, in this order."""
    moves = road(replayed_call())
    listed = "\n".join(map(str, moves))
    assert len({move.file for move in moves}) <= MOST_FILES, listed
    assert len(moves) <= MOST_MOVES, listed
    assert moves[0].file == moves[-1].file == "_step/graphed_step.py" or moves[-1].file == "_optimizer/scaler.py", (
        listed
    )
    assert "_capture/graph.py" in {move.file for move in moves}
