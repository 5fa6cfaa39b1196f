"""One call of a captured function: what is checked, recorded, replayed and reported."""
