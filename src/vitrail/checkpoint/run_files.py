"""The files of a run folder, as far as opening its model needs them. Reading them never imports torch."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, describe_error
from vitrail.base.files import read_text, suggest_sibling
from vitrail.base.json_yaml import parse_json, verify_and_remove_checksum

PLAN_FILE, LOG_FILE, CURVES_FILE = "run.json", "log.jsonl", "curves.png"
RUN_SUBFOLDERS = ("checkpoints", "model", "best", "tensorboard", "figures")  # best: the model of the best evaluation
CHECKPOINTS_FOLDER, MODEL_FOLDER, BEST_FOLDER, TENSORBOARD_FOLDER, FIGURES_FOLDER = RUN_SUBFOLDERS
# saving a model writes its config last; a captioner has two models, of which the decoder is the last
LAST_WRITTEN_FILES = (f"{MODEL_FOLDER}/config.json", f"{MODEL_FOLDER}/decoder/config.json")


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The model of a finished run, and how to find the images that it was not trained on."""

    model: Path
    data: str | None = None
    seed: int = 0
    val_share: float = 0.2
    pair: str | None = None  # source and target language of sentence pairs


def is_run_folder(folder: Path) -> bool:
    return (folder / PLAN_FILE).is_file()


def check_run_exists(folder: Path) -> None:
    if not os.path.lexists(folder):
        raise ConfigError(
            f"{folder} does not exist; expected a folder that `vitrail train` wrote{suggest_sibling(folder)}"
        )


def is_run_finished(folder: Path) -> bool:
    return any((folder / name).is_file() for name in LAST_WRITTEN_FILES)


def find_finished_run(folder: Path) -> FinishedRun | None:
    """The finished run in a folder; None if the folder is not a run. A run without its model is an error."""
    if not is_run_folder(folder):
        return None
    if not is_run_finished(folder):
        plan, damage = try_read_plan(folder)
        if not damage and "request" not in plan:
            raise ConfigError(
                f"{folder} is a run of vitrail.fit, which writes no {MODEL_FOLDER}/: write it in Python, with "
                f"vitrail.save(result.model, {str(folder / MODEL_FOLDER)!r})"
            )
        raise ConfigError(
            f"{folder} is a run that has not finished, so it has no {MODEL_FOLDER}/: finish it with `resume` {folder}"
        )
    plan, damage = try_read_plan(folder)
    if damage:
        warnings.warn(f"{folder}: {damage}; its validation images are unknown", stacklevel=2)
    request, recipe = (part if isinstance(part, dict) else {} for part in (plan.get("request"), plan.get("recipe")))
    data, seed, share = request.get("data"), recipe.get("seed"), request.get("val_share")
    pair = request.get("pair")
    return FinishedRun(
        model=folder / MODEL_FOLDER,
        data=data if isinstance(data, str) else None,
        seed=seed if isinstance(seed, int) else 0,
        val_share=share if isinstance(share, float) else 0.2,
        pair=pair if isinstance(pair, str) else None,
    )


def read_plan(folder: Path) -> dict[str, Any]:
    """The contents of run.json, once its checksum is verified."""
    found: Any = parse_json(read_text(folder / PLAN_FILE))
    if not isinstance(found, dict):
        raise ValueError("it is not a run's plan")  # noqa: TRY004  # what is in a file, not an argument
    return verify_and_remove_checksum(found)


def try_read_plan(folder: Path) -> tuple[dict[str, Any], str]:
    """The contents of run.json, and what is wrong with it."""
    try:
        plan = read_plan(folder)
    except (OSError, ValueError) as error:
        return {}, f"{PLAN_FILE}: {describe_error(error)}"
    return (plan, "") if plan else ({}, f"{PLAN_FILE}: it is not a run's plan")
