"""The training step of a Lightning Trainer as one CUDA graph. Needs Lightning."""

from ._callback import AmpkitCallback as AmpkitCallback

__all__ = ["AmpkitCallback"]
