"""What happens in a call: which eager calls come first, when a graph is captured, when it is replayed."""
