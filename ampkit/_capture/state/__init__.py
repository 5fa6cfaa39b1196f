"""Whether all that a graph holds is as it was at its capture."""
