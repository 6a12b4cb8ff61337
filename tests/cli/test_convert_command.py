"""vitrail convert: from any layout to any other, on the command line."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.checkpoint import read, write
from vitrail.checkpoint.layout import list_layouts
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.cli import build_app
from vitrail.cli.convert import convert

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot store")  # of preprocessing, in files that hold weights alone


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], object]:
    monkeypatch.chdir(tmp_path)
    model = add_weight_noise(vitrail.create("DeiT-Ti", image_size=32, depth=2, classes=3))
    write(model, "weights.pth", "deit")
    return lambda words: build_app()(
        shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value"
    )


@pytest.mark.parametrize(
    ("to", "out"),
    [
        ("vitrail", "folder"),
        ("timm", "folder"),
        ("timm", "file.safetensors"),
        ("hf", "folder"),
        ("torchvision", "file.pth"),
        ("deit", "file.pth"),
    ],
)
def test_round_trip(to: str, out: str, run: Callable[[str], object], capsys: pytest.CaptureFixture[str]) -> None:
    run(f"convert weights.pth {out} --to {to}")
    output = capsys.readouterr().out
    assert "weights.pth: family deit, deit layout" in output
    assert "matched       32" in output
    assert f"{out}: written in the {to} layout" in output
    run(f"convert {out} back.pth --to deit")
    assert f", {to} layout" in capsys.readouterr().out.splitlines()[0]
    one, other = (torch.load(path, weights_only=True)["model"] for path in ("weights.pth", "back.pth"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_dtype_casts_the_weights(run: Callable[[str], object]) -> None:
    run("convert weights.pth half --to vitrail --dtype float16")
    assert {tensor.dtype for tensor in vitrail.load("half").state_dict().values()} == {torch.float16}


def test_new_size_classes_and_resampling_are_recorded(run: Callable[[str], object]) -> None:
    run("convert weights.pth larger --to vitrail --image-size 64x48 --classes 7 --policy google")
    data = json.loads(Path("larger/config.json").read_text())
    assert data["config"]["image_size"] == [64, 48]
    assert data["config"]["classes"] == 7
    assert data["resampling"] == "google"
    assert data["preprocessing"]["image_size"] == [64, 48]
    assert data["provenance"]["source"]["layout"] == "deit"
    run("convert weights.pth finer --to vitrail --patch-size 8 --image-size 16")
    assert read("finer").model.config.patch_size == (8, 8)
    assert read("finer").description.resampling == "deit"


def test_labels_and_preprocessing_are_set(run: Callable[[str], object]) -> None:
    Path("labels.txt").write_text("ant\nbee\nwasp\n")
    by_hand = "--labels labels.txt --preprocessing mean=[0.1,0.2,0.3] --preprocessing crop=1"
    run(f"convert weights.pth named --to hf {by_hand}")
    about = vitrail.describe("named")
    assert about.labels == ("ant", "bee", "wasp")
    assert about.preprocessing is not None
    assert about.preprocessing.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "convert weights.pth weights.pth --to deit",
            "weights.pth already exists; use `overwrite` to replace it",
        ),
        ("convert nothing.pth out --to vitrail", "nothing.pth does not exist"),
        ("convert weights.pth out --to vitrail --from tim", "unknown layout 'tim'; did you mean 'timm'?"),
        (
            "convert weights.pth out --to vitrail --from google",
            "are not those of a model of the layout google; expected",
        ),
        ("convert weights.pth out --to vitrail --set heads=5", "width 192 cannot be divided by 5 heads"),
        ("convert weights.pth out --to vitrail --image-size 33", "expected a multiple of 16×16"),
        ("convert weights.pth out --to vitrail --labels none.txt", "--labels none.txt cannot be read"),
        (
            "convert weights.pth out --to vitrail --preprocessing men=3",
            "unknown preprocessing field 'men'; did you mean 'mean'?",
        ),
        ("convert weights.pth out --to torchvision", "out has no suffix; expected a file .pth, .bin or .safetensors"),
        ("convert weights.pth out.npz --to hf", "out.npz has the name of a file; expected a folder"),
    ],
)
def test_invalid_arguments_are_one_line_errors(words: str, message: str, run: Callable[[str], object]) -> None:
    with pytest.raises(vitrail.VitrailError) as caught:
        run(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in Path().iterdir()) == ["weights.pth"]


def test_existing_output_needs_overwrite(run: Callable[[str], object]) -> None:
    run("convert weights.pth folder --to vitrail")
    run("convert weights.pth folder --to vitrail --classes 4 --overwrite")
    assert vitrail.describe("folder").config["classes"] == 4


def test_options_list_every_layout_and_resampling_policy() -> None:
    hints = get_type_hints(convert)
    assert sorted(get_args(hints["to"])) == sorted(layout.name for layout in list_layouts())
    assert get_args(get_args(hints["policy"])[0]) == get_args(ResamplingPolicy)


@pytest.mark.parametrize("name", ["path", "source", "family", "policy"])
def test_unknown_field_is_refused(name: str, run: Callable[[str], object]) -> None:
    with pytest.raises(vitrail.ConfigError, match=rf"`fields` {name}=…; expected a field of the config"):
        run(f"convert weights.pth out --to vitrail --set {name}=timm")
