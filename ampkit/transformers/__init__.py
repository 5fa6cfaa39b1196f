"""The training step of a transformers Trainer as one CUDA graph. Imports neither transformers nor accelerate."""

from ._mixin import GraphedTrainerMixin as GraphedTrainerMixin

__all__ = ["GraphedTrainerMixin"]
