"""Recipes: the settings of a training run, in four sections; each setting is also a command line flag.

A recipe file is flat YAML with the names of these settings, which have the defaults below. The mappings `task` and
`schedules` have no flags.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitrail.base.errors import ConfigError, DataError, describe_error, unknown_name_error
from vitrail.base.files import read_text, suggest_sibling
from vitrail.base.json_yaml import parse_yaml
from vitrail.base.text import AMERICAN_NAMES
from vitrail.data.images.augment.config import Augmentation, field_with_help
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, SEED, SHARE, check_fields, check_range
from vitrail.recipes.schedule import Schedule, parse_if_numeric_text, parse_schedule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RECIPES_FOLDER = Path(__file__).parent
Precision = Literal["float32", "bfloat16", "float16"]  # of a run, once it is chosen
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """Optimizer, learning rate schedule and frozen layers."""

    optimizer: Literal["adamw", "sgd", "muon", "lars"] = field_with_help(
        "adamw",
        "Optimizer; muon is for hidden matrices, with AdamW for the other weights. lars is SGD for large batches.",
    )
    lr: float = field_with_help(1e-3, "Peak learning rate.")
    lr_batch: int = field_with_help(
        0, "Batch size that lr is for; lr is multiplied by batch / lr_batch. 0 disables scaling.", MAY_BE_ZERO
    )
    weight_decay: float = field_with_help(
        0.05, "Weight decay of matrices and kernels; never applied to norms, biases, tokens and positions.", MAY_BE_ZERO
    )
    momentum: float = field_with_help(
        0.9, "Momentum of SGD and LARS, or the first beta of AdamW. Muon always uses 0.95.", RATE
    )
    beta2: float = field_with_help(0.999, "Second beta of AdamW.", RATE)
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt"] = field_with_help(
        "cosine", "Learning rate schedule after the warm-up."
    )
    warmup: float = field_with_help(0.0, "Epochs of linear warm-up, at most half of all epochs.", MAY_BE_ZERO)
    final_lr: float = field_with_help(0.0, "Final learning rate of cosine and linear, as a share of lr.", MAY_BE_ZERO)
    layer_decay: float = field_with_help(
        1.0, "Multiply the learning rate by this for each block further from the head; 1 disables it."
    )
    clip: float = field_with_help(0.0, "Clip the norm of all gradients to this value; 0 disables it.", MAY_BE_ZERO)
    train_blocks: int | None = field_with_help(
        None,
        "Train only the head and this many of the last blocks; 0 is a linear probe, none trains all blocks.",
        MAY_BE_ZERO,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.layer_decay > 1:
            raise ConfigError(f"layer_decay is {self.layer_decay}; expected more than 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Length, batches, precision, evaluation and checkpoints."""

    epochs: float = field_with_help(10, "Passes over the training set; may be fractional.")
    minutes: float | None = field_with_help(
        None, "Time budget instead of epochs; the number of steps is computed from the measured speed."
    )
    batch: int = field_with_help(
        128, "Images per step, over all processes and micro-batches; of sentences the largest number."
    )
    accumulate: int = field_with_help(1, "Micro-batches per step (gradient accumulation), to save memory.")
    ema: float = field_with_help(
        0.0, "Decay of the moving average of the weights (EMA), which becomes the result; 0 disables it.", RATE
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = field_with_help(
        "auto",
        "Precision of the forward pass (autocast). auto: bfloat16 on a CPU that has instructions for it, if a few "
        "steps show that it is faster, else float32.",
    )
    compile: bool = field_with_help(False, "Compile the model with torch.compile.")
    eval_every: int = field_with_help(1, "Epochs between evaluations; 0 evaluates only at the end.", MAY_BE_ZERO)
    keep_best: bool = field_with_help(
        False, "Keep the model of the best evaluation, by the task's metric (top-1), in the folder best/ of the run."
    )
    patience: int = field_with_help(
        0, "Stop after this many evaluations without a better one, by the task's metric; 0 disables it.", MAY_BE_ZERO
    )
    save_every: int = field_with_help(
        0, "Steps between checkpoints; 0 chooses them so that they take at most 5% of the time.", MAY_BE_ZERO
    )
    early_size: int = field_with_help(
        0,
        "Image size for the first part of training (progressive resizing), for dynamic models; 0 disables it.",
        MAY_BE_ZERO,
    )
    early_share: float = field_with_help(0.5, "Share of the steps that use early_size.", RATE)
    whiten: bool = field_with_help(
        False, "Initialize the first filters with principal components of image patches (cct)."
    )
    stop_on_collapse: bool = field_with_help(
        False, "Stop if the features collapse, in tasks that can tell; by default, a warning is printed."
    )
    seed: int = field_with_help(0, "Random seed for initialization, shuffling and augmentation.", SEED)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batch % self.accumulate:
            raise ConfigError(
                f"batch {self.batch} in {self.accumulate} micro-batches; expected a multiple of {self.accumulate}"
            )


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """How a student learns from a teacher, if there is one. The defaults are DeiT's."""

    distill: Literal["hard", "soft", "none"] = field_with_help(
        "hard", "Learn the teacher's top class (hard) or its probabilities (soft); none disables distillation."
    )
    distill_token: Literal["auto", "distill", "class"] = field_with_help(
        "auto",
        "Token that learns from the teacher. auto: the distillation token if there is one, else the class token.",
    )
    teacher_weight: float | None = field_with_help(
        None, "Share of the teacher in the loss (lambda); none is 0.5 for hard and 0.1 for soft.", SHARE
    )
    temperature: float = field_with_help(3.0, "Temperature of soft distillation (tau), by which logits are divided.")
    teacher_smoothing: float = field_with_help(
        0.0, "Label smoothing of the teacher's top class in hard distillation; DeiT has none.", RATE
    )
    teacher_size: Literal["trained", "student"] = field_with_help(
        "trained",
        "Image size of the teacher. student: the student's, as DeiT fine-tunes at 384 pixels; positions are resampled.",
    )
    hint_weight: float = field_with_help(
        0.0, "Weight of hints (FitNets): blocks of the student learn the output of blocks of the teacher.", MAY_BE_ZERO
    )
    hints: str = field_with_help(
        "last:last",
        "Pairs of blocks that hints compare, STUDENT:TEACHER, counted from 1 or last, such as 4:8,last:last.",
    )
    hint_tokens: Literal["patches", "class"] = field_with_help(
        "patches", "Tokens that hints compare. patches: the finer grid is averaged to the coarser one."
    )
    distance_weight: float = field_with_help(
        0.0,
        "Weight of relations (RKD): the distances between the images of a batch.",
        MAY_BE_ZERO,
    )
    angle_weight: float = field_with_help(
        0.0,
        "Weight of relations (RKD): the angles between the images of a batch; usually twice the distance weight.",
        MAY_BE_ZERO,
    )

    @property
    def reads_features(self) -> bool:
        """Whether the loss needs more of the teacher than its logits."""
        return bool(self.hint_weight or self.distance_weight or self.angle_weight)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.hint_weight and (self.hints, self.hint_tokens) != ("last:last", "patches"):
            raise ConfigError("`hints` or `hint_tokens` without hints; expected `hint_weight` more than 0, such as 1")
        if self.teacher_smoothing and self.distill == "soft":
            raise ConfigError(
                f"`teacher_smoothing` {self.teacher_smoothing} with `distill` soft; expected `distill` hard, which has "
                "labels to smooth, or `teacher_smoothing` 0"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a run; `model`, `fields` and `preprocessing` are used if the request does not name others."""

    name: str = "none"
    model: str | None = None  # a preset
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # config fields to replace
    preprocessing: Mapping[str, Any] = field(default_factory=dict[str, Any])  # preprocessing fields to replace
    augmentation: Augmentation = field(default_factory=Augmentation)
    optimization: OptimizationSettings = field(default_factory=OptimizationSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])  # `name` of the task, and its settings
    schedules: Mapping[str, Any] = field(default_factory=dict[str, Any])  # settings of the optimizer that change

    def __post_init__(self) -> None:
        for name, value in self.schedules.items():
            if name not in SCHEDULED_SETTINGS:
                raise unknown_name_error("setting with a schedule", name, SCHEDULED_SETTINGS)
            schedule, setting = parse_schedule(value, name), OptimizationSettings.__dataclass_fields__[name]
            for number in (schedule.start, schedule.end, schedule.warmup_start):
                if number is not None:
                    check_range(f"a value of the schedule of {name}", number, {**MAY_BE_ZERO, **setting.metadata})
        _ = self.distillation  # raises an error if its settings are wrong

    @property
    def distillation(self) -> DistillationSettings:
        """The settings of the task distillation."""
        return DistillationSettings(**{name: self.task[name] for name in self.distillation_names if name in self.task})

    @property
    def distillation_names(self) -> list[str]:
        """Settings of the task distillation, which a recipe may name without `task`."""
        return list_setting_names("distillation") if self.task.get("name", "distillation") == "distillation" else []

    def with_settings(self, settings: Mapping[str, Any]) -> "Recipe":
        """A copy with these settings replaced, by flat name; `fields` and `preprocessing` are merged."""
        known = {name: section for section in SECTIONS for name in list_setting_names(section)}
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        rest = dict[str, Any]()
        for name, value in settings.items():
            if name in MAPPINGS:
                if not isinstance(value, Mapping):
                    raise ConfigError(f"{name} is {value!r}; expected a mapping of names to values")
                if name == "task":
                    value = {AMERICAN_NAMES.get(each, each): set_to for each, set_to in value.items()}
                rest[name] = {**rest.get(name, vars(self)[name]), **value}
                if name == "task" and "name" in value and value["name"] != self.task.get("name", value["name"]):
                    rest[name] = dict(value)  # another task has other settings
            elif name in ("name", "model"):
                rest[name] = value
            elif name in known:
                value = DTYPE_ALIASES.get(str(value), value) if name == "precision" else parse_if_numeric_text(value)
                parts[known[name]][name] = value
            else:
                raise unknown_name_error("setting", name, [*known, "model", *MAPPINGS], synonyms=SETTING_ALIASES)
        if distillation := parts.pop("distillation"):
            rest["task"] = {**rest.get("task", self.task), **distillation}
        sections = {name: replace(vars(self)[name], **values) for name, values in parts.items()}
        return replace(self, **rest, **sections)

    def to_json(self) -> dict[str, Any]:
        """All settings as in a recipe file."""
        flat = self.to_flat_dict()
        return {name: value for name, value in flat.items() if name not in list_setting_names("distillation")} | {
            "task": {**(asdict(self.distillation) if self.distillation_names else {}), **to_plain_values(self.task)},
            "schedules": to_plain_values(self.schedules),
        }

    def to_flat_dict(self) -> dict[str, Any]:
        """All settings by flat name, those of the task distillation too."""
        rest = {name: vars(self)[name] for name in ("name", "model", "fields", "preprocessing")}
        sections = {**vars(self), "distillation": self.distillation}
        return rest | {name: vars(sections[part])[name] for part in SECTIONS for name in list_setting_names(part)}


SECTIONS: Mapping[str, type["DataclassInstance"]] = {
    "loop": LoopSettings,
    "optimization": OptimizationSettings,
    "augmentation": Augmentation,
    "distillation": DistillationSettings,
}
GENERATED_CAPTIONS = "collages"  # data of images with captions
BUILT_IN_PAIR_NAMES = ("tatoeba", "reversal")  # data of sentence pairs
RENAMED_RECIPES = {"probe": "linear-probe"}
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MAPPINGS = ("fields", "preprocessing", "task", "schedules")
SCHEDULED_SETTINGS = ("weight_decay", "momentum", "beta2", "clip")
SETTING_ALIASES = {  # names in the scripts of timm and facebook
    "batch_size": "batch",
    "learning_rate": "lr",
    "opt": "optimizer",
    "sched": "schedule",
    "warmup_epochs": "warmup",
    "clip_grad": "clip",
    "grad_accum_steps": "accumulate",
    "color_jitter": "jitter",
    "reprob": "erase",
    "repeated_aug": "repeats",
    "model_ema_decay": "ema",
    "distillation_type": "distill",
    "distillation_alpha": "teacher_weight",
    "distillation_tau": "temperature",
    "drop": "fields",
    "drop_path": "fields",
}


def to_plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asdict(value) if isinstance(value, Schedule) else value for name, value in values.items()}


def list_setting_names(section: str) -> list[str]:
    return [each.name for each in fields(SECTIONS[section])]


def list_settings(sections: Iterable[str] = SECTIONS) -> Iterable[tuple[str, Field[Any]]]:
    """All settings with the names of their sections."""
    return ((section, each) for section in sections for each in fields(SECTIONS[section]))


def list_builtin_recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.yaml"))


def open_recipe(name: str) -> Recipe:
    """Open a built-in recipe by name, or a .yaml file.

    >>> recipe = vitrail.open_recipe("fashion").with_settings({"epochs": 1, "lr": 1e-3})
    >>> recipe.loop.epochs
    1.0
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the recipe is {name!r}; expected a name, for example 'fashion', or a .yaml file")
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES_FOLDER / f"{name}.yaml"
    if path.parent == RECIPES_FOLDER and name not in list_builtin_recipe_names():
        raise unknown_name_error("recipe", name, list_builtin_recipe_names(), synonyms=RENAMED_RECIPES)
    try:
        data = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the recipe {path} cannot be read: {describe_error(error)}; expected YAML, name: value"
            f"{suggest_sibling(path)}"
        ) from None
    if not isinstance(data, dict) or not all(isinstance(each, str) for each in data):
        raise ConfigError(f"the recipe {path} has no settings; expected YAML, name: value")
    try:
        return Recipe(name=path.stem).with_settings({each: value for each, value in data.items() if each != "name"})
    except ConfigError as error:
        raise ConfigError(f"the recipe {path.name}: {error}") from None


def choose_recipe(
    name: str | None,
    changes: Mapping[str, Any],
    *,
    data: str | None = None,
    pair: str | None = None,
    task: str | None = None,
    model: str | None = None,
    init: str | None = None,
    fields: Mapping[str, Any] | None = None,
    default_model: str | None = None,
) -> Recipe:
    """The recipe for a model and data, by default the usual one, with other settings and fields of the model.

    Without a `model`, it is the recipe's, or without an `init` the `default_model`.
    """
    if "epochs" in changes:
        if "minutes" in changes:
            raise ConfigError("pass either `minutes` or `epochs`, not both")
        changes = {**changes, "minutes": None}  # instead of the recipe's budget
    recipe = open_recipe(choose_usual_recipe(data, init, pair, task) if name is None else name)
    if recipe.model is not None and (init or model not in (None, recipe.model)):
        # they are for the model that the recipe names
        recipe = replace(recipe, model=None, fields={}, preprocessing={})
        recipe = recipe.with_settings({"whiten": False, "early_size": 0})
    named = model or recipe.model or (None if init else default_model)
    return recipe.with_settings({**changes, "fields": fields or {}, "model": named})


def choose_usual_recipe(data: str | None, init: str | None, pair: str | None, task: str | None) -> str:
    """The name of the default recipe: for captions, for sentence pairs, to fine-tune, or to train from scratch."""
    if task == "caption" or (task is None and data is not None and pair is None and is_caption_data(data)):
        return "caption-cpu" if data in (None, GENERATED_CAPTIONS) else "caption"
    if data == "reversal":
        return "reversal"
    if pair is not None or (data is not None and is_pair_data(data)):
        return "translate-demo"
    return "finetune" if init else "fashion" if data in (None, "fashion") else "scratch"


def is_caption_data(data: str) -> bool:
    """Whether data are images with captions, by its name or the names of its files."""
    if data == GENERATED_CAPTIONS:
        return True
    if not os.path.isdir(os.path.expanduser(data)):  # noqa: PTH111, PTH112  # without errors, and before torch
        return False
    from vitrail.data.captions.captions import has_caption_table

    return has_caption_table(data)


def is_pair_data(data: str) -> bool:
    """Whether data are sentence pairs, by its name or the names of its files."""
    from vitrail.data.public.catalog import find_public_dataset
    from vitrail.data.text.pairs import find_pair_files

    public = find_public_dataset(data)
    if data in BUILT_IN_PAIR_NAMES or public is not None:
        return public is None or public.is_text
    try:
        place = Path(data).expanduser()
        parts = find_pair_files(place)
    except (DataError, OSError, ValueError, RuntimeError):
        return False
    complete = [part for part in parts if part.table is not None or len(part.by_language) > 1]
    return any(not place.is_dir() or part.name == "train" for part in complete)  # 1.jpg and 1.png are not languages
