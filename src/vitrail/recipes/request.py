"""The request for a training run: everything that the run depends on, recorded in run.json for resuming."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.data.images.datasets import DatasetSplits, open_data
from vitrail.data.public.catalog import find_public_dataset
from vitrail.models.catalog.external_families import UntrustedCodeError, is_external_family_name, resolve_external_name
from vitrail.opening import TIMM_PREFIX
from vitrail.recipes.recipe import BUILT_IN_PAIR_NAMES, GENERATED_CAPTIONS, Recipe

if TYPE_CHECKING:
    from vitrail.data.captions.captions import CaptionSplits
    from vitrail.data.text.pairs import PairSplits

TEXT_TASK = "translation"  # whose data are sentence pairs
TEXT_VAL_SHARE = 0.05  # of sentence pairs without a validation part
USUAL_DATA = {TEXT_TASK: ("tatoeba", TEXT_VAL_SHARE), "caption": (GENERATED_CAPTIONS, 0.2)}  # by task: data, val_share
FOLLOW_UPS = ("probe", "finetune")  # what can follow pre-training, with the labels of the data
TIMM_REGISTRY_NAME = re.compile(r"[\w.]+")  # not hf-hub:… or local-dir:…, which load other files


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that a run depends on."""

    data: str
    recipe: Recipe
    init: str | None = None  # a checkpoint of any layout to start from
    teacher: str | None = None  # a model that the student learns from: a name that `open_model` takes
    teacher_cache: str | None = None  # a folder for the teacher's logits
    teacher_fields: dict[str, Any] | None = None  # of the teacher's config, that its file does not specify
    pair: str | None = None  # source and target language of sentence pairs: de-en
    val_share: float = 0.2  # of a folder without a validation part
    real: str | None = None  # ReaL labels of ImageNet
    then: str | None = None  # after pre-training: one of FOLLOW_UPS
    cache: float = 1.0  # gigabytes; a cached JPEG is decoded at full size, which changes its crops slightly
    trusted: str | None = field(default=None, compare=False)  # external model named by the user, never read from a file

    def __post_init__(self) -> None:
        for each in fields(self):
            value, is_number = vars(self)[each.name], each.name in ("val_share", "cache")
            if is_number and not (type(value) in (int, float) and isfinite(value)):
                raise ConfigError(f"`{each.name}` is {value!r}; expected a number")
            if each.name == "teacher_fields":
                if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
                    raise ConfigError(f"{each.name} is {value!r}; expected names and values")
            elif not is_number and each.name != "recipe" and not isinstance(value, str | None):
                raise ConfigError(f"`{each.name}` is {value!r}; expected a string")
        if self.then not in (None, *FOLLOW_UPS):
            raise ConfigError(f"`then` is {self.then!r}; expected one of {', '.join(FOLLOW_UPS)}")

    def open_data(self, *, need_classes: bool = True) -> DatasetSplits:
        real, seed = Path(self.real) if self.real else None, self.recipe.loop.seed
        return open_data(self.data, seed=seed, val_share=self.val_share, real=real, need_classes=need_classes)

    def open_pairs(self) -> "PairSplits":
        from vitrail.data.text.pairs import open_pairs

        return open_pairs(self.data, self.pair, seed=self.recipe.loop.seed, val_share=self.val_share)

    def open_captions(self) -> "CaptionSplits":
        from vitrail.data.captions.captions import open_captions

        return open_captions(self.data, seed=self.recipe.loop.seed, val_share=self.val_share)

    def to_json(self) -> dict[str, Any]:
        recorded = asdict(replace(self, recipe=Recipe()))
        del recorded["trusted"]
        for name in ("then", "pair"):  # only runs of pre-training and of translation have them
            if recorded[name] is None:
                del recorded[name]
        return {**recorded, "recipe": self.recipe.to_json()}

    @classmethod
    def from_json(cls, data: Any, where: str) -> "Request":
        """Read an untrusted file: code that it names is not imported, see `with_trusted_code`."""
        if data is None:
            raise CheckpointError(
                f"{where}: run.json has no request, as in a run of vitrail.fit; resume such a run by the same call"
            )
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
    def task_name(self) -> str:
        """The task of the recipe; by default distillation with a teacher, and classification without one."""
        return self.recipe.task.get("name") or ("classification" if self.teacher is None else "distillation")

    @property
    def trusted_code(self) -> list[str]:
        """The code that the user named, to be passed again when the run is resumed."""
        teacher = self.teacher if self.teacher is not None and self.teacher.startswith(TIMM_PREFIX) else None
        return [name for name in (self.trusted, teacher) if name is not None]

    def with_trusted_code(self, code: Sequence[str], where: str) -> "Request":
        """The request with the external model that the user names in `code` instead of the one in the file."""
        model, left = match_trusted_model(self.recipe.model, code, where)
        if self.teacher is not None:
            left = check_teacher_is_trusted(self.teacher, left, where)
        if left and self.init is None and self.teacher is None:  # which may be models of other code
            raise ConfigError(f"`trust_code` {left[0]} is not named in {where}; remove the option")
        external = model if is_external_family_name(model) else None
        return replace(self, recipe=replace(self.recipe, model=model), trusted=external)


def make_request(
    recipe: Recipe,
    *,
    data: str | None = None,
    pair: str | None = None,
    init: str | None = None,
    teacher: str | None = None,
    teacher_cache: Path | None = None,
    teacher_fields: dict[str, Any] | None = None,
    val_share: float | None = None,
    real: Path | None = None,
    cache: float | None = None,
    then: str | None = None,
    trusted_code: Sequence[str] = (),
) -> Request:
    """The request of a user, who names the code that may be imported, and a teacher from timm; None is the default."""
    if cache is not None and cache < 0:
        raise ConfigError(f"`cache` {cache}; expected gigabytes, or 0 to disable it")
    is_text = recipe.task.get("name") == TEXT_TASK
    if pair is not None and not is_text:
        raise ConfigError(f"`pair` {pair} is for sentence pairs, but the recipe {recipe.name} is for images; remove it")
    usual = USUAL_DATA.get(recipe.task.get("name", ""), ("fashion", 0.2))
    request = Request(
        data=resolve_data(usual[0] if data is None else data, is_text=is_text),
        pair=pair,
        recipe=recipe,
        init=None if init is None else resolve_if_path(init),
        teacher=None if teacher is None else resolve_if_path(teacher),
        teacher_cache=None if teacher_cache is None else str(teacher_cache.resolve()),
        teacher_fields=teacher_fields,
        val_share=usual[1] if val_share is None else val_share,
        real=None if real is None else resolve_if_path(str(real)),
        cache=1.0 if cache is None else cache,
        then=then,
    )
    timm = [teacher] if teacher is not None and teacher.startswith(TIMM_PREFIX) else []
    return request.with_trusted_code([*trusted_code, *timm], f"the recipe {recipe.name}")


def list_trusted_code(model: str | None, code: Sequence[str]) -> list[str]:
    """All external code that a user names: the model, if it is external, and `code`."""
    by_model = [model] if model is not None and is_external_family_name(model) else []
    return list(dict.fromkeys([*by_model, *code]))


def resolve_data(name: str, *, is_text: bool) -> str:
    """Data by name, or by a full path; that of sentence pairs may be the common beginning of several files."""
    if find_public_dataset(name) is not None:
        return name
    if not is_text:
        return resolve_if_path(name)
    return name if name in BUILT_IN_PAIR_NAMES else str(Path(name).expanduser().resolve())


def resolve_if_path(path_or_name: str) -> str:
    """A path made absolute, so that the run can be resumed from another folder; a name as it is."""
    return (
        str(Path(path_or_name).resolve())
        if path_or_name not in ("", "fashion", GENERATED_CAPTIONS) and Path(path_or_name).exists()
        else path_or_name
    )


def match_trusted_model(recorded: str | None, code: Sequence[str], where: str) -> tuple[str | None, list[str]]:
    """The model to use for the one that a file names, and the entries of `code` that are for something else.

    An external model is imported from the path given by the user, not the file; both must name the same preset.
    """
    if not is_external_family_name(recorded):
        return recorded, list(code)
    models = [name for name in code if not name.startswith(TIMM_PREFIX)]
    if not models:
        raise UntrustedCodeError(str(recorded), where)
    preset = str(recorded).rpartition(":")[2]
    if len(models) > 1 or models[0].rpartition(":")[2] != preset:
        raise ConfigError(
            f"`trust_code` {' `trust_code` '.join(models)} was given, but {where} names the model {recorded!r}; "
            f"expected one that ends in :{preset}"
        )
    return resolve_external_name(models[0]), [name for name in code if name not in models]


def check_teacher_is_trusted(name: str, code: Sequence[str], where: str) -> list[str]:
    """Refuse a teacher from outside timm's registry that only a file names. Returns `code` without the teacher."""
    if (
        name.startswith(TIMM_PREFIX)
        and not TIMM_REGISTRY_NAME.fullmatch(name.removeprefix(TIMM_PREFIX))
        and name not in code
    ):
        raise ConfigError(
            f"{where} names the teacher {name!r}, which timm would load from outside its registry; it is opened only "
            f"if you name it: if you trust it, add `trust_code` {quote(name)}"
        )
    return [each for each in code if each != name]
