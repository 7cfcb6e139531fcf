"""Kernels for NVIDIA GPUs in Triton. Each has an equivalent in PyTorch's operators.

An import of this package needs Triton, which a PyTorch for CPUs lacks. So only code for GPUs imports it.
"""
