"""Operators that targets may run as their own kernels."""
