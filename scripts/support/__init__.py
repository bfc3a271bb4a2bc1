"""Modules that the commands share: flags, paths, clocks and screens. Nothing here is a command."""
