"""Which reference cycles keep tensors alive."""
