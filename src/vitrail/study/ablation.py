"""An ablation: train a recipe in full, and again with one ingredient removed or replaced (DeiT, table 8).

All rows are built and checked before the first is trained, so that none fails after hours because of a typo.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.distributed import Ranks, resolve_device
from vitrail.inspection.file_inspection import find_nearest_preset
from vitrail.models.base.checks import pair
from vitrail.models.base.family import FOREIGN_FIELD_NAMES
from vitrail.recipes import recipe as recipes
from vitrail.recipes.request import Request
from vitrail.study.training_study import (
    AblationResults,
    AblationVariant,
    TrainingStudy,
    find_study_folder,
    format_value,
    json_round_trip,
    list_ablation_runs,
)
from vitrail.tasks import find_task
from vitrail.tasks.classification import Classification
from vitrail.tasks.distillation import check_distill_token_fits_model, check_teacher_can_be_cached
from vitrail.tasks.image_task import assemble_image_task
from vitrail.tasks.task import BuildContext
from vitrail.tasks.teacher import Teacher, TeacherView
from vitrail.train.optim import freeze_all_but_last_blocks
from vitrail.train.plan import Plan, plan_from_setup

INGREDIENT_OFF_VALUES: Mapping[str, Any] = {  # every ingredient, and the value that disables it
    "mixup": 0.0,
    "cutmix": 0.0,
    "erase": 0.0,
    "flip": 0.0,
    "policy": "none",
    "jitter": 0.0,
    "repeats": 1,
    "smoothing": 0.0,
    "crop": "center",
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
    **FOREIGN_FIELD_NAMES,
    "drop": "dropout",
    "drop_path": "stochastic_depth",
}
SETTING_NAMES = tuple(each.name for _, each in recipes.list_settings())
DISTILLATION_SETTINGS = recipes.list_setting_names("distillation")
MAX_ROW_NAME_LENGTH = 80


class AblationPlanner:
    """A training request and its ingredients; `row_without` and `row_with` make rows of it."""

    def __init__(self, request: Request) -> None:
        if request.recipe.loop.precision == "auto":  # the same on every machine
            request = replace(request, recipe=request.recipe.with_settings({"precision": "float32"}))
        self.request = request
        self.data = request.open_data(need_classes=find_task(request.task_name).needs_classes)
        self.plans = dict[str, Plan]()  # by everything that their model depends on
        full = drop_unused_teacher(request)
        self.plan = self.check_request(full)
        self.full_settings = collect_settings(full, self.plan)
        self.full_row = AblationVariant(name="full", request=full)

    def list_ingredients(self) -> list[str]:
        """The ingredients that are enabled."""
        return [name for name in INGREDIENT_OFF_VALUES if self.has_ingredient(name)]

    def has_ingredient(self, name: str) -> bool:
        name, kind = INGREDIENT_ALIASES.get(name, (name, None))
        value = self.full_settings.get(name, INGREDIENT_OFF_VALUES[name])
        return value != INGREDIENT_OFF_VALUES[name] and kind in (None, value)

    def row_without(self, ingredient: str) -> AblationVariant:
        word = ingredient.replace("-", "_").lower()
        known = (*INGREDIENT_OFF_VALUES, *INGREDIENT_ALIASES)
        if word not in known:
            raise unknown_name_error("ingredient", ingredient, known, synonyms=FOREIGN_SETTING_NAMES)
        if not self.has_ingredient(word):
            enabled = ", ".join(self.list_ingredients()) or "nothing, it has no ingredients"
            raise ConfigError(f"{word} is already off in recipe {self.request.recipe.name}; expected one of: {enabled}")
        name, _ = INGREDIENT_ALIASES.get(word, (word, None))
        request = (
            self.request_from_scratch() if name == "init" else self.change_request({name: INGREDIENT_OFF_VALUES[name]})
        )
        return self.build_row(f"without-{word.replace('_', '-')}", request)

    def row_with(self, values: Mapping[str, Any]) -> AblationVariant:
        """Row with other settings or model fields, given by name."""
        name = "-".join(f"{each}-{format_value(value)}" for each, value in values.items())
        row = self.build_row(make_folder_name(name), self.change_request(values))
        if not row.changes:
            given = ",".join(f"{each}={format_value(value)}" for each, value in values.items())
            raise ConfigError(
                f"{given} is already the value in recipe {self.request.recipe.name}; expected another value"
            )
        return row

    def build_rows(
        self, without: Sequence[str], replaced: Sequence[Mapping[str, Any]], *, each: bool = False
    ) -> list[AblationVariant]:
        """Rows of the table, the full one first; `each` adds one row per enabled ingredient."""
        rows = [self.full_row, *map(self.row_without, without)]
        if each:
            known = [dict(row.changes) for row in rows]
            rows += [row for row in map(self.row_without, self.list_ingredients()) if dict(row.changes) not in known]
        rows += map(self.row_with, replaced)
        for number, row in enumerate(rows):
            for other in rows[:number]:
                if row.name == other.name or row.changes == other.changes:
                    raise ConfigError(
                        f"{row.name} is the same as {other.name} ({row.description}); leave one of them out"
                    )
        return rows

    def open_teacher(self) -> Teacher:
        """At the size of the student of the full row, if it is to have that."""
        request, fields = self.request, dict(self.request.teacher_fields or {})
        if request.recipe.distillation.teacher_size == "student":
            about = self.plan.source.describe_model_input(self.plan.model)
            fields["image_size"] = pair(about["preprocessing"].image_size)
        return Teacher.from_name(str(request.teacher), **fields)

    def check_teacher_fits(self, rows: Sequence[AblationVariant], teacher: Teacher, device: torch.device) -> None:
        """Check that the teacher fits every row, before any is trained."""
        distilled = [row.request for row in rows if row.request.teacher is not None]
        plans = map(self.check_request, distilled)
        inputs = (plan.source.describe_model_input(plan.model) for plan in plans)
        for preprocessing in dict.fromkeys(each["preprocessing"] for each in inputs):
            TeacherView(teacher, self.data, preprocessing, device)

    def build_row(self, name: str, request: Request) -> AblationVariant:
        request = drop_unused_teacher(request)
        now = collect_settings(request, self.check_request(request))
        names = dict.fromkeys((*self.full_settings, *now))
        pairs = {each: (self.full_settings.get(each), now.get(each)) for each in names}
        return AblationVariant(
            name=name, request=request, changes={n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
        )

    def change_request(self, values: Mapping[str, Any]) -> Request:
        model_fields = [each.name for each in fields(self.plan.model.config)]
        for name in values:
            if name not in (*SETTING_NAMES, *model_fields):
                raise unknown_name_error(
                    "setting or model field", name, (*SETTING_NAMES, *model_fields), synonyms=FOREIGN_SETTING_NAMES
                )
            if name == "seed":
                raise ConfigError(f"seed={values[name]} cannot differ between rows; use `seeds`")
            if name in DISTILLATION_SETTINGS and self.request.teacher is None:
                raise ConfigError(f"{name}={values[name]} needs a teacher; set `teacher` to a trained model")
        settings = {name: value for name, value in values.items() if name in SETTING_NAMES}
        if "epochs" in settings and "minutes" not in settings:
            settings["minutes"] = None  # epochs replace a time budget, as on the command line
        others = {name: value for name, value in values.items() if name not in SETTING_NAMES}
        return replace(self.request, recipe=self.request.recipe.with_settings({**settings, "fields": others}))

    def request_from_scratch(self) -> Request:
        """The checkpoint's architecture and preprocessing with newly initialized weights."""
        config = json_round_trip(asdict(self.plan.model.config))
        del config["classes"]  # from the data
        name = self.request.recipe.model
        family = self.plan.write_options["family"]
        if name is None:
            nearest, _ = find_nearest_preset(family, self.plan.model.config)
            name = nearest or next(iter(family.presets))  # every field is replaced
        known = self.plan.source.describe_model_input(self.plan.model)
        preprocessing = json_round_trip(asdict(known["preprocessing"]))
        recipe = self.request.recipe.with_settings({"model": name, "fields": config, "preprocessing": preprocessing})
        return replace(self.request, init=None, recipe=recipe)

    def check_request(self, request: Request) -> Plan:
        """The plan of a request, an error if it cannot start; on the meta device unless `init` is set."""
        recipe = request.recipe
        key = json.dumps(
            [request.init, recipe.model, json_round_trip(recipe.fields), json_round_trip(recipe.preprocessing)]
        )
        if key not in self.plans:
            with warnings.catch_warnings(), nullcontext() if request.init else torch.device("meta"):
                warnings.simplefilter("ignore")  # the run itself warns
                if request.task_name in ("classification", "distillation"):  # the teacher is opened once, for all rows
                    setup = assemble_image_task(request, self.data, Classification)
                else:
                    setup = find_task(request.task_name).build(replace(request, cache=0.0), BuildContext(dry_run=True))
                self.plans[key] = plan_from_setup(request, setup, BuildContext())
        plan = replace(self.plans[key], recipe=recipe, request=request)
        freeze_all_but_last_blocks(plan.task, recipe.optimization.train_blocks)
        if request.teacher is not None:
            check_distill_token_fits_model(recipe, plan.model)
        if request.teacher_cache is not None:
            check_teacher_can_be_cached(recipe)
        return plan


def drop_unused_teacher(request: Request) -> Request:
    """Remove the teacher if distillation is off."""
    if request.recipe.distillation.distill == "none":
        return replace(request, teacher=None, teacher_cache=None)
    return request


def collect_settings(request: Request, plan: Plan) -> dict[str, Any]:
    """Everything that rows may differ in, by name: settings, model config and `init`."""
    flat = request.recipe.to_flat_dict()
    found = {name: flat[name] for name in SETTING_NAMES if name != "seed"}
    if request.teacher is None:
        found["distill"] = "none"
    return {**found, **asdict(plan.model.config), "init": request.init}


def make_folder_name(text: str) -> str:
    """Make text a folder name; a long one is cut and made unique by a checksum."""
    name = re.sub(r"[^\w.+]+", "-", text.replace("_", "-")).strip("-.")
    return name if len(name) <= MAX_ROW_NAME_LENGTH else f"{name[: MAX_ROW_NAME_LENGTH - 9]}-{crc32(text.encode()):08x}"


def plan_ablation_study(
    request: Request,
    without: Sequence[str],
    replaced: Sequence[Mapping[str, Any]],
    *,
    each: bool = False,
    seeds: Sequence[int] = (0,),
    folder: Path | None = None,
    device: str = "auto",
) -> TrainingStudy:
    """The rows of an ablation and their runs in the folder, by default one in runs/; all are checked with the teacher.

    `without` are ingredients to leave out, `replaced` other values by name; `each` leaves out every ingredient in turn.
    """
    place, name = resolve_device(device, Ranks()), request.recipe.name
    ablation = AblationPlanner(request)
    rows = ablation.build_rows(without, replaced, each=each)
    teacher = ablation.open_teacher() if request.teacher else None
    if teacher is not None:
        ablation.check_teacher_fits(rows, teacher, place)
    folder = folder or find_study_folder(f"{name}-ablation", rows, seeds, teacher)
    data = ablation.data.name
    return TrainingStudy(
        title=f"ablation of {name} on {data}",
        rows=rows,
        runs=list_ablation_runs(rows, seeds, folder, teacher),
        folder=folder,
        read_results=partial(AblationResults.read, name, data, rows),
    )
