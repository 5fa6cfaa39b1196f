"""Which Python values a step reads, and when two of them are the same."""
