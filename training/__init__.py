"""Trains and calibrates Medusa heads and searches trees."""
