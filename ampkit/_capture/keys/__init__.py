"""What decides which graph a call gets, and where its input lies."""
