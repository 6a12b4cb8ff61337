"""Restore the state of a run: its newest intact checkpoint, and the log cut back to match."""

import os
import shutil
import warnings
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import write_text
from vitrail.checkpoint.run_files import LOG_FILE
from vitrail.distributed import Ranks
from vitrail.train.run_folder import LogRecord, RunFolder, step_from_file_name
from vitrail.train.trainer import Trainer
from vitrail.train.training_state import DamagedCheckpointError, TrainingState, read_training_state


def read_newest_checkpoint_and_damage(run: RunFolder) -> tuple[TrainingState | None, dict[Path, str]]:
    """The newest checkpoint that passes its checksum, and why the newer ones are damaged."""
    damaged = dict[Path, str]()
    for path in reversed(run.list_checkpoints()):
        try:
            return read_checkpoint_with_step(path), damaged
        except DamagedCheckpointError as error:
            damaged[path] = error.reason
    return None, damaged


def load_newest_checkpoint_on_ranks(run: RunFolder, ranks: Ranks | None = None) -> TrainingState | None:
    """The checkpoint to resume from. The first process chooses it, and renames damaged newer ones with a warning."""
    ranks = ranks or Ranks()
    state = load_checkpoint_and_rename_damaged(run) if ranks.is_first else None
    path = ranks.broadcast_object(state.path if state else None)
    return read_training_state(path) if path is not None and not ranks.is_first else state


def load_checkpoint_and_rename_damaged(run: RunFolder) -> TrainingState | None:
    state, damaged = read_newest_checkpoint_and_damage(run)
    if state is None and damaged:
        reasons = ", ".join(f"{path.name} is damaged ({reason})" for path, reason in damaged.items())
        raise CheckpointError(f"no checkpoint of {run.folder} can be read: {reasons}; start a new run with `out`")
    for path, reason in damaged.items():
        set_damaged_file_aside(path)
        where = "" if state is None or state.path is None else state.path.stem
        warnings.warn(f"{path.name} is damaged ({reason}); resuming from {where}", stacklevel=4)
    return state


def read_checkpoint_with_step(path: Path) -> TrainingState:
    """Read a checkpoint and check that it has the step in its name."""
    state = read_training_state(path)
    if state.metadata.get("step") != step_from_file_name(path):
        raise DamagedCheckpointError(path, ValueError(f"it has step {str(state.metadata.get('step'))[:20]}"))
    return state


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """What the loop continues from, besides the state of the trainer."""

    seconds: float = 0.0  # of training so far
    skipped: frozenset[str] = frozenset()  # why examples could not be read
    records: tuple[LogRecord, ...] = ()


def restore_training(trainer: Trainer, state: TrainingState | None, run: RunFolder | None) -> ResumePoint:
    """Put the trainer into the state of a checkpoint, and remove from the log what will be logged again."""
    seconds, skipped, records = 0.0, frozenset[str](), list[LogRecord]()
    if state:
        try:
            trainer.restore_state(state)
            seconds = float(state.metadata["seconds"])
            skipped = frozenset(map(str, state.metadata.get("skipped", ())))
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{state.path} does not fit the run: {type(error).__name__}: {describe_error(error)}; "
                "expected what `vitrail train` wrote"
            ) from None
    if run:
        if trainer.ranks.is_first:
            truncate_log(run, trainer.steps_done)
        records = [each for each in run.read_records() if each["step"] <= trainer.steps_done]
    return ResumePoint(seconds=seconds, skipped=skipped, records=tuple(records))


def truncate_log(run: RunFolder, step: int) -> None:
    """Remove from the log what a resumed run will write again; a log with damaged lines is copied first."""
    log = run.read_log()
    if log.damaged_lines:
        copy = set_damaged_file_aside(run.folder / LOG_FILE, keep_original=True)
        warnings.warn(
            f"{log.damaged_lines} of {log.line_count} lines of {LOG_FILE} are damaged and left out; "
            f"the original is kept as {copy.name}",
            stacklevel=2,
        )
    if log.line_count:
        kept = [line.rstrip("\n") for line, record in log.lines if record["step"] <= step]
        write_text(run.folder / LOG_FILE, "".join(f"{line}\n" for line in kept))


def set_damaged_file_aside(path: Path, *, keep_original: bool = False) -> Path:
    """Rename, or copy, a damaged file to NAME.damaged; the first such name that is free."""
    names = (path.with_name(f"{path.name}.damaged{number if number > 1 else ''}") for number in count(1))
    aside = next(each for each in names if not os.path.lexists(each))
    try:
        if keep_original:
            shutil.copyfile(path, aside)
        else:
            path.rename(aside)
    except OSError as error:
        verb = "copy" if keep_original else "rename"
        raise CheckpointError(f"cannot {verb} the damaged {path}: {describe_error(error)}") from None
    return aside
