"""CPU cores and memory of this process, and how the threads of torch wait for each other."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

CPU_INFO_FILE, PROCESS_STATUS_FILE = Path("/proc/cpuinfo"), Path("/proc/self/status")

# GNU OpenMP reads it once, when torch is imported. Its own default, 300,000, keeps a waiting thread spinning for about
# a millisecond: next to another busy process it takes the core from the very thread that it waits for.
SPIN_COUNT = "3000"
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the user's, if either is set
MAX_THREADS = 1024  # that a user or a file may request


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def describe_machine() -> str:
    """Name of the processor and number of cores that this process may use."""
    import platform  # slow to import

    lines = CPU_INFO_FILE.read_text("utf-8", "replace").splitlines() if CPU_INFO_FILE.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    count = count_cores()
    return f"{next(iter(names), platform.processor() or platform.machine())}, {count} core{'s' * (count != 1)}"


def describe_hardware() -> dict[str, str]:
    """System, processor, cores, and what torch was built for and can use. Imports torch."""
    import platform  # slow to import

    facts = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": describe_machine(),
        "cores": f"{count_cores()} of {os.cpu_count()} usable",
    }
    try:
        import torch
    except Exception as error:  # a broken installation is what the report is for
        return facts | {"torch": f"cannot be imported: {' '.join(str(error).split())}"}
    cuda = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    return facts | {
        "threads of torch": str(torch.get_num_threads()),
        "torch built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
        "GPU": ", ".join(cuda) or ("Apple (mps)" if torch.backends.mps.is_available() else "none"),
    }


@cache
def find_bfloat16_instructions() -> str:
    """The fastest for bfloat16 that torch may use here: amx_bf16, avx512_bf16, or bf16 on ARM; empty if none."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY lowers it
    if not torch.backends.mkldnn.is_available() or capability == "AVX2":
        return ""
    detect = getattr(torch.cpu, "get_capabilities", None)  # older versions of torch lack it
    found = read_cpu_flags() if detect is None else {name for name, present in detect().items() if present}
    names = ("amx_bf16", "avx512_bf16") if capability.startswith("AVX512") else ("bf16",)
    return next((name for name in names if name in found), "")


def read_cpu_flags() -> set[str]:
    """What the processor can do, as Linux lists it."""
    lines = CPU_INFO_FILE.read_text("utf-8", "replace").splitlines() if CPU_INFO_FILE.exists() else []
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}


def read_resident_bytes(name: str) -> int:
    """Resident memory of this process on Linux: VmRSS now, VmHWM its peak."""
    return read_proc_kilobytes(PROCESS_STATUS_FILE, name) * 1024


def read_proc_kilobytes(path: Path, name: str) -> int:
    line = next(line for line in path.read_text("utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def bound_spinning() -> bool:
    """Let waiting threads of torch sleep soon: `import vitrail` calls it. Returns whether it was set.

    It sets GOMP_SPINCOUNT for this process and its children, unless the user set that or OMP_WAIT_POLICY, or torch,
    which reads it once, is imported already.
    """
    if "torch" in sys.modules or any(name in os.environ for name in WAIT_VARIABLES):
        return False
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return True


@contextmanager
def restore_threads() -> Generator[None]:
    """Restore torch's number of threads at the end, without importing torch."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)
