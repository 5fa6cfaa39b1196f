"""Whether a graph computes what the eager call does."""
