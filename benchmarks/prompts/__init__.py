"""Prompts of our own: to calibrate, to score on, and to write training data from."""
