"""transformers: folders of ViT, DeiT and DINOv2, by the names on disk and by those that it has in memory since v5."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import CONFIG, PREPROCESSOR, WEIGHTS, Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import (
    FIXED,
    HALF,
    IMAGENET,
    TABLE_AT_STEM,
    Found,
    Layout,
    agreed,
    found,
    holds,
    stripped,
    value,
    with_prefix_rows,
    with_register_rows,
    without_register_rows,
    write_table,
)
from vitrail.checkpoint.names import HALVES, THIRDS, Entry, entry
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.files import make_folder, write_whole
from vitrail.models.checks import pair

PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.")
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_python": "gelu"}
DEFAULT_HEADS = 12  # if config.json does not specify it
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
EMBEDDINGS = (
    entry("embeddings.cls_token", "cls_token"),
    entry("embeddings.distillation_token", "dist_token"),
    entry("embeddings.register_tokens", "reg_token"),
    entry("embeddings.position_embeddings", "pos_embed"),
    entry("embeddings.patch_embeddings.projection.*", "patch_embed.proj.*"),
    entry("layernorm.*", "norm.*"),
    entry("pooler.dense.*", "pre_logits.*"),
    entry("classifier.*", "head.*"),
)
HEADS = (entry("cls_classifier.*", "head.*"), entry("distillation_classifier.*", "head_dist.*"))
OLD, NEW = "encoder.layer.#.", "layers.#."
QKV = "blocks.#.attn.qkv.*"


def attention(layer: str) -> Iterator[Entry]:
    """On disk, then in memory; where both could be written, the first is."""
    yield entry([f"{layer}attention.attention.{part}.*" for part in ("query", "key", "value")], QKV, THIRDS)
    yield entry(f"{layer}attention.output.dense.*", "blocks.#.attn.proj.*")
    yield entry([f"{layer}attention.{part}_proj.*" for part in "qkv"], QKV, THIRDS)
    yield entry(f"{layer}attention.o_proj.*", "blocks.#.attn.proj.*")


VIT = (
    *EMBEDDINGS,
    *(entry(f"{at}layernorm_before.*", "blocks.#.norm1.*") for at in (OLD, NEW)),
    *(entry(f"{at}layernorm_after.*", "blocks.#.norm2.*") for at in (OLD, NEW)),
    *(row for at in (OLD, NEW) for row in attention(at)),
    entry(f"{OLD}intermediate.dense.*", "blocks.#.mlp.fc1.*"),
    entry(f"{OLD}output.dense.*", "blocks.#.mlp.fc2.*"),
    entry(f"{NEW}mlp.fc1.*", "blocks.#.mlp.fc1.*"),
    entry(f"{NEW}mlp.fc2.*", "blocks.#.mlp.fc2.*"),
)
DEIT = (*HEADS, *VIT)
DINO_LAYER = (
    *EMBEDDINGS,
    *(entry(f"{OLD}norm{n}.*", f"blocks.#.norm{n}.*") for n in (1, 2)),
    *(entry(f"{OLD}layer_scale{n}.lambda1", f"blocks.#.ls{n}.gamma") for n in (1, 2)),
    *attention(OLD),
)
DINO = (*DINO_LAYER, *(entry(f"{OLD}mlp.fc{n}.*", f"blocks.#.mlp.fc{n}.*") for n in (1, 2)))
SWIGLU = (
    *DINO_LAYER,
    entry(f"{OLD}mlp.weights_in.*", "blocks.#.mlp.fc1.*"),
    entry(f"{OLD}mlp.weights_out.*", "blocks.#.mlp.fc2.*"),
    entry([f"{OLD}mlp.gate_proj.*", f"{OLD}mlp.up_proj.*"], "blocks.#.mlp.fc1.*", HALVES),
    entry(f"{OLD}mlp.down_proj.*", "blocks.#.mlp.fc2.*"),
)
TABLES = {"vit": VIT, "deit": DEIT, "dinov2": DINO, "dinov2_with_registers": DINO}
ONLY = {
    "class_token": (True,),
    "pool": ("class",),
    **TABLE_AT_STEM,
}


def unprefixed(contents: Contents) -> dict[str, Tensor]:
    """Without the model's name, which stands before all but the heads."""
    tensors = stripped(contents.tensors, "module.")
    prefix = next((p for p in PREFIXES if f"{p}embeddings.cls_token" in tensors), "")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def matches(contents: Contents) -> bool:
    return "embeddings.patch_embeddings.projection.weight" in unprefixed(contents)


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    tensors, config, warnings = unprefixed(contents), contents.config or {}, list[str]()
    kind = value(config, "model_type", str, kind_of(tensors))
    if kind not in TABLES:
        raise CheckpointError(f"{contents.path} is a {kind!r} of transformers; expected one of {', '.join(TABLES)}")
    dino = kind.startswith("dinov2")
    left = [name for name in tensors if dino and name.startswith("classifier.")]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left}
    if left:
        warnings.append("the head of a DINOv2 asks two vectors an image, which ours does not: left out")
    if "embeddings.register_tokens" in tensors and "embeddings.position_embeddings" in tensors:
        tensors["embeddings.position_embeddings"] = with_register_rows(
            tensors["embeddings.position_embeddings"], tensors["embeddings.register_tokens"]
        )
    distilled = "distillation_classifier.weight" in tensors
    if "embeddings.distillation_token" in tensors and not distilled:  # a token without a head of its own is a register
        tensors["embeddings.register_tokens"] = tensors.pop("embeddings.distillation_token")
    swiglu = any("mlp.weights_in." in name or "mlp.gate_proj." in name for name in tensors)
    fields = own_fields(config, kind, swiglu, "pooler.dense.weight" in tensors)
    how, more = preprocessing_fields(contents.preprocessor, kind)
    result = found(
        contents,
        tensors,
        SWIGLU if swiglu else TABLES[kind],
        layout="hf",
        family="deit" if distilled else "vit",
        known=agreed(fields, known) if config else known,
        policy="timm" if kind == "dinov2_with_registers" else "deit",  # there it is antialiased
        preprocessing=lambda config: Preprocessing(image_size=config["image_size"], **how),
        ignore=r"embeddings\.mask_token|decoder\..*",
        labels=labels_of(config),
        variant={"model_type": kind},
        warnings=[*warnings, *more],
        fixed=FIXED if config else ("pool", "trained_size"),
        usual=fields,
        assumed_preprocessing=contents.preprocessor is None,
    )
    size, made, late = result.description.config["image_size"], crop_size(contents.preprocessor or {}), list[str]()
    if made is not None and made != size:
        late.append(f"{PREPROCESSOR} makes pictures of {made[0]}×{made[1]}, not {size[0]}×{size[1]}: taken as these")
    return replace(result, ignored=(*result.ignored, *left), warnings=(*result.warnings, *late))


def kind_of(tensors: Mapping[str, Tensor]) -> str:
    if "embeddings.register_tokens" in tensors:
        return "dinov2_with_registers"
    if any("layer_scale1" in name for name in tensors):
        return "dinov2"
    return "deit" if "embeddings.distillation_token" in tensors else "vit"


def default_eps(kind: str) -> float:
    return 1e-6 if kind.startswith("dinov2") else 1e-12


def own_fields(config: Mapping[str, Any], kind: str, swiglu: bool, pooled: bool) -> dict[str, Any]:
    """What its config.json says and shapes do not."""
    fields: dict[str, Any] = {"norm_eps": value(config, "layer_norm_eps", float, default_eps(kind))}
    if config:
        fields["heads"] = value(config, "num_attention_heads", int, DEFAULT_HEADS)
    if "image_size" in config:
        size = config["image_size"]
        fields["image_size"] = tuple(size) if isinstance(size, list) else size
    if value(config, "pooler_act", str, "tanh") != "tanh" and pooled:
        raise CheckpointError(f"pooler_act is {config['pooler_act']!r}; expected tanh")
    activation = value(config, "hidden_act", str, "gelu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    if not swiglu:
        fields["activation"] = ACTIVATIONS[activation]
    return fields


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Its class names in order; LABEL_0, LABEL_1, … are none."""
    names = value(config, "id2label", dict, {})
    try:
        ordered = [names[key] for key in sorted(names, key=int)]
    except ValueError:
        raise CheckpointError(f"id2label of {CONFIG} has keys that are no numbers; expected class numbers") from None
    if not ordered or any(not isinstance(name, str) for name in ordered) or ordered[0] == "LABEL_0":
        return None
    return tuple(ordered)


def crop_size(processor: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of what its processor makes."""
    cropped = value(processor, "do_center_crop", bool, "crop_size" in processor and "do_center_crop" not in processor)
    return sides(processor.get("crop_size" if cropped else "size"))


def sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return (size, size)
    if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return (size["height"], size["width"])
    if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
        return (size["shortest_edge"], size["shortest_edge"])
    return None


def preprocessing_fields(processor: Mapping[str, Any] | None, kind: str) -> tuple[dict[str, Any], list[str]]:
    """What its processor does to pictures of any size, and what there is to say of it."""
    if processor is None:
        known: dict[str, Any] = {"crop": 1.0, "middle": "floored", "fit": "squash", "interpolation": "bilinear", **HALF}
        if kind != "vit":
            known |= {"crop": 0.875, "interpolation": "bicubic", **IMAGENET}
        if kind.startswith("dinov2"):
            known["fit"] = "short_side"
        return known, []
    size = processor.get("size")
    warnings, resized, cropped = list[str](), sides(size), crop_size(processor)
    fields: dict[str, Any] = {
        "crop": share(cropped[0], resized[0]) if cropped and resized else 1.0,
        "fit": "short_side" if isinstance(size, dict) and "shortest_edge" in size else "squash",
        "middle": "floored",
        "interpolation": RESAMPLING.get(value(processor, "resample", int, 3 if kind != "vit" else 2), "bicubic"),
    }
    for name, default in HALF.items():
        given = processor.get(f"image_{name}", list(default))
        fields[name] = tuple(given) if isinstance(given, list) else (given,) * 3
    if value(processor, "do_normalize", bool, True) is False:
        fields |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    odd = {
        "do_resize": (True,),
        "do_rescale": (True,),
        "resample": (2, 3),
        "rescale_factor": (1 / 255,),
        "crop_pct": (None,),
    }
    for name, usual in odd.items():
        if processor.get(name, usual[0]) not in usual:
            warnings.append(f"{PREPROCESSOR} says {name} {processor[name]!r}, which ours cannot: taken as {usual[0]}")
    return fields, warnings


def share(kept: int, of: int) -> float:
    """kept/of, rounded so that kept/share is not a hair below the whole number it was."""
    ratio = kept / max(of, 1)
    return ratio if floor(kept / ratio) == of else ratio * (1 - 1e-12)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """A folder for AutoModelForImageClassification (without a head AutoModel) and pipeline("image-classification")."""
    config, kind = description.config, kind_for(description)
    holds(f"transformers' {kind}", config, ONLY)
    registers = config.get("registers", 0)
    table, renamed = TABLES[kind], with_prefix_rows(tensors, config, 1 + (registers or config.get("distilled", False)))
    if kind.startswith("dinov2"):
        renamed = without_register_rows("transformers", renamed, config)
        table = SWIGLU if config.get("activation") == "swiglu" else table
    elif registers:
        table = tuple(entry("embeddings.distillation_token", "reg_token") if r.ours == "reg_token" else r for r in VIT)
    prefix = f"{kind}." if config["classes"] else ""
    table = tuple(prefixed(row, prefix) for row in table)
    card = hub_config(description, kind)
    make_folder(path)
    write_table("hf", renamed, table, config["heads"], path / WEIGHTS[0])
    texts = {CONFIG: card}
    if description.preprocessing is not None:
        texts[PREPROCESSOR] = processor_of(description.preprocessing)
    else:
        (path / PREPROCESSOR).unlink(missing_ok=True)  # it would be of another model
    for name, data in texts.items():
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        write_whole(path / name, lambda place, text=text: place.write_text(text, "utf-8"))
    return {}


def kind_for(description: Description) -> str:
    """Which of its models computes the same."""
    config = description.config
    if description.family == "hybrid":
        raise CheckpointError("a hybrid has no place in transformers' ViT; expected the vit or deit family")
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
    holds(f"transformers' {kind}", {**config, "has a head": config["classes"] > 0}, allowed)
    return kind


def prefixed(row: Entry, prefix: str) -> Entry:
    own = row.ours.startswith("head")
    return row if own else entry([prefix + name for name in row.theirs], row.ours, row.form)


def hub_config(description: Description, kind: str) -> dict[str, Any]:
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
        expected = swiglu_width(width) if config.get("activation") == "swiglu" else 4 * width
        holds("transformers' dinov2", {"mlp_width": hidden}, {"mlp_width": (expected,)})
        data |= {"mlp_ratio": 4, "use_swiglu_ffn": config.get("activation") == "swiglu", "use_mask_token": False}
        data |= {"num_register_tokens": config["registers"]} if config.get("registers") else {}
    else:
        data |= {"intermediate_size": hidden, "encoder_stride": patch[0]}
    if config["classes"]:
        labels = description.labels or [f"LABEL_{n}" for n in range(config["classes"])]
        data |= {"id2label": {str(n): label for n, label in enumerate(labels)}}
        data |= {"label2id": {label: n for n, label in reversed(list(enumerate(labels)))}}
    return data


def swiglu_width(width: int) -> int:
    """How wide transformers makes the MLP of a DINOv2 with SwiGLU: two thirds of 4·width, in eights."""
    return (int(4 * width * 2 / 3) + 7) // 8 * 8


def processor_of(how: Preprocessing) -> dict[str, Any]:
    height, width = pair(how.image_size)
    tall, wide = floor(height / how.crop), floor(width / how.crop)
    squash = how.fit == "squash" or height != width
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": tall, "width": wide} if squash else {"shortest_edge": tall},
        "resample": 2 if how.interpolation == "bilinear" else 3,
        "do_center_crop": (tall, wide) != (height, width) or not squash,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": how.mean,
        "image_std": how.std,
    }


LAYOUT = Layout(name="hf", matches=matches, read=read, write=write)
