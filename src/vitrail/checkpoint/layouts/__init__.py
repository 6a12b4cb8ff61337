"""Public layouts. They are tried in this order; the first that matches reads a checkpoint."""

SOURCE_FILES = {  # layout → its file
    "authors": "state_dicts",  # before layouts with timm's names, which some of them extend
    **{name: name for name in ("google", "hf", "imagegpt")},
    "torchvision": "state_dicts",
    **dict.fromkeys(("moco", "dino", "mae"), "self_supervised"),
    **dict.fromkeys(("deit", "akamaster", "t2t", "t2t_by_width"), "state_dicts"),
    "timm": "timm",
}
SOURCE_NAMES = tuple(SOURCE_FILES)
PARTS_OF_NAMES = {  # layout → of these, the names of its tensors contain one; it is not imported for other files
    "google": ("embedding/kernel", "resnet/group_norm/", "MixerBlock_0/"),
    "hf": ("embedding", "conv_stem.convolution."),
    "imagegpt": ("transformer.wte.weight",),
}
