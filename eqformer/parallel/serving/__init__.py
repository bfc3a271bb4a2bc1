"""Whole models laid out over devices for text, with their caches."""
