"""Tensors, modules, operators and modes."""
