"""Names for the kernels of replayed graphs in a profiler trace."""
