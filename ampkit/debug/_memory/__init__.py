"""Who holds the memory of a step, on a device or before there is one."""
