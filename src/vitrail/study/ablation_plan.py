"""The rows of an ablation: a recipe as it is, and again with one thing left out or replaced (DeiT's table 8).

All rows are made and checked before the first is trained, so that none fails after hours for a misspelt word.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any
from zlib import crc32

import torch

from vitrail.errors import ConfigError, unknown_name_error
from vitrail.inspection.checkpoints.file_inspection import find_nearest_preset
from vitrail.models import family
from vitrail.train import recipe as recipes
from vitrail.train.distillation import check_distillation, check_no_random_augmentation
from vitrail.train.optim import freeze_all_but_last_blocks
from vitrail.train.plan import Plan, plan_request
from vitrail.train.request import Request
from vitrail.train.teacher import Teacher, TeacherView

INGREDIENT_OFF_VALUES: Mapping[str, Any] = {  # every ingredient, and the value that turns it off
    "mixup": 0.0,
    "cutmix": 0.0,
    "erase": 0.0,
    "flip": 0.0,
    "policy": "none",
    "jitter": 0.0,
    "repeats": 1,
    "smoothing": 0.0,
    "crop": "centre",
    "ema": 0.0,
    "clip": 0.0,
    "layer_decay": 1.0,
    "warmup": 0.0,
    "weight_decay": 0.0,
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "whiten": False,
    "early_size": 0,
    "distill": "none",
    "init": None,
}
INGREDIENT_ALIASES = {
    "randaugment": ("policy", "rand"),
    "autoaugment": ("policy", "auto"),
    "pretraining": ("init", None),
}
FOREIGN_SETTING_NAMES = {
    **recipes.SETTING_ALIASES,
    **family.TIMM_FIELD_NAMES,
    "drop": "dropout",
    "drop_path": "stochastic_depth",
}
SETTING_NAMES = tuple(each.name for _, each in recipes.list_settings())
DISTILLATION_SETTINGS = recipes.list_setting_names("distillation")
MAX_ROW_NAME_LENGTH = 80  # characters of a row's name


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One line of the table: trainings that differ in nothing but the seed."""

    name: str
    request: Request  # at the first seed
    # what differs, by name: the full row's value and its own
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    unchanged_text: str = "the recipe as it is"  # the description if nothing differs

    def request_for_seed(self, seed: int) -> Request:
        return replace(self.request, recipe=self.request.recipe.with_settings({"seed": seed}))

    @property
    def description(self) -> str:
        changed = [
            f"{name} {format_value(before)} → {format_value(now)}" for name, (before, now) in self.changes.items()
        ]
        return ", ".join(changed) or self.unchanged_text


def format_value(value: object) -> str:
    if isinstance(value, bool | None):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class Ablation:
    """A training and its ingredients, and the rows made from it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.data = request.open_data()
        self.plans = dict[str, Plan]()  # by what their model depends on
        full = drop_unused_teacher(request)
        self.plan = self.check_request(full)
        self.full_settings = collect_settings(full, self.plan)
        self.full_row = AblationRow(name="full", request=full)

    def list_ingredients(self) -> list[str]:
        """The ingredients that the training has."""
        return [name for name in INGREDIENT_OFF_VALUES if self.has_ingredient(name)]

    def has_ingredient(self, name: str) -> bool:
        name, kind = INGREDIENT_ALIASES.get(name, (name, None))
        value = self.full_settings.get(name, INGREDIENT_OFF_VALUES[name])
        return value != INGREDIENT_OFF_VALUES[name] and kind in (None, value)

    def row_without(self, ingredient: str) -> AblationRow:
        word = ingredient.replace("-", "_").lower()
        known = (*INGREDIENT_OFF_VALUES, *INGREDIENT_ALIASES)
        if word not in known:
            raise unknown_name_error("ingredient", ingredient, known, synonyms=FOREIGN_SETTING_NAMES)
        if not self.has_ingredient(word):
            some = ", ".join(self.list_ingredients()) or "nothing, it has no ingredients"
            raise ConfigError(f"{word} is already off in recipe {self.request.recipe.name}; expected one of: {some}")
        name, _ = INGREDIENT_ALIASES.get(word, (word, None))
        request = (
            self.request_from_scratch() if name == "init" else self.change_request({name: INGREDIENT_OFF_VALUES[name]})
        )
        return self.build_row(f"without-{word.replace('_', '-')}", request)

    def row_with(self, values: Mapping[str, Any]) -> AblationRow:
        """The recipe with other settings, or fields of the model, by their names."""
        name = "-".join(f"{each}-{format_value(value)}" for each, value in values.items())
        row = self.build_row(make_folder_name(name), self.change_request(values))
        if not row.changes:
            given = ",".join(f"{each}={format_value(value)}" for each, value in values.items())
            raise ConfigError(f"{given} is what recipe {self.request.recipe.name} has; expected another value")
        return row

    def build_rows(
        self, without: Sequence[str], replaced: Sequence[Mapping[str, Any]], *, each: bool = False
    ) -> list[AblationRow]:
        """The full row first; with `each` one row without each ingredient of the recipe."""
        rows = [self.full_row, *map(self.row_without, without)]
        if each:
            told = [dict(row.changes) for row in rows]
            rows += [row for row in map(self.row_without, self.list_ingredients()) if dict(row.changes) not in told]
        rows += map(self.row_with, replaced)
        for number, row in enumerate(rows):
            for other in rows[:number]:
                if row.name == other.name or row.changes == other.changes:
                    raise ConfigError(f"{row.name} is the same as {other.name} ({row.description}); expected it once")
        return rows

    def check_teacher_fits(self, rows: Sequence[AblationRow], teacher: Teacher, device: torch.device) -> None:
        """Check that the teacher can teach every row, before hours are spent on some."""
        taught = [row.request for row in rows if row.request.teacher is not None]
        for seen in dict.fromkeys(self.check_request(request).preprocessing for request in taught):
            TeacherView(teacher, self.data, seen, device)

    def build_row(self, name: str, request: Request) -> AblationRow:
        request = drop_unused_teacher(request)
        now = collect_settings(request, self.check_request(request))
        names = dict.fromkeys((*self.full_settings, *now))
        pairs = {each: (self.full_settings.get(each), now.get(each)) for each in names}
        return AblationRow(
            name=name, request=request, changes={n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
        )

    def change_request(self, values: Mapping[str, Any]) -> Request:
        at_model = [each.name for each in fields(self.plan.model.config)]
        for name in values:
            if name not in (*SETTING_NAMES, *at_model):
                raise unknown_name_error(
                    "setting or model field", name, (*SETTING_NAMES, *at_model), synonyms=FOREIGN_SETTING_NAMES
                )
            if name == "seed":
                raise ConfigError(
                    f"seed={values[name]} in a row; expected `seeds`, which are the same for all rows",
                    fields=("seeds",),
                )
            if name in DISTILLATION_SETTINGS and self.request.teacher is None:
                raise ConfigError(
                    f"{name}={values[name]} without a teacher; expected `teacher`, a trained model", fields=("teacher",)
                )
        settings = {name: value for name, value in values.items() if name in SETTING_NAMES}
        if "epochs" in settings and "minutes" not in settings:
            settings["minutes"] = None  # epochs replace a recipe's budget, as on the command line
        others = {name: value for name, value in values.items() if name not in SETTING_NAMES}
        return replace(self.request, recipe=self.request.recipe.with_settings({**settings, "fields": others}))

    def request_from_scratch(self) -> Request:
        """The checkpoint's architecture and preprocessing, at starting weights."""
        config = json_round_trip(asdict(self.plan.model.config))
        del config["classes"]  # the data's
        name = self.request.recipe.model
        if name is None and self.plan.family is not None:
            near, _ = find_nearest_preset(self.plan.family, self.plan.model.config)
            name = near or next(iter(self.plan.family.presets))  # every field is replaced
        seen = json_round_trip(asdict(self.plan.preprocessing))
        recipe = self.request.recipe.with_settings({"model": name, "fields": config, "preprocessing": seen})
        return replace(self.request, init=None, recipe=recipe)

    def check_request(self, request: Request) -> Plan:
        """The plan of a request, with its weights on the meta device if it starts from scratch."""
        recipe = request.recipe
        key = json.dumps(
            [request.init, recipe.model, json_round_trip(recipe.fields), json_round_trip(recipe.preprocessing)]
        )
        if key not in self.plans:
            with warnings.catch_warnings(), nullcontext() if request.init else torch.device("meta"):
                warnings.simplefilter("ignore")  # the run warns
                self.plans[key] = plan_request(request, self.data)
        plan = replace(self.plans[key], recipe=recipe, request=request)
        freeze_all_but_last_blocks(plan.model, recipe.optimization.train_blocks)
        if request.teacher is not None:
            check_distillation(recipe, plan.model)
        if request.teacher_cache is not None:
            check_no_random_augmentation(recipe)
        return plan


def drop_unused_teacher(request: Request) -> Request:
    """The request without its teacher if the recipe does not distill."""
    if request.recipe.distillation.distill == "none":
        return replace(request, teacher=None, teacher_cache=None)
    return request


def collect_settings(request: Request, plan: Plan) -> dict[str, Any]:
    """Everything that rows may differ in, by flat names: settings, config fields, starting weights."""
    flat = request.recipe.to_flat_dict()
    found = {name: flat[name] for name in SETTING_NAMES if name != "seed"}
    if request.teacher is None:
        found["distill"] = "none"
    return {**found, **asdict(plan.model.config), "init": request.init}


def json_round_trip(value: Any) -> Any:
    """As read from a file: tuples are lists."""
    return json.loads(json.dumps(value))


def make_folder_name(text: str) -> str:
    """Text as the name of a folder; a long one is shortened and made unique by its checksum."""
    name = re.sub(r"[^\w.+]+", "-", text.replace("_", "-")).strip("-.")
    return name if len(name) <= MAX_ROW_NAME_LENGTH else f"{name[: MAX_ROW_NAME_LENGTH - 9]}-{crc32(text.encode()):08x}"
