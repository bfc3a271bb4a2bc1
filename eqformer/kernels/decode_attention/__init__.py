"""Attention of the newest token of each row to a cache."""
