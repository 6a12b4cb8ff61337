"""vitrail study cost: measure what layers cost as the sequence grows."""

import sys

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import parse_integers
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_output, print_result


def cost(
    *,
    tokens: str | None = None,
    width: int = 64,
    budget: float = 120.0,
    seed: int = 0,
    out: flags.OptionalOut = None,
    overwrite: flags.Overwrite = False,
    as_json: flags.Json = False,
) -> None:
    """Measure time and memory of layers as the sequence grows.

    Full attention as one fused kernel and with all its scores in memory, Linformer, axial and windowed attention, an
    LSTM and a convolution, from 64 to 16,384 tokens: table 1 of Attention Is All You Need (arXiv 1706.03762), measured.
    Fitted exponents are compared with the O(·) of theory. Attention is timed from q, k, v to its output, without the
    linear maps around it, which are O(n·d²) for all of them. Time is CPU time of one thread, in rounds in which all
    layers take turns in random order, so a busy machine is fine; an exponent is fitted in each round, and the table
    shows the median.

    Examples::

        vitrail study cost --tokens 64,1024,2304 --budget 2
        vitrail study cost --tokens 64,1024,2304 --width 32 --budget 1 -o cost

    Parameters
    ----------
    tokens
        Sequence lengths, separated by commas: squares of multiples of 8, since axial and windowed attention need a
        grid. [default: 64,256,576,1024,2304,4096,9216,16384]
    width
        Width of a token; attention has one head.
    budget
        Approximate total seconds: as many rounds as fit, at least three. Layers that would take too long, or more than
        half of the free memory, are left out and reported.
    seed
        Random seed for the inputs and the order of turns.
    out
        Folder for cost.json, cost.txt and cost.png.
        Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html.
    """
    lengths = None if tokens is None else parse_integers(tokens, "--tokens")

    from vitrail.study.sequence_cost import DEFAULT_TOKENS, CostRequest, measure_sequence_cost
    from vitrail.study.timing import PROGRESS_PARTS

    request = CostRequest(tokens=lengths or DEFAULT_TOKENS, width=width, budget=budget, seed=seed)
    prepare_output(out, ("cost.json", "cost.txt", "cost.png"), overwrite=overwrite)
    try:
        with progress_bar(PROGRESS_PARTS, "measuring") as advance:
            found = measure_sequence_cost(request, progress=advance)
    except KeyboardInterrupt:
        print("vitrail: stopped; nothing is written: a smaller --budget ends sooner", file=sys.stderr)
        raise
    print_notes(found.notes)
    print_result(found, found.table, found.to_json(), out, found.write, as_json=as_json)
