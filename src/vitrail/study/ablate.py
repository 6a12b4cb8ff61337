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

from vitrail.data.datasets import Data
from vitrail.errors import CheckpointError, ConfigError, unknown
from vitrail.inspection.checkpoint import nearest
from vitrail.models import family
from vitrail.train import recipe as recipes
from vitrail.train.distill import check_distillation, check_fixed
from vitrail.train.distributed import Team
from vitrail.train.job import Job, Request, begun, continued
from vitrail.train.optim import freeze
from vitrail.train.run import PLAN, Run
from vitrail.train.runs import is_finished
from vitrail.train.setup import Setup
from vitrail.train.teacher import Lessons, Teacher

OFF: Mapping[str, Any] = {  # every ingredient, and the value at which it is not there
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
OTHER_NAMES = {"randaugment": ("policy", "rand"), "autoaugment": ("policy", "auto"), "pretraining": ("init", None)}
ELSEWHERE = {**recipes.ELSEWHERE, **family.ELSEWHERE, "drop": "dropout", "drop_path": "stochastic_depth"}
SETTINGS = tuple(each.name for _, each in recipes.settings())
DISTILLATION = recipes.names("distillation")
LONGEST = 80  # characters of a row's name


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: trainings that differ in nothing but the seed."""

    name: str
    request: Request  # at the first seed
    # what differs, by name: the full row's value and its own
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    alike: str = "the recipe as it is"  # said where nothing differs

    def at_seed(self, seed: int) -> Request:
        return replace(self.request, recipe=self.request.recipe.changed({"seed": seed}))

    @property
    def said(self) -> str:
        changed = [f"{name} {shown(before)} → {shown(now)}" for name, (before, now) in self.changes.items()]
        return ", ".join(changed) or self.alike


def shown(value: object) -> str:
    if isinstance(value, bool | None):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class Ablation:
    """A training, and its ingredients; `without` and `replaced` make rows of it."""

    def __init__(self, asked: Request) -> None:
        self.asked = asked
        self.data = asked.opened_data()
        self.jobs = dict[str, Job]()
        full = settled(asked)
        self.job = self.checked(full)
        self.facts = facts(full, self.job)
        self.full = Row(name="full", request=full)

    def present(self) -> list[str]:
        """The ingredients that the training has."""
        return [name for name in OFF if self.has(name)]

    def has(self, name: str) -> bool:
        name, kind = OTHER_NAMES.get(name, (name, None))
        value = self.facts.get(name, OFF[name])
        return value != OFF[name] and kind in (None, value)

    def without(self, ingredient: str) -> Row:
        word = ingredient.replace("-", "_").lower()
        known = (*OFF, *OTHER_NAMES)
        if word not in known:
            raise unknown("ingredient", ingredient, known, also=ELSEWHERE)
        if not self.has(word):
            some = ", ".join(self.present()) or "nothing, it has no ingredients"
            raise ConfigError(f"{word} is already off in recipe {self.asked.recipe.name}; expected one of: {some}")
        name, _ = OTHER_NAMES.get(word, (word, None))
        request = self.from_scratch() if name == "init" else self.changed({name: OFF[name]})
        return self.row(f"without-{word.replace('_', '-')}", request)

    def replaced(self, values: Mapping[str, Any]) -> Row:
        """With other settings, or fields of the model, by their names."""
        name = "-".join(f"{each}-{shown(value)}" for each, value in values.items())
        row = self.row(file_name(name), self.changed(values))
        if not row.changes:
            given = ",".join(f"{each}={shown(value)}" for each, value in values.items())
            raise ConfigError(f"{given} is what recipe {self.asked.recipe.name} has; expected another value")
        return row

    def rows(self, without: Sequence[str], replaced: Sequence[Mapping[str, Any]], *, each: bool = False) -> list[Row]:
        """The full row first; with `each` one without each ingredient that there is."""
        rows = [self.full, *map(self.without, without)]
        if each:
            told = [dict(row.changes) for row in rows]
            rows += [row for row in map(self.without, self.present()) if dict(row.changes) not in told]
        rows += map(self.replaced, replaced)
        for number, row in enumerate(rows):
            for other in rows[:number]:
                if row.name == other.name or row.changes == other.changes:
                    raise ConfigError(f"{row.name} is the same as {other.name} ({row.said}); expected it once")
        return rows

    def check_lessons(self, rows: Sequence[Row], teacher: Teacher, device: torch.device) -> None:
        """That the teacher can teach every row, before hours are spent on some."""
        taught = [row.request for row in rows if row.request.teacher is not None]
        for seen in dict.fromkeys(self.checked(request).preprocessing for request in taught):
            Lessons(teacher, self.data, seen, device)

    def row(self, name: str, request: Request) -> Row:
        request = settled(request)
        now = facts(request, self.checked(request))
        names = dict.fromkeys((*self.facts, *now))
        pairs = {each: (self.facts.get(each), now.get(each)) for each in names}
        return Row(name=name, request=request, changes={n: pair for n, pair in pairs.items() if pair[0] != pair[1]})

    def changed(self, values: Mapping[str, Any]) -> Request:
        at_model = [each.name for each in fields(self.job.model.config)]
        for name in values:
            if name not in (*SETTINGS, *at_model):
                raise unknown("setting or model field", name, (*SETTINGS, *at_model), also=ELSEWHERE)
            if name == "seed":
                raise ConfigError(f"seed={values[name]} in a row; expected --seeds, which is for all of them")
            if name in DISTILLATION and self.asked.teacher is None:
                raise ConfigError(f"{name}={values[name]} without a teacher; expected --teacher, a trained model")
        settings = {name: value for name, value in values.items() if name in SETTINGS}
        if "epochs" in settings and "minutes" not in settings:
            settings["minutes"] = None  # a budget gives way, as on the command line
        others = {name: value for name, value in values.items() if name not in SETTINGS}
        return replace(self.asked, recipe=self.asked.recipe.changed({**settings, "fields": others}))

    def from_scratch(self) -> Request:
        """The checkpoint's architecture and preprocessing, at starting weights."""
        config = plain(asdict(self.job.model.config))
        del config["classes"]  # the data's
        near, _ = nearest(self.job.family, self.job.model.config)
        name = self.asked.recipe.model or near or next(iter(self.job.family.presets))  # every field is replaced
        seen = plain(asdict(self.job.preprocessing))
        recipe = self.asked.recipe.changed({"model": name, "fields": config, "preprocessing": seen})
        return replace(self.asked, init=None, recipe=recipe)

    def checked(self, request: Request) -> Job:
        """What the request comes to, without its weights where they are not on disk; refused if it could not begin."""
        recipe = request.recipe
        key = json.dumps([request.init, recipe.model, plain(recipe.fields), plain(recipe.preprocessing)])
        if key not in self.jobs:
            with warnings.catch_warnings():  # the run warns
                warnings.simplefilter("ignore")
                self.jobs[key] = continued(request, self.data) if request.init else on_meta(request, self.data)
        job = self.jobs[key]
        Setup(
            model=job.model,
            data=job.data,
            recipe=recipe,
            preprocessing=job.preprocessing,
            device=torch.device("cpu"),
            team=Team(),
        )
        freeze(job.model, recipe.optimization.train_blocks)
        if request.teacher is not None:
            check_distillation(recipe, job.model)
        if request.teacher_cache is not None:
            check_fixed(recipe)
        return job


def on_meta(request: Request, data: Data) -> Job:
    with torch.device("meta"):
        return begun(request.recipe, data, request.trusted)


def settled(request: Request) -> Request:
    """Without the teacher that it does not listen to."""
    if request.recipe.distillation.distill == "none":
        return replace(request, teacher=None, teacher_cache=None)
    return request


def facts(request: Request, job: Job) -> dict[str, Any]:
    """Everything that rows may differ in, by flat names: settings, what the model came to, where it starts."""
    flat = request.recipe.flat()
    found = {name: flat[name] for name in SETTINGS if name != "seed"}
    if request.teacher is None:
        found["distill"] = "none"
    return {**found, **asdict(job.model.config), "init": request.init}


def plain(value: Any) -> Any:
    """As a file gives it back."""
    return json.loads(json.dumps(value))


def file_name(text: str) -> str:
    """Text as the name of a folder; a long one is cut, and told apart by its sum."""
    name = re.sub(r"[^\w.+]+", "-", text.replace("_", "-")).strip("-.")
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{crc32(text.encode()):08x}"


@dataclass(frozen=True, kw_only=True)
class OneRun:
    row: Row
    seed: int
    folder: Path
    request: Request
    state: Literal["new", "stopped", "finished"]


def runs_of(rows: Sequence[Row], seeds: Sequence[int], folder: Path, teacher: Teacher | None = None) -> list[OneRun]:
    """All trainings, row by row, with how far each is on disk."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected a folder for the runs")
    if (folder / PLAN).exists():
        raise CheckpointError(f"{folder} is a run itself; expected a folder for several")
    runs = list[OneRun]()
    for row in rows:
        for seed in seeds:
            place, request = folder / f"{row.name}-{seed}", row.at_seed(seed)
            state = state_of(place, request)
            if state != "new" and request.teacher is not None and teacher is not None:
                check_teacher(place, teacher)
            runs.append(OneRun(row=row, seed=seed, folder=place, request=request, state=state))
    return runs


def state_of(folder: Path, request: Request) -> Literal["new", "stopped", "finished"]:
    """How far a row's folder is; one that other settings made is refused, if it has taken a step."""
    if not (folder / PLAN).exists():
        Run.check_free(folder)
        return "new"
    run = Run(folder)
    before = Request.from_json(run.plan().get("request"), str(folder))
    apart = difference(before, request)
    if apart and not (run.states() or run.records() or is_finished(folder)):
        return "new"
    if apart:
        raise ConfigError(f"{folder} was made by other settings: {apart}; expected the same, or another --out")
    return "finished" if is_finished(folder) else "stopped"


def check_teacher(folder: Path, teacher: Teacher) -> None:
    """A table is of one teacher, also where its file has changed since some rows were trained."""
    before: Any = Run(folder).plan().get("teacher")
    if isinstance(before, dict) and before.get("fingerprint") != teacher.fingerprint():
        raise ConfigError(f"{folder} learnt from another teacher; expected the same: put it back, or another --out")


def difference(before: Request, now: Request) -> str:
    """The first thing that two runs were told differently, if there is one."""
    old, new = flattened(before), flattened(now)
    for name in dict.fromkeys((*new, *old)):
        if old.get(name) != new.get(name):
            return f"{name} {shown(old.get(name))}, now {shown(new.get(name))}"
    return ""


def flattened(request: Request) -> dict[str, Any]:
    told = plain(request.to_json())
    recipe = told.pop("recipe")
    seen = {f"preprocessing {name}": value for name, value in recipe.pop("preprocessing").items()}
    fields = recipe.pop("fields")
    for size in [name for name in ("image_size", "patch_size") if isinstance(fields.get(name), int)]:
        fields[size] = 2 * [fields[size]]  # as a flag says it
    return {**told, **fields, **seen, **recipe}
