"""Meshes and layouts: shardings from names of dims, tables and drawings of them, sharded initialization."""
