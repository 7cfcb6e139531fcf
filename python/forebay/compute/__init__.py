"""The way from a step's rows to tokens or vectors: ways to compute a model, the sampler, and the choice among them."""
