"""Computes tokens or vectors from a step's rows: the forward passes and their selection, pooling, and the sampler."""
