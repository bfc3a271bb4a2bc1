"""Softmax attention over keys of its own or of latents: projections, masks, rotary positions."""
