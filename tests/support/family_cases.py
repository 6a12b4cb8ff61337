"""A toy of every kind of model that reads images, for what holds for all of them."""

from typing import Any

from support.noisy_weights import add_weight_noise, randomize_batch_norms

from vitrail.models.base.contract import ImageModel
from vitrail.models.catalog.families import load_family

SIZE = (32, 64)
PLAIN: dict[str, Any] = {"patch_size": (8, 16), "width": 16, "heads": 2, "depth": 2}
TOKENS: dict[str, Any] = {"width": 16, "heads": 2, "depth": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit", {**PLAIN, "registers": 2}),
    "vit, mean": ("vit", {**PLAIN, "pool": "mean"}),
    "vit, map": ("vit", {**PLAIN, "pool": "map", "class_token": False}),
    "vit, rotary": ("vit", {**PLAIN, "positions": "rotary"}),
    "vit, positions in layers": ("vit", {**PLAIN, "positions_at": "layers"}),
    "deit": ("deit", PLAIN),
    "deit, distilled": ("deit", {**PLAIN, "distilled": True}),
    "deit, distillation head": ("deit", {**PLAIN, "distilled": True, "answer": "distill"}),
    "hybrid": ("hybrid", {**TOKENS, "stages": (1, 1), "patch_size": (1, 2)}),
    "hybrid, stem only": ("hybrid", {**TOKENS, "stages": (), "patch_size": 2}),
    "cct": ("cct", {**TOKENS, "stem": (8,)}),
    "cct, neighbors": ("cct", {**TOKENS, "stem": (8,), "published": False, "neighbors": True}),
    "cait": ("cait", {**PLAIN, "layer_scale": 0.5}),
    "t2t": ("t2t", {**TOKENS, "stage_width": 8}),
    "linformer": ("linformer", {**PLAIN, "projected": 4}),
    "axial": ("axial", PLAIN),
    "igpt": ("igpt", {**TOKENS, "colors": 5}),
    "sl_vit": ("sl_vit", PLAIN),
    "sl_vit, patches alone": ("sl_vit", {**PLAIN, "shifted_patches": False}),
    "parallel_vit": ("parallel_vit", {**PLAIN, "layer_scale": 0.5}),
    "deepvit": ("deepvit", {**PLAIN, "reattending": 1}),
    "deepvit, convolutions": ("deepvit", {**PLAIN, "stem": "convolutions", "branch_scale": 0.5}),
    "crossvit": ("crossvit", {"patch_sizes": (4, 8), "scales": (1, 1), "widths": (8, 16), "heads": (2, 2), "depth": 2}),
    "crossvit, scaled": (
        "crossvit",
        {"patch_sizes": (4, 8), "scales": (1, 0.5), "widths": (8, 16), "heads": (2, 2), "depth": 1},
    ),
    "patch_merger": ("patch_merger", {**PLAIN, "merged": 4}),
    "memory_vit": ("memory_vit", {**PLAIN, "memory": 3}),
    "beit": ("beit", {**PLAIN, "layer_scale": 0.5}),
    "beit, pre-trained": ("beit", {**PLAIN, "layer_scale": 0.5, "shared_bias": True, "pool": "class"}),
    "eva": ("eva", {**PLAIN, "layer_scale": 0.5, "registers": 2}),
    "eva, a table": (
        "eva",
        {
            **PLAIN,
            "rotary": "indexed",
            "positions": "learned",
            "activation": "swiglu",
            "pool": "class",
            "qv_bias": True,
            "mlp_norm": True,
        },
    ),
    "resnet": ("resnet", {"stages": (1, 2, 1), "width": 8}),
    "resnet, cifar": ("resnet", {"stages": (2, 1), "width": 8, "block": "basic", "stem": "cifar"}),
    "pit": ("pit", {"stages": (1, 2, 1), "widths": (16, 32, 64), "heads": (1, 2, 2)}),
    "pit, distilled": ("pit", {"stages": (1, 1), "widths": (16, 32), "heads": (2, 2), "distilled": True}),
    "swin": ("swin", {"stages": (2, 1), "widths": (16, 32), "heads": (2, 2), "windows": 4}),
    "swin, version 2": ("swin", {"stages": (1, 2), "widths": (16, 32), "heads": (2, 2), "windows": 4, "version": 2}),
    "twins": (
        "twins",
        {"stages": (2, 1), "widths": (16, 32), "heads": (2, 2), "windows": (4, 4), "reductions": (2, 1)},
    ),
    "pvt_v2": (
        "pvt_v2",
        {"stages": (2, 1), "widths": (16, 32), "heads": (2, 2), "reductions": (2, 1), "mlp_ratios": (2.0, 3.0)},
    ),
    "pvt_v2, pooled": (
        "pvt_v2",
        {
            "stages": (1, 1),
            "widths": (16, 32),
            "heads": (2, 2),
            "reductions": (2, 1),
            "mlp_ratios": (2.0, 3.0),
            "pooled": True,
        },
    ),
    "crossformer": (
        "crossformer",
        {"stages": (2, 1), "widths": (16, 32), "heads": (2, 2), "windows": (4, 3), "intervals": (2, 1)},
    ),
    "crossformer, cooling": (
        "crossformer",
        {
            "stages": (4, 1),
            "widths": (16, 32),
            "heads": (2, 2),
            "windows": (3, 3),
            "intervals": (2, 1),
            "cooling": True,
        },
    ),
    "regionvit": ("regionvit", {"stages": (1, 2), "widths": (16, 32), "heads": (2, 2), "window": 4}),
    "regionvit, convolution of positions": (
        "regionvit",
        {"stages": (1, 1), "widths": (16, 32), "heads": (2, 2), "window": 4, "position_convolution": True},
    ),
    "scalablevit": (
        "scalablevit",
        {
            "stages": (2, 2),
            "widths": (16, 32),
            "heads": (2, 2),
            "windows": (4, 3),
            "reductions": (2, 1),
            "key_ratios": (1.5, 1.0),
            "head_width": 24,
        },
    ),
    "sepvit": (
        "sepvit",
        {"stages": (2, 1), "widths": (16, 32), "heads": (2, 2), "windows": (2, 2), "odd_windows": (4, 2)},
    ),
    "sepvit, one window": (
        "sepvit",
        {"stages": (1, 2), "widths": (16, 32), "heads": (2, 2), "windows": (4, 8), "odd_windows": (4, 8)},
    ),
    "levit": ("levit", {"convolutions": 2, "stages": (1, 1), "widths": (16, 32), "heads": (2, 2), "key_width": 4}),
    "cvt": ("cvt", {"stages": (1, 2), "widths": (16, 32), "heads": (2, 2)}),
    "mobilevit": (
        "mobilevit",
        {
            "convolutions": (1, 2, 1),
            "stages": (0, 1, 2),
            "widths": (8, 16, 24),
            "token_widths": (0, 16, 32),
            "heads": 2,
        },
    ),
    "maxvit": ("maxvit", {"stages": (1, 1), "widths": (16, 32), "heads": (2, 2), "stem_width": 8, "window": 4}),
    "maxvit, torchvision": (
        "maxvit",
        {"stages": (2,), "widths": (16,), "heads": (2,), "stem_width": 8, "constants": "torchvision"},
    ),
    "nest": ("nest", {"stages": (1, 2), "widths": (16, 32), "heads": (2, 2)}),
    "nest, symmetric": (
        "nest",
        {"stages": (1, 1, 1), "widths": (16, 16, 16), "heads": (2, 2, 2), "padding": "symmetric"},
    ),
    "convnext": ("convnext", {"stages": (1, 2), "widths": (16, 24), "layer_scale": 0.5}),
    "regnety": ("regnety", {"stages": (1, 2), "widths": (16, 24), "group_width": 8}),
    "efficientnet": (
        "efficientnet",
        {
            "stages": (1, 2),
            "widths": (8, 16),
            "kernels": (3, 5),
            "strides": (1, 2),
            "stem_width": 8,
            "head_width": 32,
            "expansion": 2,
        },
    ),
    "efficientnet, TensorFlow": (
        "efficientnet",
        {
            "stages": (1, 1),
            "widths": (8, 8),
            "kernels": (3, 3),
            "strides": (2, 1),
            "stem_width": 8,
            "head_width": 32,
            "padding": "same",
            "norm_eps": 1e-3,
        },
    ),
    "bit": ("bit", {"stages": (1, 2), "width": 32}),
    "bit, Google": ("bit", {"stages": (1, 1), "width": 32, "constants": "google"}),
    "mixer": ("mixer", {"patch_size": (8, 16), "width": 16, "depth": 2}),
}


def build_case(case: str, size: tuple[int, int] = SIZE, **fields: Any) -> ImageModel:
    """The model of a case, with random weights."""
    name, own = CASES[case]
    family = load_family(name)
    model = family.build(family.configure(**{"image_size": size, "classes": 5, **own, **fields}))
    assert isinstance(model, ImageModel)
    return randomize_batch_norms(add_weight_noise(model))
