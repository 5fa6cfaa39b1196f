"""Other forms of the update than the optimizer's own: compiled, with state in bfloat16, matrices as stacks."""
