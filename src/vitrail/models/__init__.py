"""Architectures, one file each: config, module, presets and, at the end, the FAMILY that combines them."""

TEXT_FAMILIES = ("transformer", "seq2seq")  # in text/
FAMILIES = (
    *("vit", "deit", "hybrid", "cct", "cait", "t2t", "linformer", "axial", "igpt", "resnet", "regnety"),  # read images
    *("convnext", "sl_vit", "parallel_vit", "deepvit", "crossvit", "patch_merger", "memory_vit", "beit", "eva"),
    *("pit", "swin", "twins", "pvt_v2", "levit", "cvt", "mobilevit", "maxvit", "nest"),  # at several levels
    *("crossformer", "regionvit", "scalablevit", "sepvit"),
    *("efficientnet", "bit", "mixer"),  # what the papers compare with
    *TEXT_FAMILIES,
)
