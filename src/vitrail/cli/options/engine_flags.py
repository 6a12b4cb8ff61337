"""The options of all commands that run a model on many images: `predict`, `embed`, `eval`, `probe` and `compare`."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.options.groups import SPEED
from vitrail.cli.options.values import check_minimum

ENGINE_HELP = (
    "Engine: eager, compiled and bfloat16 run in torch, onnx and int8 are exported; auto measures once and uses the "
    "fastest."
)
EXACT_HELP = "Allow only engines within 0.0001 of the model in float32, and decode images at full size."
FAST_HELP = "Allow int8 and bfloat16, too, if they agree on a sample of the images."
EngineName = Literal["auto", "eager", "compiled", "bfloat16", "onnx", "int8"]


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    engine: Annotated[EngineName, Parameter(group=SPEED, help=ENGINE_HELP)] = "auto"
    exact: Annotated[bool, Parameter(negative=(), group=SPEED, help=EXACT_HELP)] = False
    fast: Annotated[bool, Parameter(negative=(), group=SPEED, help=FAST_HELP)] = False
    batch: Annotated[int | None, Parameter(group=SPEED, help="Images per batch. [default: automatic]")] = None
    streams: Annotated[int | None, Parameter(group=SPEED, help="Batches at the same time. [default: automatic]")] = None
    threads: Annotated[int | None, Parameter(group=SPEED, help="Threads per stream. [default: automatic]")] = None

    def list_given(self) -> dict[str, Any]:
        """The options that were given, by name, checked."""
        given = {each.name: vars(self)[each.name] for each in fields(EngineFlags)}
        given = {name: each for name, each in given.items() if each not in (None, "auto") and each is not False}
        for name in given.keys() & {"batch", "streams", "threads"}:
            check_minimum(f"--{name}", given[name], 1)
        return given


GivenEngine = Annotated[EngineFlags | None, Parameter(name="*")]
