"""yitu's T2T-ViT: {"state_dict_ema": …} or {"state_dict": …}, its stages with names of their own and k before q.

Its code has two scales for the attention of the backbone. Trained and evaluated by its commands, as the released
weights are, it divides by the root of a head's width, as we do, and as mmpretrain does, which reports the published
accuracy of the released T2T-ViT_t-14. Built with `pretrained=True`, which fetches nothing, it divides by the root of
the whole width: a file from such a training is read as `t2t_by_width`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoint.architecture import Fields, count, heads_of, positions_of, shape
from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import FIXED, IMAGENET, Found, Layout, found, stripped, write_table
from vitrail.checkpoint.names import Entry, Form, entry
from vitrail.checkpoint.sources import timm
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.catalog import families

STAGE = "tokens_to_token.attention#"
FIRST = "tokens_to_token.attention1"
STRIDE = (16, 16)  # pixels to a token
SCALE = (
    "how attention was scaled is not in the file: taken as by the width of a head, as yitu's evaluation runs; "
    "of a training by the whole width: --from t2t_by_width"
)


def turned(tensor: Tensor) -> Tensor:
    """k, q, v ↔ q, k, v."""
    one, two, v = tensor.chunk(3)
    return torch.cat((two, one, v))


KQV = Form(lambda parts: turned(parts[0]), lambda tensor, _: [turned(tensor)])
SAME_NAMES = (
    *("cls_token", "pos_embed", "tokens_to_token.project.*", f"{STAGE}.norm1.*", f"{STAGE}.norm2.*"),
    *(
        f"blocks.#.{part}"
        for part in ("norm1.*", "attn.qkv.weight", "attn.proj.*", "norm2.*", "mlp.fc1.*", "mlp.fc2.*")
    ),
    *("norm.*", "head.*"),
)
PLAIN: tuple[Entry, ...] = tuple(map(entry, SAME_NAMES, SAME_NAMES))
TABLES = {
    "performer": (
        *PLAIN,
        entry(f"{STAGE}.w", f"{STAGE}.w"),
        entry(f"{STAGE}.kqv.*", f"{STAGE}.qkv.*", KQV),
        entry(f"{STAGE}.proj.*", f"{STAGE}.proj.*"),
        entry(f"{STAGE}.mlp.0.*", f"{STAGE}.mlp.fc1.*"),
        entry(f"{STAGE}.mlp.2.*", f"{STAGE}.mlp.fc2.*"),
    ),
    "transformer": (
        *PLAIN,
        entry(f"{STAGE}.attn.qkv.weight", f"{STAGE}.qkv.weight"),
        entry(f"{STAGE}.attn.proj.*", f"{STAGE}.proj.*"),
        entry(f"{STAGE}.mlp.fc1.*", f"{STAGE}.mlp.fc1.*"),
        entry(f"{STAGE}.mlp.fc2.*", f"{STAGE}.mlp.fc2.*"),
    ),
}


def matches(contents: Contents) -> bool:
    return "tokens_to_token.project.weight" in stripped(contents.tensors, *timm.PREFIXES)


def read(contents: Contents, known: Mapping[str, Any], layout: str = "t2t") -> Found:
    tensors = stripped(contents.tensors, *timm.PREFIXES)
    stage = "performer" if f"{FIRST}.w" in tensors else "transformer"
    return found(
        contents,
        tensors,
        TABLES[stage],
        layout=layout,
        family="t2t",
        known={**published_heads(tensors), **known},
        policy="deit",
        preprocessing=preprocessing,
        shapes=architecture,
        warnings=[SCALE] if layout == "t2t" else [],
        fixed=FIXED,
    )


def published_heads(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Of a model of a published shape."""
    hidden = tuple(tensors["blocks.0.mlp.fc1.weight"].shape) if "blocks.0.mlp.fc1.weight" in tensors else ()
    presets = next(each.presets for each in families() if each.name == "t2t").values()
    return next(({"heads": each.heads} for each in presets if (mlp_width(each), each.width) == hidden), {})


def mlp_width(config: Any) -> int:
    return config.mlp_width or 3 * config.width


def architecture(tensors: Mapping[str, Tensor], _: str, known: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """Fields of the config from the shapes, and those of them that are uncertain."""
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    hidden, width = shape(sizes, "blocks.0.mlp.fc1.weight", 2)
    places, doubts = positions_of(sizes, 1, STRIDE, {**known, "prefix_positions": True})
    fields: dict[str, Any] = {
        "image_size": places["image_size"],
        "channels": shape(sizes, f"{FIRST}.qkv.weight", 2)[1] // 49,
        "classes": shape(sizes, "head.weight", 2)[0] if "head.weight" in sizes else 0,
        "stage": "performer" if f"{FIRST}.w" in sizes else "transformer",
        "stage_width": shape(sizes, f"{FIRST}.proj.weight", 2)[0],
        "width": width,
        "depth": count(sizes, r"blocks\.(\d+)\."),
        "mlp_width": hidden,
    }
    fields |= {name: known[name] for name in ("heads", "norm_eps") if name in known}
    heads = fields.get("heads") or heads_of(fields)[0]
    return {**fields, "heads": heads, "mlp_width": None if hidden == 3 * width else hidden}, doubts


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    return Preprocessing(image_size=config["image_size"], crop=0.9, **IMAGENET)


def write(
    tensors: Mapping[str, Tensor], description: Description, path: Path, layout: str = "t2t"
) -> Mapping[str, Any]:
    config = description.config
    write_table(layout, tensors, TABLES[config["stage"]], config["heads"], path, wrapper="state_dict_ema")
    return {"norm_eps": 1e-5}


LAYOUT = Layout(name="t2t", matches=matches, read=read, write=write, families=("t2t",))
