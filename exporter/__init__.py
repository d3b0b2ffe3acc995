"""Turns a checkpoint with Medusa heads into a bundle."""
