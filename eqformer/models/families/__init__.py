"""Published families, each in one file: config class, builder, presets, tables of attributes and of weights."""
