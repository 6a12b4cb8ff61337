"""Public layouts, one file each. They are tried in this order; the first that matches reads a checkpoint."""

SOURCE_NAMES = (
    "authors",  # before layouts with timm's names, which some of them extend
    *("google", "hf", "imagegpt", "torchvision", "moco", "dino", "mae", "deit", "akamaster", "t2t", "t2t_by_width"),
    "timm",
)
