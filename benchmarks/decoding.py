"""Greedy and beam search compared with transformers' `generate` and CTranslate2, and with and without a cache.

    make bench

All have the same weights, random ones with which texts end after about 20 tokens, and write the same tokens, which is
checked. Beam search stops at the first 4 hypotheses, a rule that all three have. The encoder's time is included. The
libraries alternate, round after round, so that a busy moment of the machine affects all of them; CPU seconds of all
threads are counted. Ratios are computed within each round; the median of the rounds is printed with the quartiles.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from support.text_peers import (
    END,
    START,
    make_ctranslate2,
    make_marian,
    make_random_transformer,
    make_sources,
    run_ctranslate2,
    run_marian,
)

# isort: split
import ctranslate2
import torch
from cyclopts import Parameter, run
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from support.uncached_text_model import UncachedTextModel
from torch import Tensor

from vitrail.predict.search.beam_search import beam_search
from vitrail.predict.search.greedy_and_sampling import greedy
from vitrail.predict.search.hypothesis import Hypothesis

VOCABULARY = 4000
SIZES: Any = {
    "vocabulary": VOCABULARY,
    "width": 256,
    "heads": 4,
    "encoder_depth": 3,
    "decoder_depth": 3,
    "mlp_width": 512,
}
ENDING = 22  # texts of about 20 tokens
LENGTH = 64  # tokens at most
BEAM, ALPHA = 4, 1.0
CACHE_LENGTHS = (8, 16, 32, 64, 128, 256)

Texts = list[list[int]]
Decoder = Callable[[Tensor], Texts]


@dataclass(frozen=True)
class Case:
    """Sentences that are decoded in batches of `batch`."""

    search: str
    batch: int
    sentences: int


CASES = (Case("greedy", 1, 8), Case("greedy", 64, 64), Case("beam 4", 1, 8), Case("beam 4", 64, 64))


def read_text(hypothesis: Hypothesis) -> list[int]:
    return [*hypothesis.tokens, *[END] * hypothesis.finished]


def make_decoders(case: Case, model: Any, marian: Any, translator: Any) -> Mapping[str, Decoder]:
    """From source tokens to texts."""
    ids: Any = {"start": START, "end": END, "length": LENGTH}
    search: Any = {"beam": BEAM, "penalty": "length", "alpha": ALPHA, "stop": "first"}
    theirs: Any = {"num_beams": BEAM, "length_penalty": ALPHA, "early_stopping": True}
    others: Any = {"beam_size": BEAM, "length_penalty": ALPHA}
    is_greedy = case.search == "greedy"

    def decode(sources: Tensor) -> Texts:
        with torch.inference_mode():
            memory = model.encode(sources)
        if is_greedy:
            return [read_text(each) for each in greedy(model, memory, **ids)]
        return [read_text(each) for (each,) in beam_search(model, memory, **ids, **search)]

    def generate(sources: Tensor) -> Texts:
        return run_marian(marian, sources, length=LENGTH, **({"num_beams": 1} if is_greedy else theirs))

    def translate(sources: Tensor) -> Texts:
        found = run_ctranslate2(translator, sources, length=LENGTH, **({"beam_size": 1} if is_greedy else others))
        return [texts[0] for texts in found]

    return {"vitrail": decode, "transformers": generate, "CTranslate2": translate}


def split_batches(sources: Tensor, batch: int) -> list[Tensor]:
    """Batches without needless padding."""
    parts = sources.split(batch)
    return [part[:, : int((part != 0).sum(1).max())] for part in parts]


def time_decoder(decode: Decoder, batches: list[Tensor]) -> tuple[float, Texts]:
    start, texts = time.process_time(), Texts()
    for batch in batches:
        texts += decode(batch)
    return time.process_time() - start, texts


def measure(case: Case, decoders: Mapping[str, Decoder], rounds: int) -> tuple[int, dict[str, list[float]]]:
    """The number of target tokens, and CPU seconds of each library, round by round; the order changes every round."""
    batches = split_batches(make_sources(case.sentences, VOCABULARY, (6, 24)), case.batch)
    texts = {name: time_decoder(decode, batches)[1] for name, decode in decoders.items()}  # and warms up
    for name, each in texts.items():
        assert each == texts["vitrail"], f"{name} writes other tokens than vitrail"
    times: dict[str, list[float]] = {name: [] for name in decoders}
    order = list(decoders)
    for _ in track(range(rounds), f"{case.search} × {case.batch}".ljust(12), transient=True):
        for name in order:
            times[name].append(time_decoder(decoders[name], batches)[0])
        order.append(order.pop(0))
    return sum(map(len, texts["vitrail"])), times


def compare_libraries(rounds: int, threads: int, only: str) -> str:
    model = make_random_transformer(**SIZES, ending=ENDING, length=512)
    rows = list[list[str]]()
    with TemporaryDirectory() as folder:
        marian, translator = make_marian(model), make_ctranslate2(model, Path(folder), threads)
        for case in CASES:
            if not case.search.startswith(only):
                continue
            tokens, times = measure(case, make_decoders(case, model, marian, translator), rounds)
            speeds = [f"{tokens / statistics.median(times[name]):,.0f}" for name in times]
            ratios = [format_ratio(times[name], times["vitrail"]) for name in ("transformers", "CTranslate2")]
            rows.append([case.search, str(case.batch), *speeds, *ratios])
    heading = ("search", "batch", "vitrail", "transformers", "CTranslate2", "/ transformers", "/ CTranslate2")
    return markdown_table(heading, rows, "lrrrrrr")


def compare_cache(rounds: int) -> str:
    """CPU milliseconds per token of one sentence that does not end, with the cache and without."""
    model = make_random_transformer(**SIZES, ending=0, length=512)
    with torch.no_grad():
        model.output.bias[END] = -1e4
    sources = make_sources(1, VOCABULARY, (16, 16))
    rows = list[list[str]]()
    for length in CACHE_LENGTHS:
        times: dict[str, list[float]] = {"cached": [], "uncached": []}
        texts = dict[str, Texts]()
        for _ in track(range(rounds), f"{length} tokens".ljust(12), transient=True):
            for name, decoder in (("cached", model), ("uncached", UncachedTextModel(model))):

                def decode(batch: Tensor, decoder: Any = decoder, length: int = length) -> Texts:
                    with torch.inference_mode():
                        memory = decoder.encode(batch)
                    return [read_text(each) for each in greedy(decoder, memory, start=START, end=END, length=length)]

                seconds, texts[name] = time_decoder(decode, [sources])
                times[name].append(seconds)
        assert texts["cached"] == texts["uncached"], "the cache changes the tokens"
        cells = [f"{1000 * statistics.median(each) / length:.2f}" for each in times.values()]
        rows.append([str(length), *cells, format_ratio(times["uncached"], times["cached"])])
    table = markdown_table(("tokens", "cached", "uncached", "speed-up"), rows, "rrrr")
    return f"CPU ms per token of one sentence, greedy, and how many times as fast the cache is:\n\n{table}"


def main(
    *,
    rounds: int = 9,
    threads: int = 1,
    only: Annotated[str, Parameter(help="Measure only greedy, beam or cache.")] = "",
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure every case and print the tables."""
    torch.set_num_threads(threads)
    peers = "" if only == "cache" else compare_libraries(rounds, threads, only)
    cache = compare_cache(max(rounds // 3, 1)) if only in ("", "cache") else ""
    versions = f"CTranslate2 {ctranslate2.__version__}"
    run_line = describe_run("decoding.py", f"--rounds {rounds}", threads)
    present("decoding", (peers, cache, f"{run_line} {versions}."), page)


if __name__ == "__main__":
    run(main)
