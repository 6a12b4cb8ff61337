"""Tasks, one file each: what can be trained. Each file ends in its TASK."""

from importlib import import_module
from typing import TYPE_CHECKING

from vitrail.base.errors import unknown_name_error

if TYPE_CHECKING:
    from vitrail.tasks.task import TaskKind

PRETRAINING_TASKS = ("mae", "simmim", "mpp", "simclr", "byol", "dino", "esvit", "aim", "igpt")  # in pretraining/
TASKS = ("classification", "distillation", "translation", "caption", *PRETRAINING_TASKS)


def find_task(name: str) -> "TaskKind":
    if name not in TASKS:
        raise unknown_name_error("task", name, TASKS)
    folder = "vitrail.tasks.pretraining" if name in PRETRAINING_TASKS else "vitrail.tasks"
    return import_module(f"{folder}.{name}").TASK
