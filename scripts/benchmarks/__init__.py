"""The rows of scripts/benchmark.py."""
