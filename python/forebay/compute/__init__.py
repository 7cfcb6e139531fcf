"""From a step's rows to tokens or vectors: the ways to compute a model, the sampler, and the choice among them."""
