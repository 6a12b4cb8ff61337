"""Presets of SigLIP, SimpleViT and ViT-b, fields of a ViT config that differ from the plain ones.

SigLIP (Zhai 2023, arXiv 2303.15343) and SigLIP 2 (Tschannen 2025, arXiv 2502.14786): the image tower, whose output is
attention pooling of the patches, or in the `gap` presets their mean. ViT-b (Dosovitskiy 2020, figure 4) is ViT-B with
all widths halved.
"""

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 192, "heads": 3},
    "small": {"width": 384, "heads": 6},
    "base": {},
    "large": {"width": 1024, "depth": 24, "heads": 16},
    "so400m": {"width": 1152, "depth": 27, "heads": 16, "mlp_width": 4304},
    "giantopt": {"width": 1536, "depth": 40, "heads": 16},
}
SIMPLE = (("tiny", 16), ("small", 16), ("small", 32), ("base", 16), ("large", 16))
SIMPLE_FIELDS = {"positions": "sincos_simple", "pool": "mean", "class_token": False, "head": "mlp"}
SIGLIP = {  # image sizes by size and patch; 384 pixels are not whole patches of 14 pixels
    ("base", 32): (256,),
    ("base", 16): (224, 256, 384, 512),
    ("large", 16): (256, 384, 512),
    ("so400m", 14): (224, 378),
    ("so400m", 16): (256, 384, 512),
    ("giantopt", 16): (256, 384),
}
GAP_ONLY = {("so400m", 14): (448, 896)}  # PaliGemma's towers
EXACT_GELU = (  # timm runs these with it, though all were trained with the tanh approximation
    *(("base", 16, pixels) for pixels in (224, 256, 384, 512)),
    *(("large", 16, pixels) for pixels in (256, 384)),
    *(("so400m", 14, pixels) for pixels in (224, 378, 448, 896)),
)
HALVED = {"width": 384, "heads": 12, "patch_size": 32}  # the paper does not say how many heads: 12 is an assumption
LETTERS = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "so400m": "So400m", "giantopt": "g-opt"}


def make_siglip_fields(size: str, patch: int, pixels: int, pool: str) -> dict[str, Any]:
    activation = "gelu" if (size, patch, pixels) in EXACT_GELU else "gelu_tanh"
    kind = {"image_size": pixels, "patch_size": patch, "classes": 0, "class_token": False, "pool": pool}
    return {**SIZES[size], **kind, "activation": activation}


SIGLIP_AND_SIMPLE_FIELDS: dict[str, dict[str, Any]] = {
    **{f"vit_halved_patch32_{pixels}": {**HALVED, "image_size": pixels} for pixels in (224, 384)},
    **{
        f"simple_vit_{size}_patch{patch}_224": {
            **SIZES[size],
            "patch_size": patch,
            "activation": "gelu_tanh",
            **SIMPLE_FIELDS,
        }
        for size, patch in SIMPLE
    },
    **{
        f"vit_{size}_patch{patch}_siglip_{pixels}": make_siglip_fields(size, patch, pixels, "map")
        for (size, patch), sizes in SIGLIP.items()
        for pixels in sizes
    },
    **{
        f"vit_{size}_patch{patch}_siglip_gap_{pixels}": make_siglip_fields(size, patch, pixels, "mean")
        for (size, patch), sizes in SIGLIP.items()
        for pixels in (*sizes, *GAP_ONLY.get((size, patch), ()))
    },
}
SIGLIP_AND_SIMPLE_ALIASES = {
    "ViT-b/32": "vit_halved_patch32_224",
    "ViT-b/32@384": "vit_halved_patch32_384",
    **{f"SimpleViT-{LETTERS[size]}/{patch}": f"simple_vit_{size}_patch{patch}_224" for size, patch in SIMPLE},
    **{
        f"SigLIP-{LETTERS[size]}/{patch}{'' if pixels == sizes[0] else f'@{pixels}'}": (
            f"vit_{size}_patch{patch}_siglip_{pixels}"
        )
        for (size, patch), sizes in SIGLIP.items()
        for pixels in sizes
    },
}
