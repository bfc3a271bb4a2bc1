"""Writes of new tokens into the slots of a cache, in place."""
