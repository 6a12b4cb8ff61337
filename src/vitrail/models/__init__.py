"""One file is one architecture: its config, its module, its presets, and last its family."""

FAMILIES = ("vit", "deit", "hybrid", "cct", "linformer", "axial", "resnet", "regnety")
