"""What a graph cannot contain, with the line that does it."""
