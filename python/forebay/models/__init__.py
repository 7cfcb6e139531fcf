"""Encoders, image towers and models that run in transformers' own code, one file each."""
