"""One file a family: its config, its constructor calls, its published names, its presets."""
