"""Attention cores: what turns queries, keys and values into answers, whole or block by block."""
