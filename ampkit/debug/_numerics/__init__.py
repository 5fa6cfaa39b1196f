"""Where the numbers of a step overflow, underflow or vanish."""
