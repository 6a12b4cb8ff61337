"""A training's folder: what it was told (run.json), what it saw (log.jsonl), where it stands (checkpoints/).

Everything in it is whole at any moment: run.json and checkpoints appear by renaming, and a line of the log that a crash
cut off, or that a later resume goes through again, is removed when the run is resumed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import CheckpointError, one_line
from vitrail.files import make_folder, write_whole
from vitrail.train.state import State, read_numbers, read_state, write_state

PLAN, LOG, STATES, MODEL = "run.json", "log.jsonl", "checkpoints", "model"
NAME = re.compile(r"step-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class Run:
    folder: Path

    @classmethod
    def begun(cls, folder: Path, plan: Mapping[str, Any]) -> "Run":
        """A new run: the folder with its plan, before anything else happens."""
        cls.check_free(folder)
        make_folder(folder / STATES)
        text = json.dumps(plan, indent=2, ensure_ascii=False) + "\n"
        write_whole(folder / PLAN, lambda place: place.write_text(text, "utf-8"))
        return cls(folder)

    @classmethod
    def check_free(cls, folder: Path) -> None:
        """Nobody's work is written over: a run that has taken a step, a folder with other things in it, a file."""
        run = cls(folder)
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; expected a new folder")
        if (folder / PLAN).exists():
            if run.states() or run.records():
                raise CheckpointError(
                    f"{folder} already holds a run; expected a new folder, or to go on with it: --resume {folder}"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise CheckpointError(f"{folder} holds other things; expected a new folder, or an empty one")

    def plan(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / PLAN).read_text("utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{self.folder} holds no {PLAN}; expected the folder of a run") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.folder / PLAN} cannot be read: {one_line(error)}; expected what `vitrail train` wrote"
            ) from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.folder / PLAN} is no object; expected what `vitrail train` wrote")
        return found

    def states(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        return sorted(
            (path for path in (self.folder / STATES).glob("step-*") if NAME.fullmatch(path.name)), key=step_of
        )

    def latest(self) -> State | None:
        states = self.states()
        try:
            return read_state(states[-1]) if states else None
        except CheckpointError as error:
            other = f"to go on from {states[-2].stem}, delete it" if len(states) > 1 else "there is no other"
            raise CheckpointError(f"{error}; {other}") from None

    def steps_planned(self) -> int | None:
        """How many steps the last checkpoint was on its way to, if there is one."""
        states = self.states()
        return read_numbers(states[-1]).get("steps") if states else None

    def save(self, state: State, step: int, keep: int = 2) -> Path:
        """The new checkpoint, and only once it is durable the old ones go."""
        make_folder(self.folder / STATES)
        path = self.folder / STATES / f"step-{step:08}.safetensors"
        write_state(state, path)
        for old in self.states()[:-keep]:
            old.unlink(missing_ok=True)
        for cut_off in (self.folder / STATES).glob(
            ".*"
        ):  # by a crash, earlier; safetensors has names of its own for it
            cut_off.unlink(missing_ok=True)
        return path

    def log(self, record: Mapping[str, float | int]) -> None:
        try:
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder / LOG}: {one_line(error)}") from None

    def records(self) -> list[dict[str, Any]]:
        """The log's lines; one that was cut off is left out."""
        try:
            lines = (self.folder / LOG).read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        found = list[dict[str, Any]]()
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def forget_after(self, step: int) -> None:
        """Takes from the log what a resumed run will write again."""
        if not (self.folder / LOG).exists():
            return
        kept = [json.dumps(each) + "\n" for each in self.records() if each.get("step", 0) <= step]
        write_whole(self.folder / LOG, lambda place: place.write_text("".join(kept), "utf-8"))


def step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
