"""transformers: folders of ViT, DeiT and DINOv2, with the names on disk and those in memory since v5."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.files.weight_folders import CONFIG_FILE, PREPROCESSOR_FILE, WEIGHT_FILES
from vitrail.checkpoint.name_table import THREE_PARTS, TWO_PARTS, NameEntry, make_entry
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.files import make_folder, write_text
from vitrail.models.checks import pair

PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.")
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_python": "gelu"}
DEFAULT_HEADS = 12  # if config.json does not specify them
PILLOW_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
EMBEDDING_ENTRIES = (
    make_entry("embeddings.cls_token", "cls_token"),
    make_entry("embeddings.distillation_token", "dist_token"),
    make_entry("embeddings.register_tokens", "reg_token"),
    make_entry("embeddings.position_embeddings", "pos_embed"),
    make_entry("embeddings.patch_embeddings.projection.*", "patch_embed.proj.*"),
    make_entry("layernorm.*", "norm.*"),
    make_entry("pooler.dense.*", "pre_logits.*"),
    make_entry("classifier.*", "head.*"),
)
HEAD_ENTRIES = (make_entry("cls_classifier.*", "head.*"), make_entry("distillation_classifier.*", "head_dist.*"))
OLD_LAYER, NEW_LAYER = "encoder.layer.#.", "layers.#."
QKV_NAME = "blocks.#.attn.qkv.*"


def attention_entries(layer: str) -> Iterator[NameEntry]:
    """Names on disk, then names in memory; the first are used for writing."""
    yield make_entry(
        [f"{layer}attention.attention.{part}.*" for part in ("query", "key", "value")], QKV_NAME, THREE_PARTS
    )
    yield make_entry(f"{layer}attention.output.dense.*", "blocks.#.attn.proj.*")
    yield make_entry([f"{layer}attention.{part}_proj.*" for part in "qkv"], QKV_NAME, THREE_PARTS)
    yield make_entry(f"{layer}attention.o_proj.*", "blocks.#.attn.proj.*")


VIT_TABLE = (
    *EMBEDDING_ENTRIES,
    *(make_entry(f"{at}layernorm_before.*", "blocks.#.norm1.*") for at in (OLD_LAYER, NEW_LAYER)),
    *(make_entry(f"{at}layernorm_after.*", "blocks.#.norm2.*") for at in (OLD_LAYER, NEW_LAYER)),
    *(row for at in (OLD_LAYER, NEW_LAYER) for row in attention_entries(at)),
    make_entry(f"{OLD_LAYER}intermediate.dense.*", "blocks.#.mlp.fc1.*"),
    make_entry(f"{OLD_LAYER}output.dense.*", "blocks.#.mlp.fc2.*"),
    make_entry(f"{NEW_LAYER}mlp.fc1.*", "blocks.#.mlp.fc1.*"),
    make_entry(f"{NEW_LAYER}mlp.fc2.*", "blocks.#.mlp.fc2.*"),
)
DEIT_TABLE = (*HEAD_ENTRIES, *VIT_TABLE)
DINO_ENTRIES = (
    *EMBEDDING_ENTRIES,
    *(make_entry(f"{OLD_LAYER}norm{n}.*", f"blocks.#.norm{n}.*") for n in (1, 2)),
    *(make_entry(f"{OLD_LAYER}layer_scale{n}.lambda1", f"blocks.#.ls{n}.gamma") for n in (1, 2)),
    *attention_entries(OLD_LAYER),
)
DINO_TABLE = (*DINO_ENTRIES, *(make_entry(f"{OLD_LAYER}mlp.fc{n}.*", f"blocks.#.mlp.fc{n}.*") for n in (1, 2)))
SWIGLU_TABLE = (
    *DINO_ENTRIES,
    make_entry(f"{OLD_LAYER}mlp.weights_in.*", "blocks.#.mlp.fc1.*"),
    make_entry(f"{OLD_LAYER}mlp.weights_out.*", "blocks.#.mlp.fc2.*"),
    make_entry([f"{OLD_LAYER}mlp.gate_proj.*", f"{OLD_LAYER}mlp.up_proj.*"], "blocks.#.mlp.fc1.*", TWO_PARTS),
    make_entry(f"{OLD_LAYER}mlp.down_proj.*", "blocks.#.mlp.fc2.*"),
)
NAME_TABLES = {"vit": VIT_TABLE, "deit": DEIT_TABLE, "dinov2": DINO_TABLE, "dinov2_with_registers": DINO_TABLE}
SUPPORTED_VALUES = {
    "class_token": (True,),
    "pool": ("class",),
    **layout.STEM_POSITION_VALUES,
}


def strip_model_prefix(contents: RawContents) -> dict[str, Tensor]:
    """Remove the name of the model, which is a prefix of all names but those of the heads."""
    tensors = layout.strip_common_prefixes(contents.tensors, "module.")
    prefix = next((p for p in PREFIXES if f"{p}embeddings.cls_token" in tensors), "")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def matches(contents: RawContents) -> bool:
    return "embeddings.patch_embeddings.projection.weight" in strip_model_prefix(contents)


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors, config, warnings = strip_model_prefix(contents), contents.config or {}, list[str]()
    kind = layout.get_typed_field(config, "model_type", str, detect_model_type(tensors))
    if kind not in NAME_TABLES:
        raise CheckpointError(
            f"{contents.path} has model_type {kind!r} of transformers; expected one of {', '.join(NAME_TABLES)}"
        )
    dino = kind.startswith("dinov2")
    ignored = [name for name in tensors if dino and name.startswith("classifier.")]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if ignored:
        warnings.append("the head of a DINOv2 takes two vectors per image, ours takes one: the head is ignored")
    if "embeddings.register_tokens" in tensors and "embeddings.position_embeddings" in tensors:
        tensors["embeddings.position_embeddings"] = layout.insert_zero_register_positions(
            tensors["embeddings.position_embeddings"], tensors["embeddings.register_tokens"]
        )
    distilled = "distillation_classifier.weight" in tensors
    if "embeddings.distillation_token" in tensors and not distilled:  # a token without its own head is a register
        tensors["embeddings.register_tokens"] = tensors.pop("embeddings.distillation_token")
    swiglu = any("mlp.weights_in." in name or "mlp.gate_proj." in name for name in tensors)
    fields = fields_from_config(config, kind, swiglu, "pooler.dense.weight" in tensors)
    processor_fields, processor_warnings = fields_from_processor(contents.preprocessor, kind)
    model = layout.UntranslatedModel(
        layout="hf",
        family="deit" if distilled else "vit",
        tensors=tensors,
        table=SWIGLU_TABLE if swiglu else NAME_TABLES[kind],
        known=layout.merge_agreeing_fields(fields, known) if config else known,
        policy="timm" if kind == "dinov2_with_registers" else "deit",  # with registers, transformers antialiases
        preprocessing=lambda config: Preprocessing(image_size=config["image_size"], **processor_fields),
        ignore=r"embeddings\.mask_token|decoder\..*",
        labels=labels_from_config(config),
        variant={"model_type": kind},
        warnings=[*warnings, *processor_warnings],
        fixed_fields=layout.OWNER_FIXED_FIELDS if config else ("pool", "trained_size"),
        default_fields=fields,
        assumed_preprocessing=contents.preprocessor is None,
    )
    translated = layout.translate_checkpoint(contents, model)
    rows, columns = translated.description.config["image_size"]
    cropped, size_warnings = read_processor_output_size(contents.preprocessor or {}), list[str]()
    if cropped not in (None, (rows, columns)):
        size_warnings.append(f"{PREPROCESSOR_FILE} makes images of {cropped[0]}×{cropped[1]}: {rows}×{columns} is used")
    return replace(
        translated,
        ignored=(*translated.ignored, *ignored),
        warnings=(*translated.warnings, *size_warnings),
    )


def detect_model_type(tensors: Mapping[str, Tensor]) -> str:
    if "embeddings.register_tokens" in tensors:
        return "dinov2_with_registers"
    if any("layer_scale1" in name for name in tensors):
        return "dinov2"
    return "deit" if "embeddings.distillation_token" in tensors else "vit"


def default_norm_eps(kind: str) -> float:
    return 1e-6 if kind.startswith("dinov2") else 1e-12


def fields_from_config(config: Mapping[str, Any], kind: str, swiglu: bool, pooled: bool) -> dict[str, Any]:
    """Fields of config.json that the shapes do not tell."""
    fields: dict[str, Any] = {
        "norm_eps": layout.get_typed_field(config, "layer_norm_eps", float, default_norm_eps(kind))
    }
    if config:
        fields["heads"] = layout.get_typed_field(config, "num_attention_heads", int, DEFAULT_HEADS)
    if "image_size" in config:
        size = config["image_size"]
        fields["image_size"] = tuple(size) if isinstance(size, list) else size
    if layout.get_typed_field(config, "pooler_act", str, "tanh") != "tanh" and pooled:
        raise CheckpointError(f"pooler_act is {config['pooler_act']!r}; expected tanh")
    activation = layout.get_typed_field(config, "hidden_act", str, "gelu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    if not swiglu:
        fields["activation"] = ACTIVATIONS[activation]
    return fields


def labels_from_config(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Class names in order; the placeholders LABEL_0, LABEL_1, … are not names."""
    names = layout.get_typed_field(config, "id2label", dict, {})
    try:
        ordered = [names[key] for key in sorted(names, key=int)]
    except ValueError:
        raise CheckpointError(
            f"id2label of {CONFIG_FILE} has keys that are not numbers; expected class numbers"
        ) from None
    if not ordered or any(not isinstance(name, str) for name in ordered) or ordered[0] == "LABEL_0":
        return None
    return tuple(ordered)


def read_processor_output_size(processor: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the images that the processor makes."""
    cropped = layout.get_typed_field(
        processor, "do_center_crop", bool, "crop_size" in processor and "do_center_crop" not in processor
    )
    return parse_processor_size(processor.get("crop_size" if cropped else "size"))


def parse_processor_size(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return (size, size)
    if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return (size["height"], size["width"])
    if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
        return (size["shortest_edge"], size["shortest_edge"])
    return None


def fields_from_processor(processor: Mapping[str, Any] | None, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Preprocessing fields other than the image size, and warnings about what we cannot reproduce."""
    if processor is None:
        defaults: dict[str, Any] = {
            "crop": 1.0,
            "middle": "floored",
            "fit": "squash",
            "interpolation": "bilinear",
            **layout.HALF_MEAN_STD,
        }
        if kind != "vit":
            defaults |= {"crop": 0.875, "interpolation": "bicubic", **layout.IMAGENET_MEAN_STD}
        if kind.startswith("dinov2"):
            defaults["fit"] = "short_side"
        return defaults, []
    size = processor.get("size")
    warnings, resized, cropped = list[str](), parse_processor_size(size), read_processor_output_size(processor)
    fields: dict[str, Any] = {
        "crop": compute_crop_fraction(cropped[0], resized[0]) if cropped and resized else 1.0,
        "fit": "short_side" if isinstance(size, dict) and "shortest_edge" in size else "squash",
        "middle": "floored",
        "interpolation": PILLOW_RESAMPLING.get(
            layout.get_typed_field(processor, "resample", int, 3 if kind != "vit" else 2), "bicubic"
        ),
    }
    for name, default in layout.HALF_MEAN_STD.items():
        given = processor.get(f"image_{name}", list(default))
        fields[name] = tuple(given) if isinstance(given, list) else (given,) * 3
    if layout.get_typed_field(processor, "do_normalize", bool, True) is False:
        fields |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    supported = {
        "do_resize": (True,),
        "do_rescale": (True,),
        "resample": (2, 3),
        "rescale_factor": (1 / 255,),
        "crop_pct": (None,),
    }
    for name, values in supported.items():
        if processor.get(name, values[0]) not in values:
            warnings.append(f"{PREPROCESSOR_FILE} has {name}={processor[name]!r}, not supported: {values[0]} is used")
    return fields, warnings


def compute_crop_fraction(cropped: int, resized: int) -> float:
    """cropped/resized, rounded so that cropped/fraction is not slightly less than the integer it came from."""
    ratio = cropped / max(resized, 1)
    return ratio if floor(cropped / ratio) == resized else ratio * (1 - 1e-12)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write a folder for AutoModelForImageClassification, or for AutoModel if the model has no head."""
    config, kind = description.config, choose_model_type(description)
    layout.check_representable(f"transformers' {kind}", config, SUPPORTED_VALUES)
    registers = config.get("registers", 0)
    table, renamed = (
        NAME_TABLES[kind],
        layout.add_zero_prefix_positions(tensors, config, 1 + (registers or config.get("distilled", False))),
    )
    if kind.startswith("dinov2"):
        renamed = layout.remove_zero_register_positions("transformers", renamed, config)
        table = SWIGLU_TABLE if config.get("activation") == "swiglu" else table
    elif registers:
        table = tuple(
            make_entry("embeddings.distillation_token", "reg_token") if r.ours == "reg_token" else r for r in VIT_TABLE
        )
    prefix = f"{kind}." if config["classes"] else ""
    table = tuple(add_entry_prefix(row, prefix) for row in table)
    card = make_hf_config(description, kind)
    make_folder(path)
    layout.rename_and_write_tensors("hf", renamed, table, config["heads"], path / WEIGHT_FILES[0])
    texts = {CONFIG_FILE: card}
    if description.preprocessing is not None:
        texts[PREPROCESSOR_FILE] = make_processor_config(description.preprocessing)
    else:
        (path / PREPROCESSOR_FILE).unlink(missing_ok=True)  # left by another model
    for name, data in texts.items():
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        write_text(path / name, text)
    return {}


def choose_model_type(description: Description) -> str:
    """The model_type of transformers that computes the same."""
    config = description.config
    if description.family == "hybrid":
        raise CheckpointError("transformers' ViT cannot represent a hybrid; expected the family vit or deit")
    allowed: dict[str, tuple[Any, ...]]
    if config.get("layer_scale") is not None or config.get("activation") == "swiglu":
        kind, allowed = "dinov2", {"classes": (0,), "head": ("linear",), "distilled": (False,)}
        kind = "dinov2_with_registers" if config.get("registers") else kind
    elif config.get("distilled"):
        kind, allowed = "deit", {"has a head": (True,)}
    else:
        kind, allowed = "deit" if config.get("registers") else "vit", {"registers": (0, 1)}
        if config.get("head") == "mlp":
            allowed = {**allowed, "classes": (0,)}
    layout.check_representable(f"transformers' {kind}", {**config, "has a head": config["classes"] > 0}, allowed)
    return kind


def add_entry_prefix(row: NameEntry, prefix: str) -> NameEntry:
    head = row.ours.startswith("head")
    return row if head else make_entry([prefix + name for name in row.theirs], row.ours, row.transform)


def make_hf_config(description: Description, kind: str) -> dict[str, Any]:
    config = description.config
    width, size, patch = config["width"], config["image_size"], config["patch_size"]
    hidden = config.get("mlp_width") or 4 * width
    ending = "ForImageClassificationWithTeacher" if config.get("distilled") else "ForImageClassification"
    stem = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[kind]
    activation = {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.get("activation", "gelu"), "gelu")
    data: dict[str, Any] = {
        "architectures": [stem + (ending if config["classes"] else "Model")],
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": config["depth"],
        "num_attention_heads": config["heads"],
        "hidden_act": activation,
        "layer_norm_eps": config["norm_eps"],
        "image_size": size[0] if size[0] == size[1] else size,
        "patch_size": patch[0] if patch[0] == patch[1] else patch,
        "num_channels": config["channels"],
        "qkv_bias": config.get("qkv_bias", True),
        "hidden_dropout_prob": config["dropout"],
        "attention_probs_dropout_prob": config["attention_dropout"],
        "dtype": "float32",
    }
    if kind.startswith("dinov2"):
        expected = compute_swiglu_width(width) if config.get("activation") == "swiglu" else 4 * width
        layout.check_representable("transformers' dinov2", {"mlp_width": hidden}, {"mlp_width": (expected,)})
        data |= {"mlp_ratio": 4, "use_swiglu_ffn": config.get("activation") == "swiglu", "use_mask_token": False}
        data |= {"num_register_tokens": config["registers"]} if config.get("registers") else {}
    else:
        data |= {"intermediate_size": hidden, "encoder_stride": patch[0]}
    if config["classes"]:
        labels = description.labels or [f"LABEL_{n}" for n in range(config["classes"])]
        data |= {"id2label": {str(n): label for n, label in enumerate(labels)}}
        data |= {"label2id": {label: n for n, label in reversed(list(enumerate(labels)))}}
    return data


def compute_swiglu_width(width: int) -> int:
    """MLP width of a DINOv2 with SwiGLU in transformers: two thirds of 4·width, rounded up to a multiple of 8."""
    return (int(4 * width * 2 / 3) + 7) // 8 * 8


def make_processor_config(preprocessing: Preprocessing) -> dict[str, Any]:
    height, width = pair(preprocessing.image_size)
    resized = floor(height / preprocessing.crop), floor(width / preprocessing.crop)
    squash = preprocessing.fit == "squash" or height != width
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": resized[0], "width": resized[1]} if squash else {"shortest_edge": resized[0]},
        "resample": 2 if preprocessing.interpolation == "bilinear" else 3,
        "do_center_crop": resized != (height, width) or not squash,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": preprocessing.mean,
        "image_std": preprocessing.std,
    }


LAYOUT = layout.Layout(name="hf", matches=matches, read=read, write=write)
