"""Optimizers, their moments and their learning rates; `eqformer.training` lists the public names."""
