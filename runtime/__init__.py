"""Runs a bundle or a plan: trees, backends, the round loop, text and the command line."""
