"""Shipped head checkpoints, one folder each."""
