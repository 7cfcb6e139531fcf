"""Kernels for NVIDIA GPUs in Triton. Each has a reference implementation with PyTorch's operators.

Importing this package requires Triton, which CPU builds of PyTorch lack. So only code for GPUs imports it.
"""
