"""Which dtype parameters, operations, modules and outputs have."""
