"""Parts that model families share. They hold tensors and compute, independent of requests and plans."""
