"""transformers: folders of ImageGPT, which has biases, all zero, and its palette in preprocessor_config.json."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.base.files import make_folder, write_atomically, write_json
from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, recognize_source
from vitrail.checkpoint.name_table import convert_to_their_tensors
from vitrail.checkpoint.weight_files import RawContents
from vitrail.checkpoint.weight_folders import CONFIG_FILE, PREPROCESSOR_FILE, WEIGHT_FILES
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checks import pair

NAME = "imagegpt"
PALETTE, PALETTE_KEY = "palette", "clusters"
BIAS = re.compile(r"transformer\.h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.bias")
MASK_PATTERN = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"  # buffers that older versions of transformers save
REQUIRED = {  # values of config.json, which are also the defaults of transformers
    "activation_function": "quick_gelu",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "n_inner": None,
}


def matches(contents: RawContents) -> bool:
    return recognize_source(NAME, contents.tensors) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    family, source = get_source(NAME, contents.tensors, contents.path)
    config = contents.config or {}
    for name, expected in REQUIRED.items():
        if config.get(name, expected) != expected:
            raise CheckpointError(f"{name} of {CONFIG_FILE} is {config[name]!r}; expected {expected!r}")
    biases = [name for name in contents.tensors if BIAS.fullmatch(name)]
    if nonzero := [name for name in biases if contents.tensors[name].any()]:
        raise CheckpointError(f"{nonzero[0]} is not zero; expected zero biases, as in the published weights")
    tensors = {name: tensor for name, tensor in contents.tensors.items() if name not in biases}
    width = tensors["transformer.wte.weight"].shape[-1]
    heads = layout.get_typed_field(config, "n_head", int, source.heads.get(width, 0))
    model = layout.ModelBeforeRenaming(
        layout=NAME,
        family=family,
        source=source,
        tensors={**tensors, PALETTE: read_palette(contents)},
        known={**({"heads": heads} if heads else {}), **known},
        policy="timm",
        preprocessing=lambda config: Preprocessing(
            image_size=config["image_size"], crop=1.0, fit="squash", interpolation="bilinear", **layout.HALF_MEAN_STD
        ),
        ignore=MASK_PATTERN,
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def read_palette(contents: RawContents) -> Tensor:
    """The palette (K, 3), in [−1, 1]."""
    given = (contents.preprocessor or {}).get(PALETTE_KEY)
    if given is None:
        raise CheckpointError(
            f"{contents.path} has no palette; expected {PALETTE_KEY!r} in a {PREPROCESSOR_FILE} next to it"
        )
    try:
        palette = torch.tensor(given, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        palette = torch.empty(0)
    if palette.ndim != 2 or palette.shape[1] != 3 or not palette.isfinite().all():
        raise CheckpointError(f"{PALETTE_KEY!r} of {PREPROCESSOR_FILE} is not a list of colors of 3 numbers each")
    return palette


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write a folder for ImageGPTForCausalImageModeling."""
    config, (_, source) = description.config, choose_source(NAME, description)
    layout.check_representable("transformers' imagegpt", config, source.supported)
    rows, columns = pair(config["image_size"])
    layout.check_representable("transformers' imagegpt", {"rows": rows}, {"rows": (columns,)})
    assert source.card is not None
    theirs = convert_to_their_tensors(tensors, source.table, config["heads"])
    palette = theirs.pop(PALETTE)
    for layer in range(config["depth"]):
        for part, count in (("attn.c_attn", 3), ("attn.c_proj", 1), ("mlp.c_fc", 4), ("mlp.c_proj", 1)):
            name = f"transformer.h.{layer}.{part}"
            theirs[f"{name}.bias"] = theirs[f"{name}.weight"].new_zeros(count * config["width"])
    make_folder(path)
    header = {"format": "pt", layout.LAYOUT_KEY: NAME}
    write_atomically(path / WEIGHT_FILES[0], lambda temporary: save_file(theirs, temporary, header))
    processor = {
        "image_processor_type": "ImageGPTImageProcessor",
        PALETTE_KEY: palette.float().tolist(),
        "do_color_quantize": True,
        "do_normalize": True,
        "do_resize": True,
        "resample": 2,
        "size": {"height": rows, "width": columns},
    }
    for name, data in ((CONFIG_FILE, source.card(config)), (PREPROCESSOR_FILE, processor)):
        write_json(path / name, data)
    return source.assumed


LAYOUTS = (layout.Layout(name=NAME, matches=matches, read=read, write=write),)
