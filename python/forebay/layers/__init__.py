"""Parts that model families share. They hold tensors and compute. They know neither requests nor plans."""
