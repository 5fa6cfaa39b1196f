"""What `python -m ampkit` does."""
