"""Train small models of all families on CIFAR-10, each for the same time at about 50 M multiply-adds.

    python benchmarks/cifar10_families.py --data cifar-10-batches-bin --out runs/families

Two models train at a time, each on one core for three minutes, with the settings of the recipe `cifar10-cpu` but
without its stem and its small images. ViT has three seeds, whose range shows what a difference of one seed is worth.
Finished runs are kept, so an interrupted benchmark continues.
"""

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter, run
from rich.progress import track

import vitrail
from vitrail.base.figures import new_figure, save_figure, style_axes
from vitrail.base.style import BLUE, RED
from vitrail.base.text import format_table
from vitrail.inspection.summary import summarize
from vitrail.train.run_folder import RunFolder


@dataclass(frozen=True)
class Entry:
    label: str
    preset: str
    fields: str
    seed: int = 0

    @property
    def folder(self) -> str:
        return f"{self.label.replace(' ', '-')}-{self.seed}"


VIT = "patch_size=4 width=128 depth=4 heads=4 mlp_width=384"
ENTRIES = (
    Entry("ViT", "ViT-Ti/16", f"{VIT} pool=mean"),
    Entry("ViT", "ViT-Ti/16", f"{VIT} pool=mean", seed=1),
    Entry("ViT", "ViT-Ti/16", f"{VIT} pool=mean", seed=2),
    Entry("SimpleViT", "SimpleViT-S/16", VIT),
    Entry("DeiT", "DeiT-Ti", "patch_size=4 width=120 depth=4 heads=4"),
    Entry("hybrid", "R26+ViT-S/32", "stages=[] width=116 depth=4 heads=4"),
    Entry("T2T-ViT", "T2T-ViT-7", "width=320 depth=12 heads=5"),
    Entry("CCT", "cct_7_3x1_32", "stem=[32] width=128 depth=4 heads=4 mlp_width=256"),
    Entry("SL-ViT", "SL-ViT", VIT),
    Entry("CaiT", "CaiT-XXS24", f"{VIT} class_depth=2 layer_scale=0.1"),
    Entry("DeepViT", "DeepViT-16B", f"{VIT} reattending=2"),
    Entry("Parallel ViT", "ViT-S18x2", "patch_size=4 width=128 depth=2 heads=4 mlp_width=384 layer_scale=none"),
    Entry("BEiT", "BEiT-B/16", f"{VIT} layer_scale=none"),
    Entry("EVA (DINOv3)", "DINOv3-S/16", f"{VIT} layer_scale=none registers=0"),
    Entry("PiT", "PiT-Ti", "patch_size=4 stride=2 stages=[1,2,1] widths=[64,128,256] heads=[2,4,8] mlp_ratio=2.5"),
    Entry("CvT", "cvt_13_224", "stride=2 stages=[1,2] widths=[72,144] heads=[1,2]"),
    Entry("PVTv2", "pvt_v2_b0", "stride=2 stages=[1,3] widths=[48,128] heads=[1,4] reductions=[2,1] mlp_ratios=[4,4]"),
    Entry(
        "CrossViT",
        "CrossViT-S",
        "patch_sizes=[4,8] scales=[1,1] widths=[96,192] heads=[4,4] branch_depths=[1,2] depth=2 mlp_ratio=3",
    ),
    Entry("Swin", "Swin-T", "patch_size=2 stages=[2,2] widths=[60,120] heads=[2,4] windows=4"),
    Entry("Swin-V2", "swinv2_tiny_window8_256", "patch_size=2 stages=[2,2] widths=[60,120] heads=[2,4] windows=4"),
    Entry(
        "Twins", "Twins-SVT-S", "patch_size=2 stages=[2,2] widths=[60,120] heads=[2,4] windows=[4,4] reductions=[2,1]"
    ),
    Entry("MaxViT", "MaxViT-T", "stem_stride=1 stem_width=16 stages=[1,2] widths=[40,80] heads=[1,2] window=4"),
    Entry("NesT", "nest_tiny_jx", "patch_size=2 stages=[1,2,1] widths=[48,96,192] heads=[2,4,8]"),
    Entry(
        "CrossFormer",
        "CrossFormer-S",
        "kernels=[2,4,8,16] stages=[2,2] widths=[56,112] heads=[2,4] windows=[4,4] intervals=[4,2]",
    ),
    Entry(
        "RegionViT", "RegionViT-Ti", "patch_size=2 window=4 convolutions=false stages=[2,2] widths=[60,120] heads=[2,4]"
    ),
    Entry(
        "ScalableViT",
        "ScalableViT-S",
        "stride=2 stages=[2,2] widths=[56,112] heads=[2,4] windows=[4,4] reductions=[2,1] key_ratios=[1.25,1] "
        "head_width=256",
    ),
    Entry("SepViT", "SepViT-T", "stride=2 stages=[1,2] widths=[64,128] heads=[2,4] windows=[4,4] odd_windows=[8,8]"),
    Entry("Linformer", "linformer_tiny_patch16_224", "patch_size=4 width=128 depth=4 heads=4 projected=16"),
    Entry("axial", "axial_tiny_patch16_224", "patch_size=4 width=128 depth=3 heads=4 mlp_width=384"),
    Entry("LeViT", "levit_128s", "convolutions=2 stages=[2,3,2] widths=[128,192,256] heads=[4,6,8] distilled=false"),
    Entry(
        "MobileViT", "mobilevit_xxs", "convolutions=[1,1,1] stages=[0,2,2] widths=[32,96,128] token_widths=[0,128,160]"
    ),
    Entry("PatchMerger", "patch_merger_tiny_patch16_224", "patch_size=4 width=128 depth=6 heads=4 merged=8"),
    Entry("ConvNeXt", "convnext_tiny", "patch_size=2 stages=[2,3] widths=[64,128] layer_scale=0.1"),
    Entry("ResNet", "ResNet-18", "stem=cifar stages=[1,1,1] width=32 block=basic"),
    Entry("RegNetY", "RegNetY-4GF", "stages=[3,6,3] widths=[128,256,384] group_width=32"),
)


def train(entry: Entry, data: str, out: Path, minutes: float) -> None:
    """Train one model in a process of its own, unless its run is finished."""
    folder = out / entry.folder
    if (folder / "model").exists():
        return
    words = ["train", "--recipe", "cifar10-cpu", "--data", data, "--model", entry.preset, "--image-size", "32"]
    for field in entry.fields.split():
        words += ["--set", field]
    words += ["--minutes", str(minutes), "--threads", "1", "--seed", str(entry.seed), "--early-size", "0"]
    words += ["--precision", "float32"]
    words += ["--no-whiten", "--out", str(folder)]
    done = subprocess.run([sys.executable, "-m", "vitrail", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{entry.label}: {done.stderr.strip()}")


def describe(entry: Entry, out: Path) -> Sequence[str]:
    folder = out / entry.folder
    model = vitrail.load(str(folder / "model"))
    last = RunFolder(folder).read_records()[-1]
    name = entry.label if entry.seed == 0 else f"{entry.label}, seed {entry.seed}"
    macs, parameters = summarize(model).macs, sum(weight.numel() for weight in model.parameters())
    return name, f"{parameters / 1e6:.2f}", f"{macs / 1e6:.1f}", f"{last['epoch']:.2f}", f"{last['val_top1']:.1%}"


def plot(rows: Sequence[Sequence[str]], path: Path) -> None:
    """A bar per model, and the range of the seeds of ViT as a band."""
    figure = new_figure(7.0, 0.24 * len(rows) + 0.6)
    axes, values = figure.subplots(), [float(row[-1].rstrip("%")) for row in rows]
    names = [row[0] for row in rows]
    seeds = [value for name, value in zip(names, values, strict=True) if name.startswith("ViT")]
    axes.axvspan(min(seeds) - 0.15, max(seeds) + 0.15, color=RED, alpha=0.35, linewidth=0)
    axes.barh(names, values, 0.7, color=[RED if name.startswith("ViT") else BLUE for name in names])
    axes.bar_label(axes.containers[0], labels=[f" {value:.1f}" for value in values], fontsize=7)  # type: ignore[arg-type]
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    style_axes(axes, "CIFAR-10 after 3 minutes on one core, about 50 M multiply-adds")
    axes.set_xlabel("top-1 of the 10,000 test images in %, one seed; red: three seeds of ViT", fontsize=8)
    save_figure(figure, path)


def main(
    *,
    data: str,
    out: Path = Path("runs/families"),
    minutes: float = 3,
    jobs: Annotated[int, Parameter(help="Models that train at the same time.")] = 2,
    figure: Annotated[Path | None, Parameter(help="Write a bar chart to this file.")] = None,
) -> None:
    """Train all entries that are not finished, and print the table, best first."""
    with ThreadPoolExecutor(jobs) as pool:
        for each in track([pool.submit(train, entry, data, out, minutes) for entry in ENTRIES]):
            each.result()
    rows = sorted((describe(entry, out) for entry in ENTRIES), key=lambda row: -float(row[-1].rstrip("%")))
    print("\n".join(format_table(("model", "M parameters", "M MACs", "epochs", "top-1"), rows, "lrrrr")))
    if figure is not None:
        plot(rows, figure)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(main)
