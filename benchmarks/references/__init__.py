"""Slow and plain definitions that fast paths are held against, in tests and benchmarks."""
