"""vitrail bench: measure how fast models run on this machine."""

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import parse_fields, parse_integers, parse_size, split_commas
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_output, print_result


def bench(
    *models: flags.Models,
    engines: str | None = None,
    batches: str = "1,8",
    threads: str = "2",
    image_size: str | None = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    peers: str = "",
    rounds: int | None = None,
    seconds: float | None = None,
    starts: int = 1,
    seed: int = 0,
    out: flags.OptionalOut = None,
    overwrite: flags.Overwrite = False,
    as_json: flags.Json = False,
) -> None:
    """Measure how fast models run on this machine.

    Prints images per second, latency, memory and start-up time. Engines and other libraries take turns in random order,
    round after round, so that a busy moment of the machine affects all of them. Ratios are computed within each round;
    the table shows the median and the quartiles, relative to the first line of each group, which is another library if
    one is named. Latency is that of a complete batch, with percentiles over all calls. Memory and start-up time are
    those of a new process until its first prediction. A batch that can be split is also measured with one stream per
    thread: onnx × 2. Inputs are noise; decoding and resizing are not included.

    Examples::

        vitrail bench vit_fashion --engines eager --batches 1 --rounds 3
        vitrail bench ViT-Ti/16 --engines eager --image-size 32,64 --batches 1 --rounds 3 --starts 0
        vitrail bench vit_fashion --engines eager,onnx --seconds 0.1 --starts 0 -o speed

    Parameters
    ----------
    models
        Models: a name that `vitrail models` lists, with random weights; a checkpoint, a run folder, hf-hub:OWNER/NAME;
        or an exported folder or .onnx file, which has one engine.
    engines
        Engines, separated by commas: eager, compiled (starts slowly), bfloat16, onnx, int8. [default: eager,onnx,int8]
    batches
        Batch sizes, separated by commas.
    threads
        Numbers of threads, separated by commas.
    image_size
        Image sizes, separated by commas: 224,384 or 384x256. Positions are resampled. [default: the model's own]
    peers
        Other libraries that run the same weights, separated by commas: timm, transformers. [default: none]
    rounds
        Number of rounds. [default: as many as fit into --seconds]
    seconds
        Seconds per engine and library. [default: 3]
    starts
        New processes per engine for memory and start-up time, of which the median counts; 0 skips both.
    seed
        Random seed for weights, inputs and the order of turns.
    out
        Folder for bench.json, bench.txt and bench.png.
        Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html.
    """
    if rounds is not None and seconds is not None:
        raise ConfigError("--rounds with --seconds; use one of them")
    sizes = [None] if image_size is None else [parse_size(each) for each in split_commas(image_size, "--image-size")]

    from vitrail.study.bench import BenchRequest, run_benchmark

    request = BenchRequest(
        models=models,
        engines=None if engines is None else split_commas(engines, "--engines"),
        sizes=sizes,
        batches=parse_integers(batches, "--batches"),
        threads=parse_integers(threads, "--threads"),
        peers=split_commas(peers, "--peers") if peers else (),
        rounds=rounds,
        seconds=3.0 if seconds is None else seconds,
        starts=starts,
        seed=seed,
        fields=parse_fields(fields),
        preprocessing=parse_fields(preprocessing, "--preprocessing") or None,
    )
    prepare_output(out, ("bench.json", "bench.txt", "bench.png"), overwrite=overwrite)
    with progress_bar(request.progress_total, "measuring") as advance:
        found = run_benchmark(request, progress=advance)
    print_notes(found.notes)
    print_result(found, found.table, found.to_json(), out, found.write, as_json=as_json)
