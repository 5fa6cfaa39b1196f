"""The first tensor in which two runs of one model differ."""
