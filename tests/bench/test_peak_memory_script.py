"""tests/benchmarks/peak_memory.py, but for what a GPU does."""

import peak_memory


def test_holes() -> None:
    """Free bytes of segments in use: not of a segment that is free as a whole, and not of a graph's pool."""
    segments = [
        {"total_size": 20, "allocated_size": 5, "segment_pool_id": (0, 0)},
        {"total_size": 40, "allocated_size": 0, "segment_pool_id": (0, 0)},
        {"total_size": 80, "allocated_size": 1, "segment_pool_id": (0, 7)},
        {"total_size": 8, "allocated_size": 8},
    ]
    assert peak_memory.holes(segments) == 15
