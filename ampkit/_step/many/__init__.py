"""Several calls of a step in one."""
