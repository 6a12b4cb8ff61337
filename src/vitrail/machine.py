"""What this machine offers a process: its cores and their kind."""

import os
from pathlib import Path

CPU_INFO_FILE = Path("/proc/cpuinfo")


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> str:
    """The name of the processor, and how many of its cores this process may use."""
    import platform  # slow to import, and opening a model does not need it

    try:
        lines = CPU_INFO_FILE.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = count_cores()
    return f"{next(iter(names), platform.processor() or platform.machine())}, {cores} core{'s' * (cores != 1)}"
