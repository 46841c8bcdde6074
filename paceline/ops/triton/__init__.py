"""Triton kernels for CUDA. Only `kernels.py` is imported from outside, and only where CUDA is used."""
