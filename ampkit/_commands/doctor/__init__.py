"""What stands in the way of a capture, or makes a step slow: found in a loop of the user's."""
