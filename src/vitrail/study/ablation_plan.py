"""What an ablation trains: a recipe as it is, and again with one thing left out or replaced (DeiT's table 8).

All rows are made and checked before the first is trained, so that none fails after hours for a misspelt word.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch

from vitrail.checkpoint.run_files import PLAN_FILE, is_run_finished
from vitrail.data.datasets import DatasetSplits
from vitrail.errors import CheckpointError, ConfigError, unknown_name_error
from vitrail.inspection.checkpoints.file_inspection import find_nearest_preset
from vitrail.models import family
from vitrail.train import recipe as recipes
from vitrail.train.distillation import check_distillation, check_no_random_augmentation
from vitrail.train.distributed import Ranks
from vitrail.train.optim import freeze_all_but_last_blocks
from vitrail.train.plan import Plan
from vitrail.train.request import ModelAndData, Request, create_model_for_data, load_model_for_data
from vitrail.train.run_folder import RunFolder
from vitrail.train.teacher import Teacher, TeacherView

INGREDIENT_OFF_VALUES: Mapping[str, Any] = {  # every ingredient, and the value at which it is not there
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
    unchanged_text: str = "the recipe as it is"  # said where nothing differs

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
    """A training, and its ingredients; `without` and `replaced` make rows of it."""

    def __init__(self, asked: Request) -> None:
        self.request = asked
        self.data = asked.open_data()
        self.jobs = dict[str, ModelAndData]()
        full = drop_unused_teacher(asked)
        self.job = self.check_request(full)
        self.full_settings = collect_settings(full, self.job)
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
        """With other settings, or fields of the model, by their names."""
        name = "-".join(f"{each}-{format_value(value)}" for each, value in values.items())
        row = self.build_row(make_folder_name(name), self.change_request(values))
        if not row.changes:
            given = ",".join(f"{each}={format_value(value)}" for each, value in values.items())
            raise ConfigError(f"{given} is what recipe {self.request.recipe.name} has; expected another value")
        return row

    def build_rows(
        self, without: Sequence[str], replaced: Sequence[Mapping[str, Any]], *, each: bool = False
    ) -> list[AblationRow]:
        """The full row first; with `each` one without each ingredient that there is."""
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
        """That the teacher can teach every row, before hours are spent on some."""
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
        at_model = [each.name for each in fields(self.job.model.config)]
        for name in values:
            if name not in (*SETTING_NAMES, *at_model):
                raise unknown_name_error(
                    "setting or model field", name, (*SETTING_NAMES, *at_model), synonyms=FOREIGN_SETTING_NAMES
                )
            if name == "seed":
                raise ConfigError(f"seed={values[name]} in a row; expected --seeds, which is for all of them")
            if name in DISTILLATION_SETTINGS and self.request.teacher is None:
                raise ConfigError(f"{name}={values[name]} without a teacher; expected --teacher, a trained model")
        settings = {name: value for name, value in values.items() if name in SETTING_NAMES}
        if "epochs" in settings and "minutes" not in settings:
            settings["minutes"] = None  # a budget gives way, as on the command line
        others = {name: value for name, value in values.items() if name not in SETTING_NAMES}
        return replace(self.request, recipe=self.request.recipe.with_settings({**settings, "fields": others}))

    def request_from_scratch(self) -> Request:
        """The checkpoint's architecture and preprocessing, at starting weights."""
        config = json_round_trip(asdict(self.job.model.config))
        del config["classes"]  # the data's
        near, _ = find_nearest_preset(self.job.family, self.job.model.config)
        name = self.request.recipe.model or near or next(iter(self.job.family.presets))  # every field is replaced
        seen = json_round_trip(asdict(self.job.preprocessing))
        recipe = self.request.recipe.with_settings({"model": name, "fields": config, "preprocessing": seen})
        return replace(self.request, init=None, recipe=recipe)

    def check_request(self, request: Request) -> ModelAndData:
        """What the request comes to, without its weights where they are not on disk; refused if it could not begin."""
        recipe = request.recipe
        key = json.dumps(
            [request.init, recipe.model, json_round_trip(recipe.fields), json_round_trip(recipe.preprocessing)]
        )
        if key not in self.jobs:
            with warnings.catch_warnings():  # the run warns
                warnings.simplefilter("ignore")
                self.jobs[key] = (
                    load_model_for_data(request, self.data) if request.init else build_on_meta(request, self.data)
                )
        job = self.jobs[key]
        Plan(
            model=job.model,
            data=job.data,
            recipe=recipe,
            preprocessing=job.preprocessing,
            device=torch.device("cpu"),
            ranks=Ranks(),
        )
        freeze_all_but_last_blocks(job.model, recipe.optimization.train_blocks)
        if request.teacher is not None:
            check_distillation(recipe, job.model)
        if request.teacher_cache is not None:
            check_no_random_augmentation(recipe)
        return job


def build_on_meta(request: Request, data: DatasetSplits) -> ModelAndData:
    with torch.device("meta"):
        return create_model_for_data(request.recipe, data, request.trusted)


def drop_unused_teacher(request: Request) -> Request:
    """Without the teacher that it does not listen to."""
    if request.recipe.distillation.distill == "none":
        return replace(request, teacher=None, teacher_cache=None)
    return request


def collect_settings(request: Request, job: ModelAndData) -> dict[str, Any]:
    """Everything that rows may differ in, by flat names: settings, what the model came to, where it starts."""
    flat = request.recipe.to_flat_dict()
    found = {name: flat[name] for name in SETTING_NAMES if name != "seed"}
    if request.teacher is None:
        found["distill"] = "none"
    return {**found, **asdict(job.model.config), "init": request.init}


def json_round_trip(value: Any) -> Any:
    """As a file gives it back."""
    return json.loads(json.dumps(value))


def make_folder_name(text: str) -> str:
    """Text as the name of a folder; a long one is cut, and told apart by its sum."""
    name = re.sub(r"[^\w.+]+", "-", text.replace("_", "-")).strip("-.")
    return name if len(name) <= MAX_ROW_NAME_LENGTH else f"{name[: MAX_ROW_NAME_LENGTH - 9]}-{crc32(text.encode()):08x}"


@dataclass(frozen=True, kw_only=True)
class AblationRun:
    row: AblationRow
    seed: int
    folder: Path
    request: Request
    state: Literal["new", "stopped", "finished"]


def list_ablation_runs(
    rows: Sequence[AblationRow], seeds: Sequence[int], folder: Path, teacher: Teacher | None = None
) -> list[AblationRun]:
    """All trainings, row by row, with how far each is on disk."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the runs")
    if (folder / PLAN_FILE).exists():
        raise CheckpointError(f"{folder} is a run itself; expected a folder for several")
    runs = list[AblationRun]()
    for row in rows:
        for seed in seeds:
            place, request = folder / f"{row.name}-{seed}", row.request_for_seed(seed)
            state = find_run_state(place, request)
            if state != "new" and request.teacher is not None and teacher is not None:
                check_same_teacher(place, teacher)
            runs.append(AblationRun(row=row, seed=seed, folder=place, request=request, state=state))
    return runs


def find_run_state(folder: Path, request: Request) -> Literal["new", "stopped", "finished"]:
    """How far a row's folder is; one that other settings made is refused, if it has taken a step."""
    if not (folder / PLAN_FILE).exists():
        RunFolder.check_folder_is_free(folder)
        return "new"
    run = RunFolder(folder)
    before = Request.from_json(run.load_plan().get("request"), str(folder))
    apart = describe_difference(before, request)
    if apart and not (run.list_checkpoints() or run.read_records() or is_run_finished(folder)):
        return "new"
    if apart:
        raise ConfigError(f"{folder} was made by other settings: {apart}; expected the same, or another --out")
    return "finished" if is_run_finished(folder) else "stopped"


def check_same_teacher(folder: Path, teacher: Teacher) -> None:
    """A table is of one teacher, also where its file has changed since some rows were trained."""
    before: Any = RunFolder(folder).load_plan().get("teacher")
    if isinstance(before, dict) and before.get("fingerprint") != teacher.fingerprint():
        raise ConfigError(f"{folder} learnt from another teacher; expected the same: put it back, or another --out")


def describe_difference(before: Request, now: Request) -> str:
    """The first thing that two runs were told differently, if there is one."""
    old, new = flatten_request(before), flatten_request(now)
    for name in dict.fromkeys((*new, *old)):
        if old.get(name) != new.get(name):
            return f"{name} {format_value(old.get(name))}, now {format_value(new.get(name))}"
    return ""


def flatten_request(request: Request) -> dict[str, Any]:
    told = json_round_trip(request.to_json())
    recipe = told.pop("recipe")
    seen = {f"preprocessing {name}": value for name, value in recipe.pop("preprocessing").items()}
    fields = recipe.pop("fields")
    for size in [name for name in ("image_size", "patch_size") if isinstance(fields.get(name), int)]:
        fields[size] = 2 * [fields[size]]  # as a flag says it
    return {**told, **fields, **seen, **recipe}
