"""Write a model as a checkpoint of any layout that can represent it, or a captioner. Files are written atomically."""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.base.errors import CheckpointError
from vitrail.base.files import write_text
from vitrail.checkpoint.description import FORMAT_VERSION, Description
from vitrail.checkpoint.family_recognition import choose_source, has_layout
from vitrail.checkpoint.layout import OWN_LAYOUT, Layout, get_layout, list_layouts
from vitrail.checkpoint.reading import check_tensors_fit_model, read_translated_checkpoint
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.checkpoint.weight_folders import (
    CONFIG_FILE,
    DECODER_FOLDER,
    ENCODER_FOLDER,
    compute_tokenizer_checksum,
    write_tokenizer_file,
)
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import Model, unwrap_compiled
from vitrail.models.base.family import Family
from vitrail.models.catalog.external_families import describe_code, is_external_family
from vitrail.models.catalog.families import find_config_family, load_family
from vitrail.models.text.caption_model import CaptionModel

GELU_NAMES = ("gelu", "gelu_tanh", "quick_gelu")


def write(
    model: nn.Module,
    path: str | Path,
    to: str = "vitrail",
    *,
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    resampling: ResamplingPolicy = "timm",
    family: Family | None = None,
    parts: Mapping[str, Tensor] | None = None,
    languages: Sequence[str] | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write the model with its description, by default in vitrail's own layout.

    `to` is timm, hf, torchvision, google, deit, dino, mae, t2t or akamaster for another library's layout. Warn about
    what the layout cannot represent, and how much the outputs of its readers differ. `family` is needed only for a
    model from outside the package. `parts` are tensors next to the model, such as a decoder, if the layout has them.
    `languages`, source and target, and `tokenizer`, the text of a tokenizer.json, are for models that translate.

    >>> model = vitrail.create("ViT-Ti/16", image_size=32, classes=2, depth=1)
    >>> vitrail.save(model, "my_model", labels=["ants", "bees"], preprocessing=vitrail.Preprocessing(image_size=32))
    >>> vitrail.describe("my_model").labels
    ('ants', 'bees')
    """
    if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(f"the output path is {path!r}; expected a string or a Path")
    layout = get_layout(to)
    model = unwrap_compiled(model)
    family = family or find_model_family(model)
    config: Any = model.config
    if to != OWN_LAYOUT and is_external_family(family):
        raise CheckpointError(
            f"{to} cannot represent the family {family.name!r} from outside the package; expected to={OWN_LAYOUT!r}"
        )
    if to != OWN_LAYOUT and not has_layout(family, to):
        suitable = [OWN_LAYOUT, *(each.name for each in list_layouts() if has_layout(family, each.name))]
        raise CheckpointError(
            f"{to} cannot represent a model of the family {family.name!r}; expected one of {', '.join(suitable)}"
        )
    try:
        description = Description(
            family=family.name,
            kind="text" if family.build.reads == "text" else "image",
            config=asdict(config),
            preprocessing=preprocessing,
            labels=None if labels is None else tuple(labels),
            provenance={"vitrail": __version__, **(provenance or {})},
            resampling=resampling,
            languages=None if languages is None else (languages[0], languages[1]),
            tokenizer=None if tokenizer is None else compute_tokenizer_checksum(tokenizer),
            code=describe_code(family, config),
        )
        text = description.to_json()
        text.encode("utf-8")  # half a surrogate pair is valid JSON but cannot be encoded
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"labels or provenance cannot be written as JSON: {error}; expected strings") from None
    check_label_count(Description.from_json(text, "the description"))
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        check_tensors_fit_model(family.build(config), tensors, "the model")
    if tokenizer is not None:
        write_tokenizer_file(Path(path), tokenizer)  # before config.json, which is written last
    tensors_and_parts = tensors if parts is None else {**tensors, **collect_parts(layout, parts)}
    stored = description if to == OWN_LAYOUT else leave_out_pool_of_headless_model(description, to)
    assumed = layout.write({name: each.cpu() for name, each in tensors_and_parts.items()}, stored, Path(path))
    warn_of_unstored_fields(to, Path(path), description)
    for name, theirs in assumed.items():
        ours = {**family.checkpoint.implied, **asdict(config)}.get(name, theirs)
        if ours != theirs and (name != "activation" or ours in GELU_NAMES):
            difference, deviation = compare_outputs_after_config_change(family, config, {name: theirs}, tensors)
            warnings.warn(
                f"{to} cannot store {name}={ours!r}, and its readers use {theirs!r}: outputs differ by up to "
                f"{difference:.1e} (standard deviation of outputs: {deviation:.1e}) on random images",
                stacklevel=2,
            )


def leave_out_pool_of_headless_model(description: Description, to: str) -> Description:
    """The description with pool='class', for a layout without a mean; its readers return the same tokens."""
    config = description.config
    headless = not config.get("classes") and config.get("class_token") and config.get("pool") == "mean"
    if not headless or "mean" in choose_source(to, description)[1].supported.get("pool", ("mean",)):
        return description
    warnings.warn(
        f"{to} cannot store pool='mean': its readers return the same tokens, but pool the class token; take the mean "
        "of the patch tokens",
        stacklevel=3,
    )
    return replace(description, config={**config, "pool": "class"})


def collect_parts(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts that a layout has next to a model; an error if there are none."""
    if layout.collect_parts is None:
        suitable = ", ".join(each.name for each in list_layouts() if each.collect_parts is not None)
        raise CheckpointError(f"{layout.name} has only the model; expected `to` {suitable} to write `parts`")
    found = layout.collect_parts(tensors)
    if not found:
        raise CheckpointError(
            f"there are no `parts` for {layout.name}; expected the run of a task that has them, or a file with them"
        )
    return found


save = write  # the public name, next to `load`


def warn_of_unstored_fields(to: str, path: Path, description: Description) -> None:
    """Read back what was written, and warn about what the layout cannot store: heads, size, preprocessing, labels."""
    if to == OWN_LAYOUT:
        return
    preprocessing, config = description.preprocessing, description.config
    known = {"heads": config.get("heads"), "trained_size": pair(config["image_size"])}
    known = {name: value for name, value in known.items() if value is not None}
    try:
        back = read_translated_checkpoint(path, to, known).description
    except CheckpointError as error:
        warnings.warn(f"written, but it cannot be read back without more fields: {error}", stacklevel=3)
        return

    def warn_of_loss(name: str, ours: Any, theirs: Any) -> None:
        warnings.warn(f"{to} cannot store {name}={ours!r}, and its readers use {theirs!r}: {path}", stacklevel=4)

    with suppress(CheckpointError):  # a reader that refuses the file is not silently wrong
        without_fields = read_translated_checkpoint(path, to, {})
        for name, assumed_name in (("heads", "heads"), ("image_size", "trained_size")):
            ours, theirs = config.get(name), without_fields.description.config.get(name)
            if name in config and ours != theirs and assumed_name not in without_fields.assumed:
                warn_of_loss(name, ours, theirs)
    if description.labels is not None and back.labels is None:
        warnings.warn(f"{to} cannot store labels: {path} is without its {len(description.labels)} labels", stacklevel=3)
    if preprocessing is None or back.preprocessing is None:
        return
    side = pair(preprocessing.image_size)[0]
    fields_in, fields_out = asdict(preprocessing), asdict(back.preprocessing)
    for name in ("mean", "std", "fit", "interpolation", "crop"):
        ours, theirs = fields_in[name], fields_out[name]
        if ours != theirs and not (name == "crop" and floor(side / ours) == floor(side / theirs)):
            warn_of_loss(name, ours, theirs)


@torch.no_grad()
def compare_outputs_after_config_change(
    family: Family, config: Any, change: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[float, float]:
    """Largest difference of the outputs if a field is changed, and the standard deviation of the outputs."""
    size = (2, config.channels, *config.image_size)
    images = torch.randn(size, generator=torch.Generator().manual_seed(0))
    outputs = list[Tensor]()
    if change.keys() - asdict(config).keys():
        family = load_family(family.checkpoint.general_family)
        names = family.config.__dataclass_fields__
        config = family.configure(**{name: value for name, value in asdict(config).items() if name in names})
    for each in (config, family.configure(config, **change)):
        with torch.device("meta"):
            model = family.build(each)
        model.load_state_dict({name: tensor.float().cpu() for name, tensor in tensors.items()}, assign=True)
        outputs.append(model.eval()(images))
    return (outputs[0] - outputs[1]).abs().max().item(), outputs[0].std().item()


def check_label_count(description: Description) -> None:
    classes = description.config.get("classes")
    if description.labels is not None and len(description.labels) != classes:
        raise CheckpointError(f"{len(description.labels)} labels for {classes} classes; expected one label per class")


def find_model_family(model: nn.Module) -> Family:
    family = find_config_family(model.config) if isinstance(model, Model) else None
    if family is not None:
        return family
    kind = type(model).__name__
    raise CheckpointError(f"{kind} is not a model of the package; pass family=…, the FAMILY of its module")


def write_caption_model(
    model: CaptionModel,
    folder: Path,
    *,
    preprocessing: Preprocessing,
    tokenizer: str,
    provenance: Mapping[str, Any] | None = None,
    resampling: ResamplingPolicy = "timm",
    family: Family | None = None,
) -> None:
    """Write both parts, then config.json; `tokenizer` is a tokenizer.json, `family` that of an encoder from outside."""
    write(
        model.encoder,
        folder / ENCODER_FOLDER,
        preprocessing=preprocessing,
        provenance=provenance,
        resampling=resampling,
        family=family,
    )
    write(model.decoder, folder / DECODER_FOLDER, tokenizer=tokenizer, provenance=provenance)
    write_text(folder / CONFIG_FILE, json.dumps({"format": FORMAT_VERSION, "kind": "caption"}, indent=2) + "\n")
