"""Losses over tokens and rows, in chunks of logits; `eqformer.training` lists the public names."""
