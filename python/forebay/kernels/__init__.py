"""The CPU's compiled kernels: a whole step of a decoder, or a batch of an encoder, in one call."""
