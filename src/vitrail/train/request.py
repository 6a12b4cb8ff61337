"""From what was asked for to what is trained: data, model, preprocessing put together, the same again on resuming."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.checkpoint.reading import Checkpoint, get_family
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.data.array_dataset import ArrayDataset
from vitrail.data.datasets import DatasetSplits, open_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, ConfigError
from vitrail.loading import TIMM_PREFIX, describe_model, open_module
from vitrail.models.catalog import UntrustedCodeError, find_preset, is_external_name, resolve_external_name
from vitrail.models.checks import pair
from vitrail.models.family import Family
from vitrail.train.recipe import Recipe
from vitrail.train.teacher import check_teacher_is_trusted


@dataclass(frozen=True, kw_only=True)
class Request:
    """All that a run depends on, and so all that run.json must say."""

    data: str
    recipe: Recipe
    init: str | None = None  # a checkpoint of any layout to start from
    teacher: str | None = None  # a model that the student learns from, by what `open_model` takes
    teacher_cache: str | None = None  # a folder that keeps its answers
    teacher_fields: dict[str, Any] | None = None  # of its config, that its file does not specify
    val_share: float = 0.2  # of a folder without a validation part
    real: str | None = None  # ReaL labels of ImageNet
    cache: float = 1.0  # gigabytes; a JPEG that is held is decoded whole, which gives slightly other crops
    trusted: str | None = field(
        default=None, compare=False
    )  # the outside model named by the user; never read from a file

    def __post_init__(self) -> None:
        for each in fields(self):
            value, number = getattr(self, each.name), each.name in ("val_share", "cache")
            if number and not (type(value) in (int, float) and isfinite(value)):
                raise ConfigError(f"{each.name} is {value!r}; expected a number")
            if each.name == "teacher_fields":
                if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
                    raise ConfigError(f"{each.name} is {value!r}; expected names and values")
            elif not number and each.name != "recipe" and not isinstance(value, str | None):
                raise ConfigError(f"{each.name} is {value!r}; expected text")

    def open_data(self) -> DatasetSplits:
        real = Path(self.real) if self.real else None
        return open_data(self.data, seed=self.recipe.loop.seed, val_share=self.val_share, real=real)

    def to_json(self) -> dict[str, Any]:
        recorded = asdict(replace(self, recipe=Recipe()))
        del recorded["trusted"]
        return {**recorded, "recipe": self.recipe.to_flat_dict()}

    @classmethod
    def from_json(cls, data: Any, where: str) -> "Request":
        """From an untrusted file: code that it names is not imported, see `with_trusted`."""
        try:
            given: dict[str, Any] = {**data, "trusted": None}  # a file cannot declare itself trusted
            flat = dict(given.pop("recipe"))
            recipe = Recipe(name=str(flat.pop("name"))).with_settings(flat)
            return cls(recipe=recipe, **given)
        except KeyError as error:
            raise CheckpointError(f"{where}: run.json lacks {error}; expected what `vitrail train` wrote") from None
        except (TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(f"{where}: {error}; expected run.json as `vitrail train` wrote it") from None

    @property
    def trusted_code(self) -> list[str]:
        """The code that the user named, to be passed again when the run is resumed."""
        teacher = self.teacher if self.teacher is not None and self.teacher.startswith(TIMM_PREFIX) else None
        return [name for name in (self.trusted, teacher) if name is not None]

    def with_trusted_code(self, code: Sequence[str], where: str) -> "Request":
        """The request with the outside model that the user names in `code` instead of the one in the file."""
        model, left = match_trusted_model(self.recipe.model, code, where)
        if self.teacher is not None:
            left = check_teacher_is_trusted(self.teacher, left, where)
        if left:
            raise ConfigError(f"--trust-code {left[0]} is not named in {where}; remove the option")
        outside = model if is_external_name(model) else None
        return replace(self, recipe=replace(self.recipe, model=model), trusted=outside)


@dataclass(frozen=True)
class ModelAndData:
    """What a request comes to."""

    model: Any
    family: Family
    data: DatasetSplits
    preprocessing: Preprocessing
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])
    resampling: ResamplingPolicy = "timm"

    def with_data(self, data: DatasetSplits) -> "ModelAndData":
        return replace(self, data=data)


def open_model_and_data(request: Request) -> ModelAndData:
    """Opens the data, and makes the model for its classes, from the seed or from a checkpoint."""
    recipe, found = request.recipe, request.open_data()
    torch.manual_seed(recipe.loop.seed)
    return (
        load_model_for_data(request, found) if request.init else create_model_for_data(recipe, found, request.trusted)
    )


def match_trusted_model(recorded: str | None, code: Sequence[str], where: str) -> tuple[str | None, list[str]]:
    """The model to use for the one that a file names, and the entries of `code` that are for something else.

    An outside model is imported from the path given by the user, not the file; both must name the same preset.
    """
    if not is_external_name(recorded):
        return recorded, list(code)
    models = [name for name in code if not name.startswith(TIMM_PREFIX)]
    if not models:
        raise UntrustedCodeError(str(recorded), where)
    preset = str(recorded).rpartition(":")[2]
    if len(models) > 1 or models[0].rpartition(":")[2] != preset:
        raise ConfigError(
            f"--trust-code {' --trust-code '.join(models)} was given, but {where} names the model {recorded!r}; "
            f"expected one that ends in :{preset}"
        )
    return resolve_external_name(models[0]), [name for name in code if name not in models]


def create_model_for_data(recipe: Recipe, data: DatasetSplits, trusted: str | None = None) -> ModelAndData:
    """A new model at its starting weights; grey pictures get a model of one channel."""
    if recipe.model is None:
        raise ConfigError(
            "no model is named; expected --model, such as ViT-Ti/16, a --recipe that names one, or --init"
        )
    family, preset = find_preset(recipe.model, trusted=trusted)
    images = data.train.images if isinstance(data.train, ArrayDataset) else None
    channels = preset.channels if images is None else images.shape[3]
    channels = len(recipe.preprocessing.get("mean", (0,) * channels))  # a recipe's for colours makes grey pictures so
    config = family.configure(preset, **{"channels": channels, "classes": len(data.classes), **recipe.fields})
    if config.classes != len(data.classes):
        raise ConfigError(f"classes is {config.classes}; expected {len(data.classes)}, as many as {data.name} has")
    size = pair(config.image_size)
    whole = images is not None and images.shape[1:3] == size
    grey = (0.5,) * config.channels
    how = Preprocessing(image_size=size, crop=1.0 if whole else 0.9, mean=grey, std=grey)
    return ModelAndData(family.build(config), family, data, how.with_fields(recipe.preprocessing))


def load_model_for_data(request: Request, data: DatasetSplits) -> ModelAndData:
    """The checkpoint's model; its head is kept if it was made for the same classes, else a new one starts at zero."""
    recipe, fields = request.recipe, dict(request.recipe.fields)
    if "classes" in fields or describe_model(str(request.init), fields).labels != data.classes:
        fields["classes"] = len(data.classes)
    found = open_module(str(request.init), fields=fields, preprocessing=recipe.preprocessing)
    assert found.checkpoint is not None
    init, description = str(found.source if found.run is None else found.run.model), found.checkpoint.description
    if recipe.model is not None:
        family, preset = find_preset(recipe.model, trusted=request.trusted)
        check_preset_matches_checkpoint(family, preset, found.checkpoint, init)
    model = copy_weights_into_memory(found.module)
    how = replace(found.preprocessing, image_size=pair(model.config.image_size)).with_fields(recipe.preprocessing)
    family = get_family(description.family, init)
    return ModelAndData(model, family, data, how, {"started from": init}, description.resampling)


def check_preset_matches_checkpoint(family: Family, preset: Any, found: Checkpoint, init: str) -> None:
    ours = found.model.config
    for name in ("width", "depth", "heads", "patch_size", "stages", "block", "widths"):
        asked = getattr(preset, name, None)
        if family.name != found.description.family or asked != getattr(ours, name, None):
            raise ConfigError(
                f"--model is another than the one in {init}, a {found.description.family} of {name} "
                f"{getattr(ours, name, None)}; expected no --model beside --init"
            )


def copy_weights_into_memory(model: nn.Module) -> Any:
    """The model with weights in memory of its own: loaded ones may be pages of their file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.float().clone() if tensor.is_floating_point() else tensor.data.clone()
    return model
