"""Forebay, an LLM serving engine. Rust decides, PyTorch computes."""

__version__ = "0.1.0"
