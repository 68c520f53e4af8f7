"""Kernels in Triton's interpreter, and what they are compared with."""
