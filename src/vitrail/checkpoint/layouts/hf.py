"""transformers: folders of ViT, DeiT and DINOv2, with the names on disk and those in memory since v5."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.base.files import make_folder, write_json
from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import (
    FamilySource,
    choose_source,
    list_sources,
    load_source,
    recognize_source,
    wrong_layout_error,
)
from vitrail.checkpoint.name_table import add_name_prefix
from vitrail.checkpoint.weight_files import RawContents
from vitrail.checkpoint.weight_folders import CONFIG_FILE, PREPROCESSOR_FILE, WEIGHT_FILES
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checkpoint_side import SourceNames
from vitrail.models.base.checks import pair
from vitrail.models.catalog.families import SourceEntry

NAME = "hf"
# `details` of a source: `model_type`, whose name is a prefix of most tensors; `norm_eps`, `preprocessing`, `policy` and
# `imagenet_mean`, for what a folder does not specify; `dinov2`, for a model without a head and positions of registers;
# `argument_fields`, our fields by entries of config.json; `fields`, those of all its models; `hidden_act`, the default;
# `ignored`, a pattern of tensors that are not used; `prefix` of the names, if it is not the model type; `other_types`,
# whose files have these tensors, too; `before_reading` and `before_writing`, functions of all tensors, for those that
# are stacked in one; `enlarging_processors`, the beginning of the names of processors that resize to 256/224 of their
# size; `outside`, parts of names without the model's prefix; `any_size`, whether the processor tells the size of the
# images; `own_activation`, whether `hidden_act` is not a choice; `bgr_kernel`, their and our name of the first filters
# if their images have blue first; `processor`, the name of one that does not normalize
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_python": "gelu"}
DECODER_SUFFIX = "_mae"  # of the type of a model with a decoder, after the type of its encoder: vit_mae
LEAST_SQUASHED = 384  # pixels; larger images are not cropped by `crop_pct` of a processor
DEFAULT_HEADS = 12  # if config.json does not specify them
PILLOW_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
DEFAULT_PREPROCESSING = {"crop": 1.0, "middle": "floored", "fit": "squash", "interpolation": "bilinear"}


def list_model_types() -> list[str]:
    """Model types of transformers that can be read."""
    return list(dict.fromkeys(source.details["model_type"] for _, source in list_sources(NAME)))


def list_types(source: SourceEntry) -> tuple[str, ...]:
    """The model types that a name table is for."""
    return (source.details["model_type"], *source.details.get("other_types", ()))


def strip_model_prefix(contents: RawContents) -> dict[str, Tensor]:
    """Remove the name of the model, which is a prefix of all names but those of the heads."""
    tensors = layout.strip_common_prefixes(contents.tensors, "module.")
    kinds = [f"{source.details.get('prefix', source.details['model_type'])}." for _, source in list_sources(NAME)]
    prefix = next((kind for kind in kinds if any(name.startswith(kind) for name in tensors)), "")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def matches(contents: RawContents) -> bool:
    return recognize_source(NAME, strip_model_prefix(contents)) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors, config, warnings = strip_model_prefix(contents), contents.config or {}, list[str]()
    family, source = find_model_type(contents, tensors)
    config = layout.get_typed_field(config, "vision_config", dict, dict(config))
    tensors = source.details.get("before_reading", dict)(tensors)
    dino = "dinov2" in source.details
    ignored = [name for name in tensors if dino and name.startswith("classifier.")]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if ignored:
        warnings.append("the head of a DINOv2 takes two vectors per image, ours takes one: the head is ignored")
    if "embeddings.register_tokens" in tensors and "embeddings.position_embeddings" in tensors:
        tensors["embeddings.position_embeddings"] = layout.insert_zero_register_positions(
            tensors["embeddings.position_embeddings"], tensors["embeddings.register_tokens"]
        )
    kernel, _ = source.details.get("bgr_kernel", ("", ""))
    if (
        kernel in tensors
        and tensors[kernel].ndim == 4
        and (contents.preprocessor or {}).get("do_flip_channel_order", True)
    ):
        tensors[kernel] = tensors[kernel].flip(1)  # our images have red first
    swiglu = any("mlp.weights_in." in name or "mlp.gate_proj." in name for name in tensors)
    fields = source.details.get("fields", {}) | fields_from_config(
        config, source, swiglu, "pooler.dense.weight" in tensors
    )
    made = read_processor_output_size(contents.preprocessor or {})
    if made is not None and "any_size" in source.details:
        fields["image_size"] = made
    processor_fields, processor_warnings = fields_from_processor(contents.preprocessor, source)
    model = layout.ModelBeforeRenaming(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known=layout.merge_agreeing_fields(fields, known) if config else known,
        policy=source.details.get("policy", "deit"),
        preprocessing=lambda config: Preprocessing(image_size=config["image_size"], **processor_fields),
        ignore="|".join(filter(None, (r"embeddings\.mask_token|decoder\..*", source.details.get("ignored")))),
        labels=labels_from_config(config),
        variant={"model_type": source.details["model_type"]},
        warnings=[*warnings, *processor_warnings],
        fixed_fields=layout.OWNER_FIXED_FIELDS if config else ("pool", "trained_size"),
        default_fields=fields,
        assumed_preprocessing=contents.preprocessor is None,
    )
    with name_wrong_model_type(contents, source):
        translated = layout.translate_checkpoint(contents, model)
    rows, columns = translated.description.config["image_size"]
    cropped, size_warnings = read_processor_output_size(contents.preprocessor or {}), list[str]()
    if cropped not in (None, (rows, columns)):
        size_warnings.append(f"{PREPROCESSOR_FILE} makes images of {cropped[0]}×{cropped[1]}: {rows}×{columns} is used")
    return replace(translated, ignored=(*translated.ignored, *ignored), warnings=(*translated.warnings, *size_warnings))


def find_model_type(contents: RawContents, tensors: Mapping[str, Tensor]) -> FamilySource:
    """The family and its names for the model_type in config.json, or for the names of the tensors."""
    found = recognize_source(NAME, tensors)
    kind = layout.get_typed_field(contents.config or {}, "model_type", str, "")
    kind = kind.removesuffix(DECODER_SUFFIX)
    if found is None and not kind:
        raise wrong_layout_error(NAME, tensors, contents.path)
    if found is not None and kind in ("", *list_types(found[1])):
        return load_source(found)
    same = [each for each in list_sources(NAME) if each[1].markers and kind in list_types(each[1])]
    if not same:
        raise CheckpointError(
            f"{contents.path} has model_type {kind!r} of transformers; expected one of {', '.join(list_model_types())}"
        )
    return load_source(same[0])


@contextmanager
def name_wrong_model_type(contents: RawContents, source: SourceNames) -> Generator[None]:
    """If tensors do not fit because config.json is that of another model, say so."""
    try:
        yield
    except CheckpointError:
        found, kind = recognize_source(NAME, strip_model_prefix(contents)), source.details["model_type"]
        if found is None or kind in list_types(found[1]):
            raise
        raise CheckpointError(
            f"{contents.path} has the tensors of a {found[1].details['model_type']}, but model_type {kind!r} in its "
            f"{CONFIG_FILE}; expected the {CONFIG_FILE} of these weights"
        ) from None


def fields_from_config(config: Mapping[str, Any], source: SourceNames, swiglu: bool, pooled: bool) -> dict[str, Any]:
    """Fields of config.json that the shapes do not tell."""
    fields = layout.fields_from_arguments(config, source)
    fields["norm_eps"] = layout.get_typed_field(config, "layer_norm_eps", float, source.details["norm_eps"])
    if config and "heads" not in fields:
        fields["heads"] = layout.get_typed_field(config, "num_attention_heads", int, DEFAULT_HEADS)
    if "image_size" in config:
        size = config["image_size"]
        fields["image_size"] = tuple(size) if isinstance(size, list) else size
    if layout.get_typed_field(config, "pooler_act", str, "tanh") != "tanh" and pooled:
        raise CheckpointError(f"pooler_act is {config['pooler_act']!r}; expected tanh")
    if "own_activation" in source.details:
        return fields
    activation = layout.get_typed_field(config, "hidden_act", str, source.details.get("hidden_act", "gelu"))
    if activation not in (*ACTIVATIONS, *(["silu"] if swiglu else [])):
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


def fields_from_processor(processor: Mapping[str, Any] | None, source: SourceNames) -> tuple[dict[str, Any], list[str]]:
    """Preprocessing fields other than the image size, and warnings about what we cannot reproduce."""
    defaults = {**DEFAULT_PREPROCESSING, **source.details.get("preprocessing", {})}
    if processor is None:
        return {**layout.get_mean_std(imagenet="imagenet_mean" in source.details), **defaults}, []
    size = processor.get("size")
    warnings, resized, cropped = list[str](), parse_processor_size(size), read_processor_output_size(processor)
    kind = str(processor.get("image_processor_type", processor.get("feature_extractor_type", "")))
    short = "shortest_edge" in size if isinstance(size, dict) else defaults["fit"] == "short_side"
    if kind.startswith(source.details.get("enlarging_processors", "\0")) and resized is not None:
        resized = (int(256 / 224 * resized[0]), int(256 / 224 * resized[1]))
    fields: dict[str, Any] = {
        "crop": compute_crop_fraction(cropped[0], resized[0]) if cropped and resized else 1.0,
        "fit": "short_side" if short else "squash",
        "middle": "floored",
        "interpolation": PILLOW_RESAMPLING.get(
            layout.get_typed_field(processor, "resample", int, 2 if defaults["interpolation"] == "bilinear" else 3),
            "bicubic",
        ),
    }
    share = layout.get_typed_field(processor, "crop_pct", float, 0.0)  # of ConvNeXt
    if share and resized:
        small = resized[0] < LEAST_SQUASHED
        fields |= {"crop": share, "fit": "short_side"} if small else {"crop": 1.0, "fit": "squash"}
    for name, default in layout.HALF_MEAN_STD.items():
        given = processor.get(f"image_{name}", list(defaults.get(name, default)))
        fields[name] = tuple(given) if isinstance(given, list) else (given,) * 3
    if layout.get_typed_field(processor, "do_normalize", bool, True) is False:
        fields |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    supported = {"do_resize": (True,), "do_rescale": (True,), "resample": (2, 3), "rescale_factor": (1 / 255,)}
    for name, values in supported.items():
        if processor.get(name, values[0]) not in values:
            warnings.append(f"{PREPROCESSOR_FILE} has {name}={processor[name]!r}, not supported: {values[0]} is used")
    return fields, warnings


def compute_crop_fraction(cropped: int, resized: int) -> float:
    """cropped/resized, rounded so that cropped/fraction is not slightly less than the integer it came from."""
    if cropped < 1:
        raise CheckpointError(f"crop_size of {PREPROCESSOR_FILE} is {cropped}; expected 1 or more")
    ratio = cropped / max(resized, 1)
    return ratio if floor(cropped / ratio) == resized else ratio * (1 - 1e-12)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write a folder for AutoModelForImageClassification, or for AutoModel if the model has no head."""
    config, (_, source) = description.config, choose_source(NAME, description)
    kind, registers = source.details["model_type"], config.get("registers", 0)
    facts = {**config, "has a head": config["classes"] > 0}
    layout.check_representable(f"transformers' {kind}", facts, source.supported)
    renamed = layout.add_zero_prefix_positions(tensors, config, 1 + (registers or config.get("distilled", False)))
    _, kernel = source.details.get("bgr_kernel", ("", ""))
    if kernel in renamed:
        renamed = {**renamed, kernel: renamed[kernel].flip(1)}
    renamed = source.details.get("before_writing", dict)(renamed)
    if "dinov2" in source.details:
        renamed = layout.remove_zero_register_positions("transformers", renamed, config)
    prefix = f"{kind}." if config["classes"] else ""
    outside = ("classifier", *source.details.get("outside", ()))  # heads
    table = add_name_prefix(source.table, prefix, unless_containing=outside)
    card = make_hf_config(description, source)
    make_folder(path)
    layout.rename_and_write_tensors(NAME, renamed, table, config.get("heads", 1), path / WEIGHT_FILES[0])
    texts = {CONFIG_FILE: card}
    if description.preprocessing is not None:
        texts[PREPROCESSOR_FILE] = make_processor_config(description.preprocessing, source)
    else:
        (path / PREPROCESSOR_FILE).unlink(missing_ok=True)  # left by another model
    for name, data in texts.items():
        write_json(path / name, data)
    return source.assumed


def make_hf_config(description: Description, source: SourceNames) -> dict[str, Any]:
    config = description.config
    if source.card is None:
        raise CheckpointError(
            f"transformers has no config of the family {description.family!r}; expected another layout"
        )
    data = source.card(config)
    if config["classes"]:
        labels = description.labels or [f"LABEL_{n}" for n in range(config["classes"])]
        data |= {"id2label": {str(n): label for n, label in enumerate(labels)}}
        data |= {"label2id": {label: n for n, label in reversed(list(enumerate(labels)))}}
    return data


def make_processor_config(preprocessing: Preprocessing, source: SourceNames) -> dict[str, Any]:
    height, width = pair(preprocessing.image_size)
    resized = floor(height / preprocessing.crop), floor(width / preprocessing.crop)
    squash = preprocessing.fit == "squash" or height != width
    kind, means = source.details.get("processor", ""), (set(preprocessing.mean), set(preprocessing.std))
    if kind and means != ({0.0}, {1.0}):
        raise CheckpointError(
            f"mean is {preprocessing.mean}, which {kind} cannot represent; expected 0, and a std of 1"
        )
    return {
        "image_processor_type": kind or "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": resized[0], "width": resized[1]} if squash else {"shortest_edge": resized[0]},
        "resample": 2 if preprocessing.interpolation == "bilinear" else 3,
        "do_center_crop": resized != (height, width) or not squash,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": not kind,
        "image_mean": preprocessing.mean,
        "image_std": preprocessing.std,
        **({"do_flip_channel_order": True} if "bgr_kernel" in source.details else {}),
    }


LAYOUTS = (layout.Layout(name=NAME, matches=matches, read=read, write=write),)
