"""Compiling and launching CUDA kernels."""
