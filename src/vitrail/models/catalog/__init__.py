"""Models by name: families, presets, public weights."""
