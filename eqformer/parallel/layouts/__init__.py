"""Meshes, and where each array lies: specs from names, tables, drawings, creation in place."""
