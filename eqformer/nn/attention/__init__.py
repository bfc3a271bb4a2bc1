"""Softmax attention layers: projections, latents, caches, selection of keys, scores and rotary positions."""
