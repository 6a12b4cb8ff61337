"""vitrail study cost: what a layer costs as the sequence grows, measured beside its O(·)."""

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.bench import parse_integers
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder


def cost(
    *,
    tokens: str | None = None,
    width: int = 64,
    budget: float = 120.0,
    seed: int = 0,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Measure time and memory of layers as the sequence grows, and fit the exponents beside their O(·).

    Full attention in one fused kernel and with all its scores in memory, Linformer, axial and windowed attention, an
    LSTM and a convolution, from 64 to 16,384 tokens: table 1 of Attention Is All You Need (arXiv 1706.03762), measured.
    An attention is timed from q, k, v to its output, without the linear maps around it, which are O(n·d²) for all of
    them. Time is the processor's, of one thread, in rounds in which all take turns in shuffled order, so it may be
    measured on a busy machine; an exponent is fitted in each round, and the table has the median. Memory is what a
    layer reads and the most that the process grows by while it runs.

    Examples::

        vitrail study cost --tokens 64,1024,2304 --budget 2
        vitrail study cost --tokens 64,1024 --width 32 --budget 1 -o cost

    Parameters
    ----------
    tokens
        Lengths, with commas; squares of multiples of 8, since axial and windowed attention need a grid. Unless said
        64,256,576,1024,2304,4096,9216,16384.
    width
        Of a token; attention has one head of it.
    budget
        Seconds in all, about: as many rounds as there is room for, three at least. What would take too long for it, or
        more than half of the free memory, is left out and named.
    seed
        Of the numbers, and of the order of turns.
    out
        A folder for cost.json, cost.txt and cost.png.
    overwrite
        Replace files that exist.
    as_json
        Print JSON and nothing else.
    """
    lengths = None if tokens is None else parse_integers(tokens, "tokens")

    from vitrail.study.sequence_cost import DEFAULT_TOKENS, PROGRESS_PARTS, CostRequest
    from vitrail.study.sequence_cost import measure_sequence_cost as measured

    request = CostRequest(tokens=lengths or DEFAULT_TOKENS, width=width, budget=budget, seed=seed)
    prepare_figure_folder(out, ("cost.json", "cost.txt", "cost.png"), overwrite=overwrite)
    try:
        with progress_bar(PROGRESS_PARTS, "measuring") as advance:
            found = measured(request, progress=advance)
    except KeyboardInterrupt:
        print("vitrail: stopped; nothing is written: a smaller --budget ends sooner", file=sys.stderr)
        raise
    for note in found.notes:
        print(f"vitrail: note: {note}", file=sys.stderr)
    written = [] if out is None else found.write(out)
    if as_json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    print(f"{found.machine}; {', '.join(f'{name} {number}' for name, number in found.versions.items())}")
    print(found)
    if written:
        print(f"\nwritten: {', '.join(map(str, written))}")
