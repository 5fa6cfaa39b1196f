"""The commands of `python -m ampkit`."""
