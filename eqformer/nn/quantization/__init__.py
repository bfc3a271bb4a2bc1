"""Weights and KV caches in 8 or 4 bits; `eqformer.nn` lists the public names."""
