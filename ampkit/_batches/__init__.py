"""How batches come in: padded to few shapes, copied ahead of their step."""
