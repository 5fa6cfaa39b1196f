"""Where the numbers of a training step overflow or underflow."""
