"""The names that torch keeps private, by area. Checked on torch 2.11.0 (CPU, CUDA 13.0) and 2.15.0 (CPU)."""
