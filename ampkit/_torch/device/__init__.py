"""Allocator, streams, profilers."""
