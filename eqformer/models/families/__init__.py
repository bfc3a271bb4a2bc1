"""One file a family: its numbers, its constructor calls, its published names, its presets."""
