"""One CUDA graph, its memory and its outputs, and the graphs that are kept."""
