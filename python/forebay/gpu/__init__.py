"""Kernels for NVIDIA GPUs in Triton. Each does what a function of PyTorch's operators does elsewhere in this package.

Importing this package needs Triton, which a PyTorch for CPUs lacks: only what runs on a GPU imports it.
"""
