"""The examples run and print what the README shows."""

import re
import runpy
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from support.core_environment import ROOT, link_core_packages, run_in_core_environment
from support.noisy_weights import add_weight_noise
from timm.models.mlp_mixer import Affine as TimmAffine
from timm.models.mlp_mixer import MlpMixer, ResBlock
from torch import Tensor

import vitrail

EXAMPLES = ROOT / "examples"


def test_tour(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "tour.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for shown in (
        "86,567,656",
        "86,415,592 in layers, 152,064 bare",
        "one logit per class; the head starts at zero",
    ):
        assert shown in printed


def test_demo(tmp_path: Path) -> None:
    """With the core packages only, one block and a tenth of an epoch; docs/results.md has the accuracy."""
    packages, folder = tmp_path / "packages", tmp_path / "runs" / "demo-2"
    packages.mkdir()
    (tmp_path / "runs" / "demo").mkdir(parents=True)  # taken
    words = (EXAMPLES / "demo.py", "--epochs", "0.1", "--set", "depth=1")
    done = run_in_core_environment(link_core_packages(packages), ROOT / "src", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    for shown in ("$ vitrail train --out runs/demo-2", "10 classes", "validation top-1", "vitrail eval runs/demo-2"):
        assert shown in done.stdout
    table = done.stdout.partition("Predictions for one test image per class")[2].partition("What it attends to")[0]
    for label in ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag"):
        assert f"\n{label} " in table
    assert (folder / "curves.png").exists()
    assert (folder / "model" / "model.safetensors").exists()
    assert "What the model looked at" in (folder / "report.html").read_text("utf-8")
    figure, report, page = done.stdout.splitlines()[-3:]
    assert page == "page    vitrail serve runs/demo-2, then open http://127.0.0.1:8000/"
    assert figure == "figure  runs/demo-2/explained/dress.grad-rollout.png"
    assert report.startswith("report  runs/demo-2/report.html")
    assert (tmp_path / figure.split()[1]).exists()


def test_own_family_equals_timm() -> None:
    """The example is the paper's model: timm's tensors, under other names, give the same output."""
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_blocks": 2, "mlp_ratio": 4.0}
    parts: dict[str, Any] = {"block_layer": ResBlock, "norm_layer": TimmAffine}
    theirs = add_weight_noise(MlpMixer(**sizes, **parts, num_classes=5))
    ours = vitrail.create(
        f"{EXAMPLES}/own_family.py:resmlp_tiny", image_size=32, patch_size=8, width=24, depth=2, classes=5
    )
    names = {"stem.": "patch_embed.", "linear_tokens": "between", "mlp_channels": "within"}
    renamed = dict[str, Tensor]()
    for name, tensor in theirs.state_dict().items():
        ours_name = re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], name)
        renamed[ours_name] = tensor.flatten() if name.endswith(("alpha", "beta")) else tensor
    ours.load_state_dict(renamed)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert (ours.eval()(images) - theirs(images)).abs().max() <= 1e-5


def test_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a fraction of an epoch; the second call finds a finished run."""
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "own_task.py"))["main"]
    main(0.05)
    main(0.05)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"after 3 steps: loss 1\.\d+, accuracy 0\.\d+", first)
    assert first == second
    assert vitrail.load("runs/rotation/model").config.classes == 0
    assert len((EXAMPLES / "own_task.py").read_text("utf-8").splitlines()) <= 60


def read_notebook() -> Any:
    return nbformat.read(EXAMPLES / "first_steps.ipynb", nbformat.NO_CONVERT)


def test_the_notebook_is_made_from_its_script() -> None:
    """By `make notebook`."""
    made, kept = jupytext.read(EXAMPLES / "first_steps.py"), read_notebook()
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ]
    assert kept.metadata["kernelspec"]["name"] == "python3"


def test_the_notebook_is_stored_with_its_outputs() -> None:
    """Of one run from top to bottom, without bars, colors of a terminal, and paths of the machine it was made on."""
    cells = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    check_outputs(cells)
    shown = "".join(
        text
        for cell in cells
        for output in cell.outputs
        for text in (output.get("text", ""), *(text for kind, text in output.get("data", {}).items() if "text" in kind))
    )
    assert "validation: top-1" in shown
    assert not re.search(r"\x1b|<progress|(?<![<\w])/\w+/\w", shown), shown


def check_outputs(cells: list[Any]) -> None:
    """Each cell has an output: two explanations, the curves, the bars of the prediction, the results of training."""
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(cell.outputs for cell in cells)
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 3
    assert sum("text/html" in output.get("data", ()) for output in outputs) >= 2
    (training,) = (cell for cell in cells if "vitrail.fit" in cell.source)
    assert any("top-1" in output.get("text", "") for output in training.outputs)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """With a fraction of an epoch instead of six."""
    notebook = read_notebook()
    (training,) = (cell for cell in notebook.cells if "vitrail.fit" in cell.source)
    assert '"epochs": 6' in training.source
    training.source = training.source.replace('"epochs": 6', '"epochs": 0.2')
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check_outputs([cell for cell in notebook.cells if cell.cell_type == "code"])
    assert (tmp_path / "my_first_vit" / "model.safetensors").exists()
