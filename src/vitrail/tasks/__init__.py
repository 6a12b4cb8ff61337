"""Tasks, one file each: what can be trained. Each file ends in its TASK."""

from importlib import import_module
from typing import TYPE_CHECKING

from vitrail.errors import unknown_name_error

if TYPE_CHECKING:
    from vitrail.tasks.task import TaskKind

TASKS = ("classification", "distillation")


def find_task(name: str) -> "TaskKind":
    if name not in TASKS:
        raise unknown_name_error("task", name, TASKS)
    return import_module(f"vitrail.tasks.{name}").TASK
