"""A step that torch.compile compiles."""
