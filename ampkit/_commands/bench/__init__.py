"""Honest timing of one training step, written in several ways."""
