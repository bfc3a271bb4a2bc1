"""Rows cut over devices: attention over their pieces."""
