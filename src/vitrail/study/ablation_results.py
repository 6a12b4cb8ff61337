"""Results of an ablation: each row averaged over seeds and compared with the full row, as text and files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from vitrail.study.ablation_plan import AblationVariant
from vitrail.study.ablation_runs import AblationRun
from vitrail.study.result_files import format_json, write_texts_to_folder
from vitrail.text import format_table
from vitrail.train.run_list import read_run_summary

HEADING = ("row", "what differs", "top-1", "to full", "loss", "seeds")
ALIGNMENTS = "llrrrr"


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The last evaluation in the log of one run; `failed` says why there is none."""

    seed: int
    folder: Path
    top1: float | None = None
    loss: float | None = None
    failed: str = ""

    @classmethod
    def read(cls, folder: Path, seed: int, failed: str = "") -> "RunOutcome":
        if failed:
            return cls(seed=seed, folder=folder, failed=failed)
        run = read_run_summary(folder)
        return cls(seed=seed, folder=folder, top1=run.last_value("val_top1"), loss=run.last_value("val_loss"))

    def to_json(self) -> dict[str, Any]:
        data = {"seed": self.seed, "run": self.folder.name, "top1": self.top1, "loss": self.loss}
        return data | ({"failed": self.failed} if self.failed else {})


@dataclass(frozen=True, kw_only=True)
class AblationVariantOutcomes:
    row: AblationVariant
    outcomes: tuple[RunOutcome, ...]

    def list_values(self, name: Literal["top1", "loss"]) -> list[float]:
        values = [each.top1 if name == "top1" else each.loss for each in self.outcomes]
        return [value for value in values if value is not None]

    def mean(self, name: Literal["top1", "loss"]) -> float | None:
        values = self.list_values(name)
        return fmean(values) if values else None

    def std(self, name: Literal["top1", "loss"]) -> float | None:
        """Sample standard deviation (n − 1); None for a single seed."""
        values = self.list_values(name)
        return stdev(values) if len(values) > 1 else None


@dataclass(frozen=True, kw_only=True)
class AblationResults:
    recipe: str
    data: str
    lines: tuple[AblationVariantOutcomes, ...]  # the full row is the first

    @classmethod
    def read(
        cls,
        recipe: str,
        data: str,
        rows: Sequence[AblationVariant],
        runs: Sequence[AblationRun],
        failed: Mapping[str, str],
    ) -> "AblationResults":
        """Read the logs of the runs; `failed` maps folder names of unfinished runs to the reason."""
        lines = [
            AblationVariantOutcomes(
                row=row,
                outcomes=tuple(
                    RunOutcome.read(run.folder, run.seed, failed.get(run.folder.name, ""))
                    for run in runs
                    if run.row is row
                ),
            )
            for row in rows
        ]
        return cls(recipe=recipe, data=data, lines=tuple(lines))

    def gain_in_points(self, line: AblationVariantOutcomes) -> float | None:
        """Top-1 relative to the full row, in percentage points."""
        own, full = line.mean("top1"), self.lines[0].mean("top1")
        return None if own is None or full is None else 100 * (own - full)

    def cells(self) -> list[tuple[str, ...]]:
        return [
            (
                line.row.name,
                line.row.description,
                format_mean_and_std(line.mean("top1"), line.std("top1"), 100, 2) or format_failure(line),
                "" if line is self.lines[0] or (points := self.gain_in_points(line)) is None else f"{points:+.2f}",
                format_mean_and_std(line.mean("loss"), line.std("loss"), 1, 4),
                format_seed_count(line),
            )
            for line in self.lines
        ]

    def __str__(self) -> str:
        return "\n".join(format_table(HEADING, self.cells(), ALIGNMENTS))

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "row": line.row.name,
                "changes": {name: {"full": before, "here": now} for name, (before, now) in line.row.changes.items()},
                "top1": line.mean("top1"),
                "top1_std": line.std("top1"),
                "points": self.gain_in_points(line),
                "loss": line.mean("loss"),
                "loss_std": line.std("loss"),
                "runs": [each.to_json() for each in line.outcomes],
            }
            for line in self.lines
        ]
        return {"recipe": self.recipe, "data": self.data, "rows": rows}

    def to_markdown(self) -> str:
        about = "validation top-1 (in %) and loss, mean ± standard deviation over seeds"
        return f"{self.recipe} on {self.data}: {about}\n\n{markdown_table(HEADING, self.cells(), ALIGNMENTS)}\n"

    def write(self, folder: Path) -> list[Path]:
        """Write table.json, table.md and, if there are results, ablation.png."""
        from vitrail.study.plots import save_ablation_plot

        return write_table_and_plot(self, save_ablation_plot, folder, "ablation.png")


def markdown_table(heading: Sequence[str], lines: Sequence[Sequence[str]], alignments: str) -> str:
    """Like `format_table`, in Markdown."""
    rule = ["---:" if each == "r" else "---" for each in alignments]
    rows = (heading, rule, *lines)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def write_table_and_plot(table: Any, save_plot: Callable[[Any, Path], bool], folder: Path, name: str) -> list[Path]:
    texts = {"table.json": format_json(table.to_json()), "table.md": table.to_markdown()}
    written = write_texts_to_folder(folder, texts)
    return [*written, folder / name] if save_plot(table, folder / name) else written


def format_mean_and_std(mean: float | None, std: float | None, scale: float, digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean * scale:.{digits}f}" + ("" if std is None else f" ± {std * scale:.{digits}f}")


def format_failure(line: AblationVariantOutcomes) -> str:
    return "failed" if any(each.failed for each in line.outcomes) else ""


def format_seed_count(line: AblationVariantOutcomes) -> str:
    """Number of finished runs, and of all if some did not finish."""
    finished, total = sum(each.top1 is not None for each in line.outcomes), len(line.outcomes)
    return str(total) if finished == total else f"{finished} of {total}"
