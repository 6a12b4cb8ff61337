"""Runs from start to finish: a request becomes a plan, is trained, and leaves a model and curves.

This is what `vitrail train`, `distill` and `pretrain` call. From Python: start_run(Request(data="photos", recipe=…)).
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

from vitrail.base.errors import ConfigError
from vitrail.base.kinds import find_kind
from vitrail.base.machine import count_cores, restore_threads
from vitrail.base.text import format_count, format_duration
from vitrail.checkpoint.run_files import CURVES_FILE, FIGURES_FOLDER, MODEL_FOLDER
from vitrail.distributed import Ranks, join_process_group, resolve_device
from vitrail.models.catalog.external_families import describe_code
from vitrail.recipes.recipe import Recipe, list_setting_names, open_recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import format_setting
from vitrail.tasks.metric import format_metrics
from vitrail.tasks.task import BuildContext, Source
from vitrail.train.callbacks import Callback, CallbackList, TensorBoardCallback, TerminalCallback, TrainingStart
from vitrail.train.loop import run_training
from vitrail.train.plan import Plan, Runtime, plan_request
from vitrail.train.plots import choose_metrics, plot_training_curves
from vitrail.train.run_folder import RunFolder, create_numbered_folder
from vitrail.train.speed_choice import choose_speed
from vitrail.train.throughput import Throughput, fix_steps_by_minutes, measure_throughput

MAX_LISTED_EXAMPLES = 10  # skipped examples that are named
FINETUNE_RECIPE = "finetune"  # of `then`
HIDDEN_SETTINGS = ("name", "model", "fields", "preprocessing", "seed")  # of the line that describes a recipe


def start_run(
    request: Request,
    folder: Path | None = None,
    runtime: Runtime | None = None,
    *,
    start: float | None = None,
    dry_run: bool = False,
) -> Path | None:
    """Start a new run in a folder, by default a numbered one in runs/. A dry run measures speed and writes nothing.

    A budget of minutes counts from `start`, a value of `monotonic()`. Returns the folder; None after a dry run.
    """
    start, runtime = monotonic() if start is None else start, runtime or Runtime()
    keep_freed_memory()
    if folder is not None and not dry_run:
        RunFolder.check_folder_is_free(folder)  # at once, and again when it is made
    with join_process_group() as ranks, restore_threads():
        runtime = runtime.for_rank(ranks)
        plan = prepare_plan(request, runtime, ranks, dry_run=dry_run)
        check_follow_up(request, plan, folder)
        plan, choices = choose_speed(plan, runtime.threads)
        runtime.report_lines(*describe_plan(plan, request), *choices)
        plan.task.initialize(plan.source, plan.recipe)  # before there is a folder: an error leaves nothing
        if request.recipe.loop.minutes is not None or dry_run:
            runtime.report("speed  measuring …")
            speed = measure_throughput(plan)
            plan = fix_steps_by_minutes(plan, start, speed)
            runtime.report_lines(*describe_speed(speed, plan))
        if dry_run:
            return None
        if folder is None and ranks.is_first:
            folder = create_numbered_folder(plan.source.name, request.recipe.name)
        run = RunFolder(ranks.broadcast_object(folder))
        if ranks.is_first:
            RunFolder.check_folder_is_free(run.folder)
        with run.hold_lock() if ranks.is_first else nullcontext():
            if ranks.is_first:
                RunFolder.create(run.folder, plan.to_json())
            runtime.report(f"run    {run.folder}: {format_length(plan)}")
            train_and_save(run, plan, runtime)
        return run.folder


def check_follow_up(request: Request, plan: Plan, folder: Path | None) -> None:
    """Refuse data without classes, or a folder in use, before the first step if a probe or fine-tuning follows."""
    if request.then is not None and len(plan.source.to_json().get("classes", ())) < 2:
        raise ConfigError(
            f"`then` is {request.then}, which needs images of at least two classes, but {plan.source.name} has "
            f"{'one' if plan.source.to_json().get('classes') else 'none'}; put the images of each class in a folder of "
            "its own, or leave out `then`"
        )
    if request.then == "finetune" and folder is not None:
        RunFolder.check_folder_is_free(name_finetuned_run(folder))


def name_finetuned_run(folder: Path) -> Path:
    """The folder of the run that fine-tunes the model of a pre-trained run."""
    return folder.with_name(f"{folder.name}-finetune")


def prepare_plan(request: Request, runtime: Runtime, ranks: Ranks, *, dry_run: bool = False) -> Plan:
    """The plan of a request on this machine, with its device and workers."""
    context = BuildContext(
        device=resolve_device(runtime.device, ranks),
        ranks=ranks,
        report=runtime.report,
        progress=runtime.progress,
        dry_run=dry_run,
    )
    plan = plan_request(request, context)
    workers = choose_worker_count(plan.source, runtime.workers, ranks)
    return replace(plan, workers=workers, strict=runtime.strict)


def choose_worker_count(source: Source, requested: int | None, ranks: Ranks) -> int:
    """By default none if the examples are in memory, else one per core, shared by the ranks of a machine."""
    if requested is not None:
        if requested < 0:
            raise ConfigError(f"`workers` is {requested}; expected at least 0")
        return requested
    return 0 if source.in_memory else max(1, min(8, count_cores() // ranks.world_size))


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it and faulting it in again: 3 to 5% of a step."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
            libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum


def train_and_save(run: RunFolder, plan: Plan, runtime: Runtime, *, resumed: bool = False) -> None:
    """Train to the end; write the model and the curves, and report the result."""
    result = run_training(plan, run, build_callback(plan.ranks, runtime, resumed=resumed))
    if not plan.ranks.is_first:
        return
    evaluation, model_folder = result.evaluation, run.folder / MODEL_FOLDER
    plan.write_model(result.model, model_folder, evaluation)
    curves = run.folder / CURVES_FILE
    records = run.read_records()
    plot_training_curves({run.folder.name: records}, curves, *choose_metrics(plan.task.metrics, records))
    for figure in plan.task.draw_figures(plan.source, plan.device):
        figure.save(run.folder / FIGURES_FOLDER)
    done = (
        evaluation
        and f"done   validation {', '.join(format_metrics(plan.task.metrics, evaluation.metrics))}, curves in {curves}"
    )
    patience = plan.recipe.loop.patience
    stopped = f"stop   after step {result.steps}: not better in {format_count(patience, 'evaluation')}"
    code = find_own_code(plan)
    own_file = "" if code is None else f" and {code.rpartition(':')[0]}"
    runtime.report_lines(
        *([stopped] if result.steps < plan.steps else []),
        *describe_skipped_examples(result.skipped, plan.task.example),
        *([done] if done else []),
        f"model  {model_folder}: {find_kind(plan.task.kind).describe_next_steps(run.folder, model_folder, plan, code)}",
        f"send   {model_folder} ({measure_megabytes(model_folder)}){own_file}: all that others need to use the model",
    )


def measure_megabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:,.1f} MB"


def find_own_code(plan: Plan) -> str | None:
    """FILE.py:PRESET of a model from outside the package, as its folder records it."""
    family = plan.write_options.get("family")
    return None if family is None else describe_code(family, plan.model.config)


def build_callback(ranks: Ranks, runtime: Runtime, *, resumed: bool) -> Callback:
    if not ranks.is_first:
        return CallbackList()
    resume = [ResumeCallback(report=runtime.report)] if resumed else []
    board = [TensorBoardCallback()] if find_spec("tensorboard") else []
    return CallbackList([*resume, TerminalCallback(), *board])


@dataclass(frozen=True, kw_only=True)
class ResumeCallback(CallbackList):
    """Reports the step from which a run resumes, known once its checkpoint is verified."""

    report: Callable[[str], object]

    def on_start(self, start: TrainingStart) -> None:
        where = f"step-{start.steps_done:08}" if start.steps_done else "its beginning"
        self.report(f"run    {start.folder}: resuming from {where} of {start.steps} steps")


def describe_plan(plan: Plan, request: Request) -> list[str]:
    recipe = plan.recipe
    start = f"from {request.init}" if request.init else f"from scratch, seed {recipe.loop.seed}"
    hidden = (*HIDDEN_SETTINGS, *(list_setting_names("distillation") if request.teacher is None else ()))
    default = Recipe().to_flat_dict()
    settings = [
        format_setting(name, value)
        for name, value in recipe.to_flat_dict().items()
        if value != default[name] and name not in hidden and name not in recipe.schedules
    ]
    settings += [format_setting(name, value) for name, value in recipe.schedules.items()]
    chosen = [format_setting(name, value) for name, value in recipe.task.items() if name != "name"]
    return [
        f"data   {plan.source.describe()}",
        f"model  {plan.model_name}, {plan.task.describe()}, {start}",
        *([f"teacher {request.teacher}, {recipe.distillation.distill} distillation"] if request.teacher else []),
        *([f"task   {request.task_name}{': ' * bool(chosen)}{', '.join(chosen)}"] if "name" in recipe.task else []),
        f"recipe {recipe.name}: {', '.join(settings)}",
        f"device {plan.device}, {format_count(plan.workers, 'worker')}",
        *([describe_follow_up(request)] if request.then else []),
    ]


def describe_follow_up(request: Request) -> str:
    if request.then == "probe":
        return "then   probe the features with the labels of the data"
    epochs = format_count(open_recipe(FINETUNE_RECIPE).loop.epochs, "epoch")
    return f"then   fine-tune for {epochs} with the recipe {FINETUNE_RECIPE}"


def describe_speed(speed: Throughput, plan: Plan) -> list[str]:
    loop = plan.recipe.loop
    total = speed.estimate_seconds(plan.steps, plan.steps_per_epoch, loop.eval_every)
    return [
        f"speed  {speed.units_per_step / speed.step_seconds:.1f} {plan.task.unit}/s, "
        f"{speed.step_seconds:.3f} s per step of {speed.units_per_step:.0f}; "
        f"{speed.evaluation_seconds:.1f} s per evaluation; memory {speed.peak_bytes / 1e9:.1f} GB",
        f"time   about {format_duration(total)} for {format_length(plan)}",
    ]


def format_length(plan: Plan) -> str:
    return f"{format_count(plan.steps, 'step')}, {format_count(plan.epochs, 'epoch')}"


def describe_skipped_examples(skipped: tuple[str, ...], example: str) -> list[str]:
    if not skipped:
        return []
    more = f" … and {len(skipped) - MAX_LISTED_EXAMPLES} more" if len(skipped) > MAX_LISTED_EXAMPLES else ""
    lines = [f"       {reason}" for reason in skipped[:MAX_LISTED_EXAMPLES]]
    return [f"skipped {format_count(len(skipped), example)} that could not be read:", *lines, *([more] if more else [])]
