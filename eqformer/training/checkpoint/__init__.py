"""Checkpoints: their arrays and metadata, their files, saving and restoring; `eqformer.training` lists the names."""
