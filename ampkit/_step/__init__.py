"""A training step, written as one function for the engine in `_capture`."""
