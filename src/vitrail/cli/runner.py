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
from vitrail.checkpoint.contents import CONFIG
from vitrail.checkpoint.writing import write
from vitrail.cli.progress import progress
from vitrail.cli.runs import duration
from vitrail.data.cache import Cached, held
from vitrail.data.loader import Order
from vitrail.errors import CheckpointError, ConfigError, one_line
from vitrail.files import make_folder
from vitrail.machine import cores, restore_threads
from vitrail.train.distill import check_fixed, distilling
from vitrail.train.distributed import Team, device_of, joined
from vitrail.train.fit import fit
from vitrail.train.job import Job, Request, assemble
from vitrail.train.pictures import curves
from vitrail.train.recipe import Recipe, names
from vitrail.train.run import CURVES, MODEL, Run, step_of
from vitrail.train.runs import name_of
from vitrail.train.setup import Setup
from vitrail.train.speed import Speed, measure
from vitrail.train.teacher import Teacher
from vitrail.train.thread_choice import choose_threads, planned_threads
from vitrail.train.watch import Several, Start, TensorBoard, Terminal, Watch

RUNS = Path("runs")
SHOWN = 10  # skipped pictures that are named


@dataclass(frozen=True, kw_only=True)
class Here:
    """What belongs to this machine and sitting, not to the run."""

    device: str = "auto"
    workers: int | None = None
    threads: int | Literal["auto"] = "auto"
    strict: bool = False


def begin(request: Request, out: Path | None, here: Here, *, start: float, dry_run: bool) -> None:
    """A new run, or only what it would be."""
    keep_freed_memory()
    if out is not None and not dry_run:
        Run.check_free(out)  # at once, and again when it is made
    with joined() as team, restore_threads():
        recipe, job = request.recipe, assembled(request, team)
        setup, taught_by = setup_of(job, request, here, team, dry_run=dry_run)
        tell(team, *introduced(job, request, setup))
        choice = choose_threads(setup, here.threads)
        torch.set_num_threads(choice.threads)
        tell(team, str(choice))
        steps, minutes = setup.steps, recipe.loop.minutes
        if minutes is not None or dry_run:
            tell(team, "speed  is being measured …")
            speed = measure(setup)
            if minutes is not None:
                left = team.from_first(minutes * 60 - (monotonic() - start))
                steps = speed.steps_within(left, setup.order.steps, recipe.loop.eval_every)
            tell(team, *foreseen(speed, steps, setup.order, recipe))
        if dry_run:
            return
        run = team.from_first(Run(out or new_folder(job, recipe)) if team.first else None)
        if team.first:
            Run.check_free(run.folder)
        with run.owned() if team.first else nullcontext():
            if team.first:
                Run.begun(run.folder, plan_of(job, request, setup, steps, taught_by))
            tell(team, f"run    {run.folder}: {steps} steps, {steps / setup.order.steps:.4g} epochs")
            sit(run, request, job, setup, steps, here)


def go_on(folder: Path, here: Here, code: Sequence[str] = ()) -> None:
    """A run from its last checkpoint, or from its beginning if there is none yet.

    `code` is the code named by the user: an outside model in run.json is imported only if it is listed there.
    """
    keep_freed_memory()
    run = Run(folder)
    with joined() as team, restore_threads():
        if finished(run, run.plan()):
            tell(team, f"run    {folder} is finished: vitrail eval {folder}, or a new one from it with --init {folder}")
            return
        with run.owned() if team.first else nullcontext():
            resume(run, here, team, code)


def resume(run: Run, here: Here, team: Team, code: Sequence[str]) -> None:
    folder, plan = run.folder, run.plan()
    request, steps = (
        Request.from_json(plan.get("request"), str(folder)).with_trusted(code, str(folder)),
        plan.get("steps"),
    )
    if type(steps) is not int or steps < 1:
        raise CheckpointError(f"{folder} is of {steps!r} steps; expected a number, as `vitrail train` wrote it")
    torch.set_num_threads(planned_threads(plan, here.threads, str(folder)))
    job = assembled(request, team)
    setup, taught_by = setup_of(job, request, here, team)
    now = plan_of(job, request, setup, steps, taught_by)
    if request.trusted is not None:  # the user may name the same code by another path
        now["model"]["name"] = name_of(plan.get("model"))
    for what in ("model", "data", "teacher"):
        if apart := differences(plan.get(what), now[what]):
            raise CheckpointError(
                f"cannot resume {folder}: the {what} has changed ({apart[0]}); restore it, or start a new run"
            )
    plan.setdefault("threads", now["threads"])  # of a run from before it was recorded: torch's default
    for what in ("torch", "simplejpeg", "world", "threads"):
        if plan.get(what) != now[what]:
            tell(
                team,
                f"note   {what} was {plan.get(what)} and is {now[what]}: resuming, but not bit-identical",
            )
    sit(run, request, job, setup, steps, here, resumed=True)


def setup_of(
    job: Job, request: Request, here: Here, team: Team, *, dry_run: bool = False
) -> tuple[Setup, dict[str, str] | None]:
    """All that a training needs, and for run.json whom it learns from."""
    setup = Setup(
        model=job.model,
        data=job.data,
        recipe=request.recipe,
        preprocessing=job.preprocessing,
        device=device_of(here.device, team),
        team=team,
        workers=workers_for(job, here, team),
    )
    if request.teacher is None:
        return setup, None
    if request.teacher_cache is not None:
        check_fixed(request.recipe)
    pictures = len(job.data.train or ()) if request.teacher_cache and team.first and not dry_run else 0
    with progress(pictures, "asking the teacher") as advance:
        objective, lessons = distilling(
            Teacher.opened(request.teacher, **request.teacher_fields) if request.teacher_fields else request.teacher,
            job.model,
            job.data,
            request.recipe,
            job.preprocessing,
            setup.device,
            team=team,
            kept=None if request.teacher_cache is None or dry_run else Path(request.teacher_cache),
            progress=advance,
        )
    if lessons is None:
        return setup, None
    tell(team, *(f"note   {note}" for note in lessons.notes))
    who = {"name": request.teacher, "fingerprint": lessons.teacher.fingerprint()}
    return replace(setup, objective=objective), who


def keep_freed_memory() -> None:
    """Lets glibc keep what tensors free, where it would return it and fault it in again: 3 to 5 % of a step."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
            libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that it takes


def finished(run: Run, plan: Mapping[str, Any]) -> bool:
    states = run.states()
    return bool(states) and step_of(states[-1]) == plan.get("steps") and (run.folder / MODEL / CONFIG).exists()


def sit(run: Run, request: Request, job: Job, setup: Setup, steps: int, here: Here, *, resumed: bool = False) -> None:
    """Trains to the end, and leaves the model, the curves and a last word."""
    team = setup.team
    result = fit(
        job.model,
        job.data,
        request.recipe,
        objective=setup.objective,
        preprocessing=job.preprocessing,
        run=run,
        steps=steps,
        device=here.device,
        workers=setup.workers,
        strict=here.strict,
        team=team,
        watch=watches(team, resumed=resumed),
    )
    if not team.first:
        return
    measured = None if result.evaluation is None else {"top1": result.evaluation.top1, "top5": result.evaluation.top5}
    write(
        result.model,
        run.folder / MODEL,
        preprocessing=job.preprocessing,
        labels=job.data.classes,
        provenance={**job.provenance, "data": job.data.name, "recipe": request.recipe.name, "validation": measured},
        resampling=job.resampling,
        family=job.family,
    )
    tell(team, *said_of_skipped(result.skipped))
    drawn = ""
    if find_spec("matplotlib"):
        curves({run.folder.name: run.records()}, run.folder / CURVES)
        drawn = f", curves in {run.folder / CURVES}"
    if result.evaluation is not None:
        tell(team, f"done   validation top-1 {result.evaluation.top1:.2%}, loss {result.evaluation.loss:.4f}{drawn}")
    tell(
        team,
        f"model  {run.folder / MODEL}: vitrail eval {quote(str(run.folder))} --data {quote(request.data)}, "
        f"vitrail predict {quote(str(run.folder))} photo.jpg, "
        f'or in Python vitrail.Predictor("{run.folder / MODEL}").predict("photo.jpg")',
    )


def assembled(request: Request, team: Team) -> Job:
    """The job, its pictures held in memory if they fit."""
    job = assemble(request)
    for note in job.data.notes:
        tell(team, f"note   {note}")
    with progress(None if team.first else 0, "decoding") as advance:
        return job.with_data(held(job.data, request.cache * 1e9, lambda: advance(1)))


def workers_for(job: Job, here: Here, team: Team) -> int:
    """None where pictures are in memory, else as many processes as cores, shared by the ranks of a machine."""
    if here.workers is not None:
        if here.workers < 0:
            raise ConfigError(f"--workers {here.workers}; expected at least 0")
        return here.workers
    in_memory = isinstance(job.data.train, Cached) or hasattr(job.data.train, "images")
    return 0 if in_memory else max(1, min(8, cores() // team.world))


def watches(team: Team, *, resumed: bool = False) -> Watch:
    if not team.first:
        return Several()
    board: list[Watch] = [TensorBoard()] if find_spec("tensorboard") else []
    return ResumeWatch([Terminal(), *board]) if resumed else Several([Terminal(), *board])


class ResumeWatch(Several):
    """Prints the step from which a run resumes, known once its checkpoint is verified."""

    def started(self, start: Start) -> None:
        where = f"step-{start.done:08}" if start.done else "its beginning"
        print(f"run    {start.folder}: resuming from {where} of {start.steps} steps", flush=True)
        super().started(start)


def introduced(job: Job, request: Request, setup: Setup) -> list[str]:
    data, config, recipe = job.data, job.model.config, request.recipe
    parameters = sum(weight.numel() for weight in job.model.parameters())
    trained, validated = len(data.train or ()), len(data.val or ())
    size = "×".join(map(str, config.image_size))
    begun = f"from {request.init}" if request.init else f"from scratch, seed {recipe.loop.seed}"
    default = Recipe().flat()
    hidden = (*NOT_SAID, *(names("distillation") if request.teacher is None else ()))
    said = [f"{name} {value}" for name, value in recipe.flat().items() if value != default[name] and name not in hidden]
    return [
        f"data   {data.name}: {trained} pictures to train on, {validated} to validate, {len(data.classes)} classes",
        f"model  {recipe.model or job.family.name}, {parameters / 1e6:.2f} M parameters, {size} pixels, {begun}",
        *([f"teacher {request.teacher}, {recipe.distillation.distill} distillation"] if request.teacher else []),
        f"recipe {recipe.name}: {', '.join(said)}",
        f"device {setup.device}, {setup.workers} workers",
    ]


NOT_SAID = ("name", "model", "fields", "preprocessing", "seed")


def foreseen(speed: Speed, steps: int, order: Order, recipe: Recipe) -> list[str]:
    total = speed.seconds(steps, order.steps, recipe.loop.eval_every)
    return [
        f"speed  {recipe.loop.batch / speed.step:.1f} images/s, {speed.step:.3f} s a step of {recipe.loop.batch}; "
        f"{speed.evaluation:.1f} s an evaluation; memory {speed.memory / 1e9:.1f} GB",
        f"time   {steps} steps ({steps / order.steps:.4g} epochs) take about {duration(total)}",
    ]


def plan_of(job: Job, request: Request, setup: Setup, steps: int, taught_by: dict[str, str] | None) -> dict[str, Any]:
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
        "epochs": steps / setup.order.steps,
        "steps": steps,
        "steps_per_epoch": setup.order.steps,
        "world": setup.team.world,
        "threads": torch.get_num_threads(),
    }


def new_folder(job: Job, recipe: Recipe) -> Path:
    """runs/DATA-RECIPE-1, or the next number that is free; created at once, so that no other process takes it."""
    name = f"{Path(job.data.name).name or 'data'}-{recipe.name}"
    make_folder(RUNS)
    for number in count(1):
        folder = RUNS / f"{name}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot make the folder {folder}: {one_line(error)}") from None
        return folder
    raise AssertionError("unreachable")


def said_of_skipped(skipped: tuple[str, ...]) -> list[str]:
    if not skipped:
        return []
    more = f" … and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
    lines = [f"       {reason}" for reason in skipped[:SHOWN]]
    return [f"skipped {len(skipped)} pictures that could not be read:", *lines, *([more] if more else [])]


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What is no longer as run.json has it."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [each for key in now for each in differences(before.get(key), now[key], str(key))]
    return [] if before == now else [f"{name} {short(before)}, now {short(now)}"]


def short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}…"


def tell(team: Team, *lines: str) -> None:
    if team.first:
        for line in lines:
            print(line, flush=True)
