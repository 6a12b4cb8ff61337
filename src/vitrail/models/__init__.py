"""One file per architecture: its config, its module, its presets and, last, its family."""

FAMILIES = ("vit", "deit", "hybrid", "cct", "cait", "t2t", "linformer", "axial", "resnet", "regnety")
