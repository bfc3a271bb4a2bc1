"""Attention of each row's newest token to a cache, which kernels read once."""
