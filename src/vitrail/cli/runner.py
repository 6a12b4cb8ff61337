"""What train, distill and ablate do once they know what is asked: one sitting of a run, from folder to last line."""

import ctypes
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any, Literal

import torch

from vitrail import __version__
from vitrail.checkpoint.files.raw_contents import CONFIG_FILE
from vitrail.checkpoint.run_files import CURVES_FILE, MODEL_FOLDER
from vitrail.checkpoint.writing import write
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.runs import format_duration
from vitrail.data.image_cache import CachedDataset, cache_if_small
from vitrail.data.loader import ShuffledSampler
from vitrail.errors import CheckpointError, ConfigError, describe_error
from vitrail.files import make_folder
from vitrail.machine import count_cores, restore_threads
from vitrail.train.callbacks import Callback, CallbackList, TensorBoardCallback, TerminalCallback, TrainingStart
from vitrail.train.distillation import build_distillation, check_no_random_augmentation
from vitrail.train.distributed import Ranks, join_process_group, resolve_device
from vitrail.train.fit import fit
from vitrail.train.plan import Plan
from vitrail.train.plots import plot_training_curves
from vitrail.train.recipe import Recipe, list_setting_names
from vitrail.train.request import ModelAndData, Request, open_model_and_data
from vitrail.train.run_folder import RunFolder, step_from_file_name
from vitrail.train.run_list import get_recorded_name
from vitrail.train.teacher import Teacher
from vitrail.train.thread_choice import choose_threads, get_recorded_threads
from vitrail.train.throughput import Throughput, measure_throughput

RUNS_FOLDER = Path("runs")
MAX_LISTED_IMAGES = 10  # skipped pictures that are named


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What belongs to this machine and sitting, not to the run."""

    device: str = "auto"
    workers: int | None = None
    threads: int | Literal["auto"] = "auto"
    strict: bool = False


def start_run(request: Request, out: Path | None, runtime: Runtime, *, start: float, dry_run: bool) -> None:
    """A new run, or only what it would be."""
    keep_freed_memory()
    if out is not None and not dry_run:
        RunFolder.check_folder_is_free(out)  # at once, and again when it is made
    with join_process_group() as team, restore_threads():
        recipe, job = request.recipe, prepare_job(request, team)
        setup, taught_by = build_setup(job, request, runtime, team, dry_run=dry_run)
        choice = choose_threads(setup, runtime.threads)
        torch.set_num_threads(choice.threads)
        print_on_first_rank(team, *describe_run(job, request, setup))
        print_on_first_rank(team, str(choice))
        steps, minutes = setup.steps, recipe.loop.minutes
        if minutes is not None or dry_run:
            print_on_first_rank(team, "speed  is being measured …")
            speed = measure_throughput(setup)
            if minutes is not None:
                left = team.broadcast_object(minutes * 60 - (monotonic() - start))
                steps = speed.steps_within(left, setup.sampler.steps_per_epoch, recipe.loop.eval_every)
            print_on_first_rank(team, *describe_speed(speed, steps, setup.sampler, recipe))
        if dry_run:
            return
        run = team.broadcast_object(RunFolder(out or create_run_folder(job, recipe)) if team.is_first else None)
        if team.is_first:
            RunFolder.check_folder_is_free(run.folder)
        with run.hold_lock() if team.is_first else nullcontext():
            if team.is_first:
                RunFolder.create(run.folder, build_run_plan(job, request, setup, steps, taught_by))
            print_on_first_rank(
                team, f"run    {run.folder}: {steps} steps, {steps / setup.sampler.steps_per_epoch:.4g} epochs"
            )
            train_and_save(run, request, job, setup, steps, runtime)


def resume_run(folder: Path, runtime: Runtime, code: Sequence[str] = ()) -> None:
    """A run from its last checkpoint, or from its beginning if there is none yet.

    `code` is the code named by the user: an outside model in run.json is imported only if it is listed there.
    """
    keep_freed_memory()
    run = RunFolder(folder)
    with join_process_group() as team, restore_threads():
        if is_training_complete(run, run.load_plan()):
            print_on_first_rank(
                team, f"run    {folder} is finished: vitrail eval {folder}, or a new one from it with --init {folder}"
            )
            return
        with run.hold_lock() if team.is_first else nullcontext():
            resume_locked_run(run, runtime, team, code)


def resume_locked_run(run: RunFolder, runtime: Runtime, team: Ranks, code: Sequence[str]) -> None:
    folder, plan = run.folder, run.load_plan()
    request, steps = (
        Request.from_json(plan.get("request"), str(folder)).with_trusted_code(code, str(folder)),
        plan.get("steps"),
    )
    if type(steps) is not int or steps < 1:
        raise CheckpointError(f"{folder} is of {steps!r} steps; expected a number, as `vitrail train` wrote it")
    job = prepare_job(request, team)
    torch.set_num_threads(get_recorded_threads(plan, runtime.threads, str(folder)))
    setup, taught_by = build_setup(job, request, runtime, team)
    now = build_run_plan(job, request, setup, steps, taught_by)
    if request.trusted is not None:  # the user may name the same code by another path
        now["model"]["name"] = get_recorded_name(plan.get("model"))
    for what in ("model", "data", "teacher"):
        if apart := find_differences(plan.get(what), now[what]):
            raise CheckpointError(
                f"cannot resume {folder}: the {what} has changed ({apart[0]}); restore it, or start a new run"
            )
    plan.setdefault("threads", now["threads"])  # of a run from before it was recorded: torch's default
    for what in ("torch", "simplejpeg", "world", "threads"):
        if plan.get(what) != now[what]:
            print_on_first_rank(
                team,
                f"note   {what} was {plan.get(what)} and is {now[what]}: resuming, but not bit-identical",
            )
    train_and_save(run, request, job, setup, steps, runtime, resumed=True)


def build_setup(
    job: ModelAndData, request: Request, runtime: Runtime, team: Ranks, *, dry_run: bool = False
) -> tuple[Plan, dict[str, str] | None]:
    """All that a training needs, and for run.json whom it learns from."""
    setup = Plan(
        model=job.model,
        data=job.data,
        recipe=request.recipe,
        preprocessing=job.preprocessing,
        device=resolve_device(runtime.device, team),
        ranks=team,
        workers=choose_worker_count(job, runtime, team),
    )
    if request.teacher is None:
        return setup, None
    if request.teacher_cache is not None:
        check_no_random_augmentation(request.recipe)
    pictures = len(job.data.train or ()) if request.teacher_cache and team.is_first and not dry_run else 0
    with progress_bar(pictures, "asking the teacher") as advance:
        objective, lessons = build_distillation(
            Teacher.from_name(request.teacher, **request.teacher_fields) if request.teacher_fields else request.teacher,
            job.model,
            job.data,
            request.recipe,
            job.preprocessing,
            setup.device,
            ranks=team,
            cache_folder=None if request.teacher_cache is None or dry_run else Path(request.teacher_cache),
            progress=advance,
        )
    if lessons is None:
        return setup, None
    print_on_first_rank(team, *(f"note   {note}" for note in lessons.notes))
    who = {"name": request.teacher, "fingerprint": lessons.teacher.fingerprint()}
    return replace(setup, objective=objective), who


def keep_freed_memory() -> None:
    """Lets glibc keep what tensors free, where it would return it and fault it in again: 3 to 5 % of a step."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
            libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that it takes


def is_training_complete(run: RunFolder, plan: Mapping[str, Any]) -> bool:
    states = run.list_checkpoints()
    return (
        bool(states)
        and step_from_file_name(states[-1]) == plan.get("steps")
        and (run.folder / MODEL_FOLDER / CONFIG_FILE).exists()
    )


def train_and_save(
    run: RunFolder,
    request: Request,
    job: ModelAndData,
    setup: Plan,
    steps: int,
    runtime: Runtime,
    *,
    resumed: bool = False,
) -> None:
    """Trains to the end, and leaves the model, the curves and a last word."""
    team = setup.ranks
    result = fit(
        job.model,
        job.data,
        request.recipe,
        objective=setup.objective,
        preprocessing=job.preprocessing,
        run=run,
        steps=steps,
        device=runtime.device,
        workers=setup.workers,
        strict=runtime.strict,
        ranks=team,
        callback=build_callbacks(team, resumed=resumed),
    )
    if not team.is_first:
        return
    measured = None if result.evaluation is None else {"top1": result.evaluation.top1, "top5": result.evaluation.top5}
    write(
        result.model,
        run.folder / MODEL_FOLDER,
        preprocessing=job.preprocessing,
        labels=job.data.classes,
        provenance={**job.provenance, "data": job.data.name, "recipe": request.recipe.name, "validation": measured},
        resampling=job.resampling,
        family=job.family,
    )
    print_on_first_rank(team, *describe_skipped_images(result.skipped))
    drawn = ""
    if find_spec("matplotlib"):
        plot_training_curves({run.folder.name: run.read_records()}, run.folder / CURVES_FILE)
        drawn = f", curves in {run.folder / CURVES_FILE}"
    if result.evaluation is not None:
        print_on_first_rank(
            team, f"done   validation top-1 {result.evaluation.top1:.2%}, loss {result.evaluation.loss:.4f}{drawn}"
        )
    print_on_first_rank(
        team,
        f"model  {run.folder / MODEL_FOLDER}: vitrail eval {quote(str(run.folder))} --data {quote(request.data)}, "
        f"vitrail predict {quote(str(run.folder))} photo.jpg, "
        f'or in Python vitrail.Predictor("{run.folder / MODEL_FOLDER}").predict("photo.jpg")',
    )


def prepare_job(request: Request, team: Ranks) -> ModelAndData:
    """The job, its pictures held in memory if they fit."""
    job = open_model_and_data(request)
    for note in job.data.notes:
        print_on_first_rank(team, f"note   {note}")
    with progress_bar(None if team.is_first else 0, "decoding") as advance:
        return job.with_data(cache_if_small(job.data, request.cache * 1e9, lambda: advance(1)))


def choose_worker_count(job: ModelAndData, runtime: Runtime, team: Ranks) -> int:
    """None where pictures are in memory, else as many processes as cores, shared by the ranks of a machine."""
    if runtime.workers is not None:
        if runtime.workers < 0:
            raise ConfigError(f"--workers {runtime.workers}; expected at least 0")
        return runtime.workers
    in_memory = isinstance(job.data.train, CachedDataset) or hasattr(job.data.train, "images")
    return 0 if in_memory else max(1, min(8, count_cores() // team.world_size))


def build_callbacks(team: Ranks, *, resumed: bool = False) -> Callback:
    if not team.is_first:
        return CallbackList()
    board: list[Callback] = [TensorBoardCallback()] if find_spec("tensorboard") else []
    return ResumeCallbackList([TerminalCallback(), *board]) if resumed else CallbackList([TerminalCallback(), *board])


class ResumeCallbackList(CallbackList):
    """Prints the step from which a run resumes, known once its checkpoint is verified."""

    def on_start(self, start: TrainingStart) -> None:
        where = f"step-{start.steps_done:08}" if start.steps_done else "its beginning"
        print(f"run    {start.folder}: resuming from {where} of {start.steps} steps", flush=True)
        super().on_start(start)


def describe_run(job: ModelAndData, request: Request, setup: Plan) -> list[str]:
    data, config, recipe = job.data, job.model.config, request.recipe
    parameters = sum(weight.numel() for weight in job.model.parameters())
    trained, validated = len(data.train or ()), len(data.val or ())
    size = "×".join(map(str, config.image_size))
    begun = f"from {request.init}" if request.init else f"from scratch, seed {recipe.loop.seed}"
    default = Recipe().to_flat_dict()
    hidden = (*HIDDEN_SETTINGS, *(list_setting_names("distillation") if request.teacher is None else ()))
    said = [
        f"{name} {value}"
        for name, value in recipe.to_flat_dict().items()
        if value != default[name] and name not in hidden
    ]
    return [
        f"data   {data.name}: {trained} pictures to train on, {validated} to validate, {len(data.classes)} classes",
        f"model  {recipe.model or job.family.name}, {parameters / 1e6:.2f} M parameters, {size} pixels, {begun}",
        *([f"teacher {request.teacher}, {recipe.distillation.distill} distillation"] if request.teacher else []),
        f"recipe {recipe.name}: {', '.join(said)}",
        f"device {setup.device}, {setup.workers} workers",
    ]


HIDDEN_SETTINGS = ("name", "model", "fields", "preprocessing", "seed")


def describe_speed(speed: Throughput, steps: int, order: ShuffledSampler, recipe: Recipe) -> list[str]:
    total = speed.estimate_seconds(steps, order.steps_per_epoch, recipe.loop.eval_every)
    return [
        f"speed  {recipe.loop.batch / speed.step_seconds:.1f} images/s, {speed.step_seconds:.3f} s a step of "
        f"{recipe.loop.batch}; "
        f"{speed.evaluation_seconds:.1f} s an evaluation; memory {speed.peak_bytes / 1e9:.1f} GB",
        f"time   {steps} steps ({steps / order.steps_per_epoch:.4g} epochs) take about {format_duration(total)}",
    ]


def build_run_plan(
    job: ModelAndData, request: Request, setup: Plan, steps: int, taught_by: dict[str, str] | None
) -> dict[str, Any]:
    """run.json: what was asked for, and all that it came to."""
    data, recipe = job.data, request.recipe
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "simplejpeg": find_spec("simplejpeg") is not None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "request": request.to_json(),
        "data": {
            "name": data.name,
            "train": len(data.train or ()),
            "val": len(data.val or ()),
            "classes": list(data.classes),
        },
        "model": {
            "name": recipe.model or job.family.name,
            "family": job.family.name,
            "config": json.loads(json.dumps(asdict(job.model.config))),  # tuples as a file gives them back
            "preprocessing": json.loads(json.dumps(asdict(job.preprocessing))),
        },
        "init": request.init,
        "teacher": taught_by,
        "recipe": request.to_json()["recipe"],
        "epochs": steps / setup.sampler.steps_per_epoch,
        "steps": steps,
        "steps_per_epoch": setup.sampler.steps_per_epoch,
        "world": setup.ranks.world_size,
        "threads": torch.get_num_threads(),
    }


def create_run_folder(job: ModelAndData, recipe: Recipe) -> Path:
    """runs/DATA-RECIPE-1, or the next number that is free; created at once, so that no other process takes it."""
    name = f"{Path(job.data.name).name or 'data'}-{recipe.name}"
    make_folder(RUNS_FOLDER)
    for number in count(1):
        folder = RUNS_FOLDER / f"{name}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot make the folder {folder}: {describe_error(error)}") from None
        return folder
    raise AssertionError("unreachable")


def describe_skipped_images(skipped: tuple[str, ...]) -> list[str]:
    if not skipped:
        return []
    more = f" … and {len(skipped) - MAX_LISTED_IMAGES} more" if len(skipped) > MAX_LISTED_IMAGES else ""
    lines = [f"       {reason}" for reason in skipped[:MAX_LISTED_IMAGES]]
    return [f"skipped {len(skipped)} pictures that could not be read:", *lines, *([more] if more else [])]


def find_differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What is no longer as run.json has it."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [each for key in now for each in find_differences(before.get(key), now[key], str(key))]
    return [] if before == now else [f"{name} {shorten_text(before)}, now {shorten_text(now)}"]


def shorten_text(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}…"


def print_on_first_rank(team: Ranks, *lines: str) -> None:
    if team.is_first:
        for line in lines:
            print(line, flush=True)
