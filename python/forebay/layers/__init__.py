"""Parts that model families share. They hold tensors and compute; they know neither requests nor plans."""
