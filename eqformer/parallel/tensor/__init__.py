"""Layers on slices of heads, hidden features and the vocabulary."""
