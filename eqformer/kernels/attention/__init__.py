"""Softmax attention of queries to keys under a mask: one call record, a reference, and kernels."""
