"""All that a training is told: a few short lists of settings, one flat file of them, one flag for each.

A recipe file is YAML with the names of these fields; what it does not say has the defaults below.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.data.augment.config import Augmentation, field_with_help
from vitrail.errors import ConfigError, describe_error, unknown_name_error
from vitrail.files import read_text
from vitrail.json_yaml import parse_yaml
from vitrail.models.checks import MAY_BE_ZERO, RATE, SHARE, check_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RECIPES_FOLDER = Path(__file__).with_name("recipes")


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """How the weights move."""

    optimizer: Literal["adamw", "sgd", "muon"] = field_with_help(
        "adamw", "adamw, sgd, or muon: for maps between features, with AdamW for the rest."
    )
    lr: float = field_with_help(1e-3, "The learning rate at its peak.")
    lr_batch: int = field_with_help(
        0, "The batch that lr is meant for; it grows with the batch. 0: for any.", MAY_BE_ZERO
    )
    weight_decay: float = field_with_help(
        0.05, "On matrices; never on norms, biases, tokens and positions.", MAY_BE_ZERO
    )
    momentum: float = field_with_help(0.9, "Of SGD; the first beta of AdamW. Muon has 0.95.", RATE)
    beta2: float = field_with_help(0.999, "The second beta of AdamW.", RATE)
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt"] = field_with_help(
        "cosine", "How the learning rate falls after the warm-up."
    )
    warmup: float = field_with_help(
        0.0, "Epochs in which the learning rate rises from zero; at most half of all.", MAY_BE_ZERO
    )
    final_lr: float = field_with_help(0.0, "What cosine and linear end at, as a share of lr.", MAY_BE_ZERO)
    layer_decay: float = field_with_help(
        1.0, "Factor on the learning rate from each block to the one before it; 1: none."
    )
    clip: float = field_with_help(0.0, "The largest norm of all gradients together; 0: any.", MAY_BE_ZERO)
    train_blocks: int | None = field_with_help(
        None, "Train the head and the last so many blocks; 0: a linear probe.", MAY_BE_ZERO
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.layer_decay > 1:
            raise ConfigError(f"layer_decay is {self.layer_decay}; expected more than 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How long, in what portions, and what is kept."""

    epochs: float = field_with_help(10, "Times that as many pictures as there are go by.")
    minutes: float | None = field_with_help(
        None, "A budget of time instead: speed is measured first, the steps fixed from it."
    )
    batch: int = field_with_help(128, "Pictures a step, over all processes and micro-batches.")
    accumulate: int = field_with_help(1, "Micro-batches that a step is cut into, to save memory.")
    ema: float = field_with_help(0.0, "Decay of the moving average of the weights, which is then the result.", RATE)
    precision: Literal["float32", "bfloat16", "float16"] = field_with_help(
        "float32", "What a forward pass computes in, by autocast."
    )
    compile: bool = field_with_help(False, "Compile the model first (torch.compile).")
    eval_every: int = field_with_help(1, "Epochs from one evaluation to the next; 0: only at the end.", MAY_BE_ZERO)
    save_every: int = field_with_help(0, "Steps from one checkpoint to the next; 0: as time allows.", MAY_BE_ZERO)
    early_size: int = field_with_help(
        0, "Pixels a side of the first pictures, which are quicker; the model must be dynamic. 0: as ever.", MAY_BE_ZERO
    )
    early_share: float = field_with_help(0.5, "How much of the training goes with pictures of early_size.", RATE)
    whiten: bool = field_with_help(False, "Start the first filters at the principal patches of the pictures (cct).")
    seed: int = field_with_help(0, "Of starting weights, order and augmentation.", MAY_BE_ZERO)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batch % self.accumulate:
            raise ConfigError(f"batch {self.batch} in {self.accumulate} micro-batches; expected equal ones")


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """What is learnt from a teacher, where there is one; DeiT's own choices unless said."""

    distill: Literal["hard", "soft", "none"] = field_with_help(
        "hard", "hard: learn the class that the teacher chooses; soft: its probabilities; none: no teacher."
    )
    distill_token: Literal["auto", "distill", "class"] = field_with_help(
        "auto", "Who learns it: the distillation token, or the class token alone. auto: the former if there is one."
    )
    teacher_weight: float | None = field_with_help(
        None, "Lambda, the teacher's share of the loss; without it 0.5 for hard, 0.1 for soft.", SHARE
    )
    temperature: float = field_with_help(3.0, "Tau of soft: what logits are divided by, so that small ones count too.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training; `model`, `fields` and `preprocessing` say what is trained where nothing else does."""

    name: str = "none"
    model: str | None = None  # a preset's name
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of its config, to replace
    preprocessing: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of vitrail.Preprocessing, to replace
    augmentation: Augmentation = field(default_factory=Augmentation)
    optimization: OptimizationSettings = field(default_factory=OptimizationSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    distillation: DistillationSettings = field(default_factory=DistillationSettings)

    def with_settings(self, settings: Mapping[str, Any]) -> "Recipe":
        """With these settings, by their flat names, in place of its own; `fields` and `preprocessing` are added to."""
        known = {name: section for section in SECTIONS for name in list_setting_names(section)}
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        rest = dict[str, Any]()
        for name, value in settings.items():
            if name in ("fields", "preprocessing"):
                if not isinstance(value, Mapping):
                    raise ConfigError(f"{name} is {value!r}; expected names and values")
                rest[name] = {**getattr(self, name), **value}
            elif name in ("name", "model"):
                rest[name] = value
            elif name in known:
                parts[known[name]][name] = parse_number(value)
            else:
                raise unknown_name_error(
                    "setting", name, [*known, "model", "fields", "preprocessing"], synonyms=SETTING_ALIASES
                )
        sections = {name: replace(getattr(self, name), **values) for name, values in parts.items()}
        return replace(self, **rest, **sections)

    def to_flat_dict(self) -> dict[str, Any]:
        """Everything by its flat name, as a recipe file has it."""
        rest = {name: getattr(self, name) for name in ("name", "model", "fields", "preprocessing")}
        return rest | {
            name: getattr(getattr(self, part), name) for part in SECTIONS for name in list_setting_names(part)
        }


SECTIONS: Mapping[str, type["DataclassInstance"]] = {
    "loop": LoopSettings,
    "optimization": OptimizationSettings,
    "augmentation": Augmentation,
    "distillation": DistillationSettings,
}
SETTING_ALIASES = {  # how timm's and facebook's scripts call them
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


def list_setting_names(section: str) -> list[str]:
    return [each.name for each in fields(SECTIONS[section])]


def list_settings(sections: Iterable[str] = SECTIONS) -> Iterable[tuple[str, Field[Any]]]:
    """Every setting under the name of its section."""
    return ((section, each) for section in sections for each in fields(SECTIONS[section]))


def parse_number(value: Any) -> Any:
    """YAML takes 1e-3 for a text; everyone means the number."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) and value[:1] in "0123456789.-" else value
    return value


def list_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES_FOLDER.glob("*.yaml"))


def open_recipe(name: str) -> Recipe:
    """A recipe of the package by its name, or one of your own by its file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES_FOLDER / f"{name}.yaml"
    if path.parent == RECIPES_FOLDER and name not in list_recipes():
        raise unknown_name_error("recipe", name, list_recipes())
    try:
        data = parse_yaml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the recipe {path} cannot be read: {describe_error(error)}; expected YAML, name: value"
        ) from None
    if not isinstance(data, dict) or not all(isinstance(each, str) for each in data):
        raise ConfigError(f"the recipe {path} holds no settings; expected YAML, name: value")
    try:
        return Recipe(name=path.stem).with_settings({each: value for each, value in data.items() if each != "name"})
    except ConfigError as error:
        raise ConfigError(f"the recipe {path.name}: {error}") from None


def choose_recipe(
    name: str | None,
    changes: Mapping[str, Any],
    *,
    data: str | None = None,
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
            raise ConfigError("pass either `minutes` or `epochs`, not both", ("minutes", "epochs"))
        changes = {**changes, "minutes": None}  # instead of the recipe's budget
    embedded = data in (None, "fashion") and model is None
    usual = "finetune" if init else "fashion" if embedded else "scratch"
    recipe = open_recipe(usual if name is None else name)
    if recipe.model is not None and (init or model not in (None, recipe.model)):
        # they are for the model that the recipe names
        recipe = replace(recipe, model=None, fields={}, preprocessing={})
        recipe = recipe.with_settings({"whiten": False, "early_size": 0})
    named = model or recipe.model or (None if init else default_model)
    return recipe.with_settings({**changes, "fields": fields or {}, "model": named})
