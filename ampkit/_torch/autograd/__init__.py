"""The autograd engine and its nodes."""
