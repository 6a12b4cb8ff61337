"""What follows a pre-trained run: probes of its features, or fine-tuning, with the labels of its data."""

import os
from dataclasses import replace
from pathlib import Path

from vitrail.base.text import format_count
from vitrail.checkpoint.run_files import is_run_folder
from vitrail.distributed import read_launcher_environment
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.request import Request
from vitrail.train.plan import Runtime
from vitrail.train.resume import resume_run
from vitrail.train.run import FINETUNE_RECIPE, name_finetuned_run, start_run
from vitrail.train.run_folder import RunFolder


def run_follow_up(folder: Path, runtime: Runtime, *, trained: bool) -> None:
    """Do what `then` in the request of a finished run names; what is done already is not repeated.

    `trained` is whether the run was trained just now, so that older results are not about its model.
    """
    plan = RunFolder(folder).load_plan()
    if not (plan.get("request") or {}).get("then"):
        return
    request = Request.from_json(plan["request"], str(folder))
    if request.then == "probe":
        launch = read_launcher_environment(os.environ)
        if launch is None or launch.rank == 0:
            write_probes(folder, runtime, trained=trained)
    elif request.then == "finetune":
        finetune(folder, replace(request, then=None), runtime, images=int(plan["data"]["train"]), trained=trained)


def finetune(folder: Path, request: Request, runtime: Runtime, *, images: int, trained: bool) -> None:
    """Fine-tune the model of a run in a folder next to it; resume if that was stopped."""
    target = name_finetuned_run(folder)
    if is_run_folder(target):
        if trained:
            runtime.report(f"note   {target} started from this run before it was trained further")
        resume_run(target, runtime)
        return
    recipe = open_recipe(FINETUNE_RECIPE)
    recipe = recipe.with_settings({"batch": min(recipe.loop.batch, images), "seed": request.recipe.loop.seed})
    runtime.report(f"then   fine-tune for {format_count(recipe.loop.epochs, 'epoch')}, in {target}")
    start_run(replace(request, recipe=recipe, init=str(folder.resolve())), target, runtime)


def write_probes(folder: Path, runtime: Runtime, *, trained: bool) -> None:
    """Probe the features of a run, and write the table and the figure into its folder."""
    from vitrail.evaluation.probes.probe import probe
    from vitrail.evaluation.probes.probe_results import PROBE_FILES, write_probe

    files = ", ".join(str(folder / name) for name in PROBE_FILES)
    if not trained and all((folder / name).exists() for name in PROBE_FILES):
        runtime.report(f"probe  done: {files}")
        return
    result = probe(str(folder), device=runtime.device, workers=runtime.workers or 0, strict=runtime.strict)
    write_probe(result, {"models": [str(folder)], **result.to_json()}, folder)
    runtime.report_lines(*(f"note   {note}" for note in result.notes), str(result), f"probe  written: {files}")
