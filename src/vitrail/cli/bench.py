"""vitrail bench: how fast a model answers here, by engine, and against the peers."""

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder
from vitrail.cli.summary import parse_fields, parse_size
from vitrail.errors import ConfigError


def bench(
    *models: str,
    engines: str | None = None,
    batches: str = "1,8",
    threads: str = "2",
    image_size: str | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    peers: str = "",
    rounds: int | None = None,
    seconds: float | None = None,
    starts: int = 1,
    seed: int = 0,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Measure how fast models answer on this machine: images a second, latency, memory, start-up.

    Engines and peers take turns in shuffled order, round after round, so that a busy moment of the machine hits all of
    them; a ratio is taken within each round, and the table has the median with its quartiles. It is to the first line
    of each group: a peer where one is asked for. Latency is of a whole batch, percentiles over all calls. Memory and
    start-up are those of a new process, from nothing to its first answer. A batch that can be shared out is also
    measured with one stream a thread: onnx × 2. Pictures are noise; reading and resizing them is not counted. Where
    timm is installed, `vitrail bench ViT-B/16 --peers timm --batches 1` sets ours beside it.

    Examples::

        vitrail bench my_model --engines eager --batches 1 --rounds 3
        vitrail bench ViT-Ti/16 --engines eager --image-size 32,64 --batches 1 --rounds 3 --starts 0
        vitrail bench my_model --engines eager,onnx --batches 1,4 --threads 1,2 --seconds 0.1 --starts 0 -o speed

    Parameters
    ----------
    models
        A name that `vitrail models` lists, which gets random weights; a checkpoint or the folder of a run; a folder
        that `vitrail export` wrote, which has one engine.
    engines
        Of eager, compiled, onnx, int8, with commas; without it eager, onnx and int8. compiled takes a minute to start.
    batches
        Pictures in a batch, with commas.
    threads
        Threads that may compute at once, with commas.
    image_size
        Pixels, with commas: 224,384 or 384x256; else the model's own. Positions are resampled.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated.
    peers
        Of timm, transformers, with commas: they run the same weights, eagerly, and must be installed.
    rounds
        How many rounds; else as many as --seconds has room for.
    seconds
        Seconds of measuring for each engine and peer; 3 unless said.
    starts
        New processes for memory and start-up of each, of which the median counts; 0: neither is measured.
    seed
        Of the random weights, the noise and the order of turns.
    out
        A folder for bench.json, bench.txt and bench.png.
    overwrite
        Replace files that exist.
    as_json
        Print JSON and nothing else.
    """
    if not models:
        raise ConfigError("no model; expected one at least: a name such as ViT-Ti/16, a checkpoint, an exported folder")
    if rounds is not None and seconds is not None:
        raise ConfigError("--rounds beside --seconds; expected one of them")
    sizes = [None] if image_size is None else [parse_size(each) for each in split_commas(image_size, "image-size")]

    from vitrail.study.bench import BenchRequest
    from vitrail.study.bench import run_benchmark as measured

    request = BenchRequest(
        models=models,
        engines=None if engines is None else split_commas(engines, "engines"),
        sizes=sizes,
        batches=parse_integers(batches, "batches"),
        threads=parse_integers(threads, "threads"),
        peers=split_commas(peers, "peers") if peers else (),
        rounds=rounds,
        seconds=3.0 if seconds is None else seconds,
        starts=starts,
        seed=seed,
        fields=parse_fields(fields),
    )
    prepare_figure_folder(out, ("bench.json", "bench.txt", "bench.png"), overwrite=overwrite)
    with progress_bar(request.progress_total, "measuring") as advance:
        found = measured(request, progress=advance)
    for note in found.notes:
        print(f"vitrail: note: {note}", file=sys.stderr)
    written = [] if out is None else found.write(out)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    from vitrail.text import format_table

    print(f"{found.machine}; {', '.join(f'{name} {number}' for name, number in found.versions.items())}")
    print(found)
    if len({(line.model, line.image_size) for line in found.lines}) > 1:
        print("\nimages/s by model and resolution")
        print("\n".join(format_table(*found.throughput_cells())))
    if written:
        print(f"\nwritten: {', '.join(map(str, written))}")


def split_commas(text: str, option: str) -> tuple[str, ...]:
    """Each once, in the order given."""
    found = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    if not all(found):
        raise ConfigError(f"--{option} {text!r}; expected names or numbers with commas between them")
    return found


def parse_integers(text: str, option: str) -> tuple[int, ...]:
    found = split_commas(text, option)
    if not all(each.isdecimal() and len(each) < 7 and int(each) for each in found):
        raise ConfigError(f"--{option} {text!r}; expected whole numbers of at least 1, six digits at most")
    return tuple(map(int, found))
