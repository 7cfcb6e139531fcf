"""Parts that model families share. They hold tensors and compute. They do not know requests or plans."""
