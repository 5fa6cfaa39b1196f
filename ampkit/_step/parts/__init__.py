"""A step in parts: which modules are captured, and how they are replayed."""
