"""The rows of tests/benchmarks/zoo.py that are of transformers: tiny configs with default flags, padded, with LoRA."""

from zoo_models import Row

ROWS: dict[str, Row] = {}
