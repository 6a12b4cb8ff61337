"""Public layouts, one file each; the first that recognises a checkpoint reads it."""

SOURCE_NAMES = (
    "google",
    "hf",
    "torchvision",
    "moco",
    "dino",
    "mae",
    "deit",
    "akamaster",
    "t2t",
    "t2t_by_width",
    "timm",
)
