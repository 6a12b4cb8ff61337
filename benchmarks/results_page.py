"""Pages of results: sections between markers, which a benchmark replaces; ratios, tables, and the machine."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from vitrail.base.files import write_atomically
from vitrail.base.machine import describe_machine, find_bfloat16_instructions
from vitrail.study.timing import MedianAndQuartiles, collect_versions

CAPABILITIES = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "bf16")
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # with which a faster CPU stands in for a slower one
NO_BFLOAT16 = "no instructions"  # in cells of bfloat16


def write_section(page: Path, name: str, text: str) -> None:
    """Replace the text between the section's markers."""
    begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
    before, found, rest = page.read_text("utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has no section {name}; expected the lines {begin.strip()} and {end.strip()}")
    write_atomically(page, lambda place: place.write_text(f"{before}{begin}{text.strip()}{end}{after}", "utf-8"))


def present(name: str, parts: Sequence[str], page: Path | None) -> None:
    """Print the parts of a section, and write them into the page."""
    text = "\n\n".join(part for part in parts if part)
    print(f"{text}\n", flush=True)
    if page is not None:
        write_section(page, name, text)


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> str:
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *rows))


def format_ratio(theirs: Sequence[float], own: Sequence[float], digits: int = 2) -> str:
    """How many times as long theirs take, within each round: the median and the quartiles."""
    spread = MedianAndQuartiles.from_values([other / mine for other, mine in zip(theirs, own, strict=True)])
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def describe_cpu() -> str:
    """The processor, its cores, and the instructions that torch may use."""
    import torch

    detect = getattr(torch.cpu, "get_capabilities", None)
    found = {} if detect is None else detect()
    names = [name for name in CAPABILITIES if found.get(name)]
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    usable = f"torch uses {torch.backends.cpu.get_cpu_capability()}"
    if not find_bfloat16_instructions():
        usable += ", no bfloat16 instructions"
    return ", ".join((describe_machine(), *limits, f"{usable} (the CPU has {' '.join(names)})" if names else usable))


def describe_run(script: str, options: str, threads: int, seed: int = 0) -> str:
    """Command, date, machine and versions: the last line of a section."""
    versions = ", ".join(f"{name} {number}" for name, number in collect_versions().items())
    kept = "the C allocator keeps freed memory, " if "MALLOC_TRIM_THRESHOLD_" in os.environ else ""
    return (
        f"`PYTHONPATH=tests .venv/bin/python benchmarks/{script} {options}`, {datetime.now(UTC):%Y-%m-%d}, "
        f"{describe_cpu()}, {threads} thread{'s' * (threads != 1)}, {kept}seed {seed}; {versions}."
    )
