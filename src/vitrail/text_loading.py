"""Open a model that translates: its weights, its tokenizer and its languages."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint.model_location import locate_or_download_checkpoint
from vitrail.checkpoint.run_files import FinishedRun, find_finished_run
from vitrail.checkpoint.weight_folders import CONFIG_FILE, find_bundled_model, read_json_if_exists, read_tokenizer_file
from vitrail.opening import (
    TIMM_PREFIX,
    download_if_missing,
    move_to_device_for_eval,
    read_model_description,
    refuse_config_fields,
    refuse_load_arguments_as_fields,
)

if TYPE_CHECKING:
    import torch

    from vitrail.checkpoint.reading import Checkpoint
    from vitrail.data.text.tokenizer import TextTokenizer
    from vitrail.models.base.text_contract import TextModel


@dataclass(frozen=True, kw_only=True)
class LoadedTextModel:
    """A text model in eval mode with its tokenizer, from `open_text_model`."""

    source: str  # the name that it was opened by
    model: "TextModel"
    tokenizer: "TextTokenizer"
    languages: tuple[str, str] | None = None  # source, target
    run: FinishedRun | None = None
    checkpoint: "Checkpoint | None" = None  # its description and load report

    def __repr__(self) -> str:
        weights = f"{sum(each.numel() for each in self.model.parameters()):,} parameters"
        pair = f", {'-'.join(self.languages)}" if self.languages else ""
        kind = type(self.model).__name__
        return f"LoadedTextModel({self.source!r}, {kind}, {weights}, {self.tokenizer.vocabulary:,} tokens{pair})"


def open_text_model(
    model: "str | Path | LoadedTextModel",
    *,
    fields: Mapping[str, Any] | None = None,
    device: "str | torch.device | None" = None,
) -> LoadedTextModel:
    """Open a run of translation, or the folder of its model: weights, config.json and tokenizer.json.

    `fields` are config fields to change, such as dropout.
    """
    if isinstance(model, LoadedTextModel):
        refuse_config_fields(fields, model.source, "already loaded")
        move_to_device_for_eval(model.model, device)
        return model
    if not isinstance(model, str | Path) or not str(model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(f"the model is {repr(model)[:60]}; expected a run of translation, or the folder of one")
    name = str(model)
    if name.startswith(TIMM_PREFIX):
        raise wrong_input_error(name)
    download_if_missing(name)
    import torch

    from vitrail.checkpoint.family_recognition import get_family
    from vitrail.checkpoint.reading import read, warn_about_report
    from vitrail.data.text.tokenizer import TextTokenizer

    refuse_load_arguments_as_fields(fields or {})
    run = find_finished_run(Path(name))
    place = name if run is None else run.model
    family = get_family(read_model_description(str(place)), name)
    check_reads_text(family.build, name)
    with torch.inference_mode(False):  # weights that are read in inference mode never have gradients
        found = read(place, **(fields or {}))
    warn_about_report(found, name)
    about = found.description
    text, path = read_tokenizer_file(locate_or_download_checkpoint(place), about.tokenizer)
    tokenizer = TextTokenizer.from_json(text, str(path))
    check_vocabulary_matches(found.model.config, tokenizer, name)
    return LoadedTextModel(
        source=name,
        model=move_to_device_for_eval(found.model, device or "cpu"),
        tokenizer=tokenizer,
        languages=about.languages,
        run=run,
        checkpoint=found,
    )


def check_reads_text(kind: type, name: str) -> None:
    """Refuse a model that does not translate."""
    from vitrail.models.base.text_contract import TextModel

    if not issubclass(kind, TextModel):
        raise wrong_input_error(f"{name} is a {kind.__name__}, which")


def wrong_input_error(what: str) -> ConfigError:
    return ConfigError(f"{what} reads images; expected a model that reads text: a run of translation")


def check_vocabulary_matches(config: Any, tokenizer: "TextTokenizer", name: str) -> None:
    if (config.vocabulary, config.pad) != (tokenizer.vocabulary, tokenizer.pad):
        raise CheckpointError(
            f"{name} has {config.vocabulary} tokens and padding {config.pad}, but its tokenizer {tokenizer.vocabulary} "
            f"and {tokenizer.pad}; expected the tokenizer that the model was trained with"
        )


def is_text_model(name: str) -> bool:
    """Whether a run, a model folder or a bundled model is a text model, by its config.json; nothing else is read."""
    place = find_bundled_model(name) or Path(name)
    if not os.path.exists(place):  # noqa: PTH110  # Path refuses a long name
        return False
    run = find_finished_run(place)
    folder = run.model if run is not None else place if place.is_dir() else place.parent
    about = read_json_if_exists(folder / CONFIG_FILE) or {}
    family = about.get("family")
    from vitrail.models.base.text_contract import TextModel
    from vitrail.models.catalog import families

    if about.get("code") is not None:  # of a family from outside the package
        return about.get("tokenizer") is not None
    return family in families.FAMILIES and issubclass(families.load_family(family).build, TextModel)
