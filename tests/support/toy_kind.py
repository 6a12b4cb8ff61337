"""A kind of models in one file: a line through numbers, y = slope · x, which is not an image, text or caption."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.base.kinds import Kind
from vitrail.base.table import Column, Table
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.data.batch import Batch
from vitrail.opening import Opened, open_model
from vitrail.predict.job import ItemSummary, OpenRows
from vitrail.predict.output.resumable_rows import CompletedItems, Row
from vitrail.predict.output.row_files import RowLayout, open_row_sink
from vitrail.recipes.schedule import Clock
from vitrail.tasks.task import Task

SLOPE = 3.0  # of the data


class LineTask(Task):
    kind, example = "line", "number"

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(1, 1, bias=False)

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        del clock
        return (self.backbone(batch["x"]) - batch["y"]).square().mean(), {}


@dataclass(frozen=True)
class LineSource:
    count: int = 8
    name: str = "line"
    in_memory: bool = True
    notes: tuple[str, ...] = ()

    @property
    def example_count(self) -> int:
        return self.count

    @property
    def validation_count(self) -> int:
        return self.count

    @property
    def steps_per_epoch(self) -> int:
        return 1

    def make_batch(self) -> Batch:
        x = torch.linspace(-1, 1, self.count)[:, None]
        return Batch({"x": x, "y": SLOPE * x}, {}, self.count)

    def load_batches(self, steps: range, **_: Any) -> Iterator[Batch]:
        return (self.make_batch() for _ in steps)

    def load_validation_batches(self, **_: Any) -> Iterator[Batch]:
        return iter([self.make_batch()])

    def describe(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name}

    def describe_model_input(self, model: Any) -> dict[str, Any]:
        del model
        return {}


def save_line(model: nn.Linear, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"format": 2, "kind": "line", "slope": model.weight.item()}))
    return folder


def open_line(name: str, run: FinishedRun | None = None, *, device: Any = None) -> Opened:
    model = nn.Linear(1, 1, bias=False)
    slope = json.loads((Path(name) / "config.json").read_text())["slope"]
    nn.init.constant_(model.weight, slope)
    return Opened(source=name, kind="line", model=model.to(device or "cpu").eval(), run=run)


@dataclass(frozen=True)
class LineEvaluation:
    opened: Opened
    data: str = "line"
    notes: Sequence[str] = ()
    examples: int = 1
    files: Sequence[str] = ("evaluation.json",)

    def run(self, progress: Callable[[int], object] = lambda _: None) -> "LineScores":
        progress(1)
        return LineScores(abs(self.opened.model.weight.item() - SLOPE))


@dataclass(frozen=True)
class LineScores:
    error: float

    @property
    def table(self) -> Table:
        return Table(columns=(Column(name="error", digits=2),), rows=[(self.error,)])

    def to_json(self) -> dict[str, Any]:
        return {"error": self.error}

    def write(self, report: Mapping[str, Any], folder: Path) -> list[Path]:
        path = folder / "evaluation.json"
        path.write_text(json.dumps(report))
        return [path]


def open_evaluation(model: str, data: str | None = None, *, batch: int = 1, device: str = "auto") -> LineEvaluation:
    del data, batch, device
    return LineEvaluation(open_model(model, kind="line"))


@dataclass(frozen=True, kw_only=True)
class LineRows:
    """The value of the line at each number, as CSV."""

    model: str
    inputs: Sequence[str]
    format: str | None = None
    top: int = 5
    options: Any = None
    noun: ClassVar[str] = "number"
    failure: ClassVar[str] = "could not be computed"

    def plan_output(self, out: Path | None) -> Any:
        return None if out is None else self.layout.partial_folder(out)

    @property
    def layout(self) -> RowLayout:
        return RowLayout(kind="csv", columns=("x", "y"), list_cells=lambda each: (each["x"], each["y"]))

    def list_items(self, stdin: Any) -> list[str]:
        del stdin
        return list(self.inputs)

    def summarize(self, items: list[str]) -> ItemSummary:
        return ItemSummary(len(items))

    def open(self, items: list[str], summary: ItemSummary, partial: Any, on_note: Any) -> OpenRows:
        del summary, on_note
        line = open_model(self.model, kind="line").model.weight.item()

        def iterate(done: CompletedItems, advance: Callable[[int], object]) -> Iterator[Row]:
            for each in items:
                if each not in done:
                    yield Row(each, {"file": each, "x": each, "y": f"{line * float(each):g}"}, None)
                    advance(1)

        return OpenRows(
            iterate=iterate,
            describe=lambda: {"model": self.model, "output": "line"},
            open_sink=bind(open_row_sink, self.layout, partial),
        )


def open_source(task: Any, data: Any, *_: Any, **__: Any) -> Any:
    raise ConfigError(f"{type(task).__name__} trains on a line; expected a LineSource, not {data!r}")


def describe_next_steps(run: Path, *_: Any) -> str:
    return f"vitrail predict {run} 1 2 3"


KIND = Kind(
    name="line",
    does="reads numbers",
    use="vitrail predict",
    commands={"predict": "support.toy_kind:LineRows", "evaluate": "support.toy_kind:open_evaluation"},
    open=open_line,
    open_source=open_source,
    describe_next_steps=describe_next_steps,
)
