"""Rewrites of the traced graph, one per file; each says whether it modified the model."""
