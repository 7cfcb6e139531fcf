"""Encoders, image towers and models that use transformers' own code, one file each."""
