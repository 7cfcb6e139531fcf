"""The CPU's compiled kernels: a whole step of a decoder in one call."""
