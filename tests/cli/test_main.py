"""The command line as a whole, in a new process or in this one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy_datasets import write_class_folders

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.checkpoint import write
from vitrail.cli import name_options
from vitrail.cli.output.streams import PipeTolerantOutput

Run = Callable[..., Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family.py"
PROGRAM = "import sys; from vitrail.cli import main; sys.argv[0] = 'vitrail'; main()"


def test_version() -> None:
    command = [sys.executable, "-c", PROGRAM, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"vitrail {vitrail.__version__}"


@pytest.mark.parametrize(
    ("words", "lesson"),
    [
        ((), "List the models and their public weights."),
        (("--help",), "vitrail COMMAND --help"),
        (("models", "--help"), "vitrail models 'deit*'"),
        (("summary", "--help"), "vitrail summary ViT-S/16 --set positions=rotary --set pool=mean"),
        (("summary", "--help"), "vitrail summary vit_fashion --tensors --json"),
    ],
)
def test_help_shows_examples(vitrail_: Run, words: tuple[str, ...], lesson: str) -> None:
    done = vitrail_(*words)
    assert done.code == 0
    assert lesson in " ".join(done.out.replace("│", " ").split())


def test_fields_in_messages_become_options() -> None:
    error = ConfigError("`batch_size` is 300 and `fields` are given; `other` stays", fields=("batch_size", "fields"))
    assert name_options(str(error), error.fields) == "--batch-size is 300 and --set are given; `other` stays"
    assert name_options("pass `heads=…` or `source`", ("heads=…", "source")) == "pass --set heads=… or --from"


def test_models_lists_presets(vitrail_: Run) -> None:
    lines = vitrail_("models", "deit_tiny*").out.splitlines()
    assert lines[0].split() == ["model", "parameters", "GMACs", "resolution", "weights", "top-1", "also"]
    assert lines[2].split()[:4] == ["deit_tiny_distilled_patch16_224", "5,910,800", "1.261", "224×224"]
    assert lines[2].split()[4:] == ["fb_in1k", "74.5", "DeiT-Ti-distilled"]
    assert len(lines) == 2 + 4
    assert vitrail_("models", "ViT-B/16").out.splitlines()[2].startswith("vit_base_patch16_224")
    everything = vitrail_("models").out.splitlines()
    assert len(everything[:-2]) == 2 + len(vitrail.list_models())
    assert everything[-1] == "Bundled with their weights: cct_cifar10, transformer_tatoeba, vit_cifar10, vit_fashion"
    assert len(vitrail_("models", "dinov2").out.splitlines()) == 2 + 8


def test_models_are_compared_and_measured(vitrail_: Run) -> None:
    lines = vitrail_("models", "swin_tiny*", "ViT-Ti/16", "vit_tiny_patch16_224", "--table").out.splitlines()
    assert lines[0].split() == ["model", "family", "parameters", "GMACs", "top-1", "license"]
    assert [line.split()[0] for line in lines[2:]] == ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"]
    measured = json.loads(vitrail_("models", "sl_vit_patch4_32", "--measure", "--json").out)
    assert measured["sl_vit_patch4_32"]["images_per_second"] > 0
    heading, _, row = vitrail_("models", "sl_vit_patch4_32", "--measure").out.splitlines()
    assert heading.split()[-1] == "images/s"
    assert float(row.split()[-1].replace(",", "")) > 0
    error = vitrail_("models", "--measure")
    assert (error.code, error.err.count("\n")) == (2, 1)
    assert "--measure needs PATTERNS" in error.err


def test_models_as_json(vitrail_: Run) -> None:
    found = json.loads(vitrail_("models", "DeiT-Ti", "--json").out)
    assert found["deit_tiny_patch16_224"]["parameters"] == 5_717_416


def test_summary(vitrail_: Run) -> None:
    out = vitrail_(
        "summary", "DeiT-Ti", "--image-size", "64x32", "--classes", "10", "--set", "depth=2", "--depth", "1"
    ).out
    assert out.startswith("DeiT, input 1×3×64×32\n")
    assert "head         Linear      1×10" in out
    words = ("--image-size", "64", "--batch", "2", "--set", "layer_scale=1e-5", "--set", "mlp_width=none", "--json")
    found = json.loads(vitrail_("summary", "ViT-Ti/16", *words).out)
    assert found["input"] == [2, 3, 64, 64]
    assert (found["config"]["layer_scale"], found["config"]["mlp_width"]) == (1e-5, None)


def test_summary_of_an_external_family(vitrail_: Run) -> None:
    assert vitrail_("summary", f"{EXAMPLE}:resmlp_tiny").out.startswith("ResMLP, input 1×3×224×224\n")


def test_summary_of_a_file(vitrail_: Run, tmp_path: Path) -> None:
    write(vitrail.create("DeiT-Ti", image_size=32, depth=1), tmp_path / "weights.pth", to="deit")
    words = ("summary", str(tmp_path / "weights.pth"))
    page = vitrail_(*words).out
    assert "layout         deit\n" in page
    assert "blocks.#.attn.qkv.weight   1 ×  (576, 192)" in page
    assert "\nsuspicious\n- head of zeros" in page
    assert re.search(r"^blocks.0.norm1.weight +\(192,\) +float32 +1 +0 +1 +1$", vitrail_(*words, "--tensors").out, re.M)
    found = json.loads(vitrail_(*words, "--json", "--from", "timm", "--set", "heads=6").out)
    assert (found["layout"], found["config"]["heads"], "tensors" in found) == ("timm", 6, False)
    assert json.loads(vitrail_(*words, "--json", "--tensors").out)["tensors"][0]["name"] == "cls_token"


def test_summary_of_an_unknown_file(vitrail_: Run, tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.randn(3, 4)}, tmp_path / "other.pth")
    done = vitrail_("summary", str(tmp_path / "other.pth"))
    assert (done.code, done.err) == (0, "")
    assert "layout         unknown\n" in done.out
    assert "features.#.weight  1 ×  (3, 4)  float32" in done.out


def test_summary_refuses_damaged_files_and_invalid_options(vitrail_: Run, tmp_path: Path) -> None:
    intact, truncated, code = (str(tmp_path / name) for name in ("intact.pth", "truncated.pth", "code.pth"))
    torch.save({"a": torch.randn(300)}, intact)
    Path(truncated).write_bytes(Path(intact).read_bytes()[:-200])
    torch.save({"a": re.compile("a")}, code)
    for words, message in (
        ((truncated,), f"vitrail: {truncated} "),
        ((code,), f"vitrail: {code} is a pickle that wants to run "),
        ((str(tmp_path / "nowhere"),), f"vitrail: {tmp_path}/nowhere does not exist; expected a checkpoint"),
        ((intact, "--from", "tim"), "vitrail: unknown layout 'tim'; did you mean 'timm'?"),
        (
            (intact, "--set", "hedas=3"),
            "vitrail: unknown config field 'hedas'; did you mean 'heads'?",
        ),
        ((intact, "--set", "path=3"), "vitrail: unknown config field 'path'; "),
        ((intact, "--set", "heads"), "vitrail: --set 'heads'; expected FIELD=VALUE"),
        (("ViT-Ti/16", "--from", "timm"), "vitrail: --from timm is the layout of a file, but ViT-Ti/16 is a name; "),
    ):
        done = vitrail_("summary", *words)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), done.err
        assert done.err.startswith(message), done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("summary", "vit_b61"), "vitrail: vit_b61 is neither a file nor the name of a model; did you mean "),
        (
            ("summary", "ViT-B/16", "--image-size", "225"),
            "vitrail: image of 225×225 pixels; expected a multiple of 16×16",
        ),
        (
            ("summary", "ViT-B/16", "--image-size", "big"),
            "vitrail: --image-size 'big'; expected pixels such as 384, or ",
        ),
        (
            ("summary", "ViT-B/16", "--set", "heads=7"),
            "vitrail: width 768 cannot be divided by 7 heads; expected a divisor",
        ),
        (("summary", "ViT-B/16", "--set", "hedas=8"), "vitrail: unknown vit field 'hedas'; did you mean 'heads'?"),
        (("summary", "ViT-B/16", "--set", "pool=men"), "vitrail: unknown pool 'men'; did you mean 'mean'?"),
        (("summary", "ViT-B/16", "--set", "pool"), "vitrail: --set 'pool'; expected FIELD=VALUE"),
        (("summary", "ViT-B/16", "--set", "pool=["), "vitrail: --set 'pool=['; expected FIELD=VALUE"),
        (("summary", "ViT-B/16", "--depth", "0"), "vitrail: --depth is 0; expected 1 or more"),
        (
            ("summary", "ViT-B/16", "--classes", "many"),
            "vitrail: classes is 'many'; expected a whole number",
        ),
        (("summary", "nowhere.py:tiny"), "vitrail: cannot import the family 'nowhere.py'"),
        (("summary", "ViT-B/16", "--set", "name=1"), "vitrail: unknown vit field 'name'; "),
        (("summary", "ViT-B/16", "--set", "preset=1"), "vitrail: unknown vit field 'preset'; "),
        (("summary", "ViT-B/16", "--set", "pool=" + 3000 * "["), "vitrail: --set 'pool=[[[[[[[[[[[[["),
        (("summary", "ViT-B/16", "--set", "width=" + 5000 * "9"), "vitrail: --set 'width=9999999999999"),
        (
            ("summary", "ViT-B/16", "--set", "width=99999999999"),
            "vitrail: width is 99999999999; expected at most 1,048,576",
        ),
        (("summary", "ViT-B/16", "--classes", "1.5"), "vitrail: classes is 1.5; expected a whole number"),
        (("summary", str(EXAMPLE)), f"vitrail: '{EXAMPLE}' has no preset; expected {EXAMPLE}:resmlp_tiny or another"),
        (("summary",), "vitrail: summary needs MODEL."),
        (("models", "vitt*"), "vitrail: no model matches 'vitt*'; `vitrail models` lists all names"),
        (("models", "vitt_tiny"), "vitrail: unknown model 'vitt_tiny'; did you mean 'vit_tiny_patch16_224'?"),
        (("sumary", "ViT-B/16"), "vitrail: Unknown command 'sumary'. Did you mean vitrail summary?"),
        (("models", "--jsn"), "vitrail: Unknown option --jsn. Did you mean --json?"),
    ],
)
def test_user_error_is_one_line_and_exit_code_2(vitrail_: Run, words: tuple[str, ...], message: str) -> None:
    done = vitrail_(*words)
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith(message), done.err


@pytest.mark.parametrize("words", [("models",), ("models", "ViT-B/16"), ("summary", "ViT-Ti/16")])
def test_closed_pipe_is_not_an_error(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_training_continues_after_its_output_is_closed() -> None:
    read, write = os.pipe()
    os.close(read)
    with PipeTolerantOutput(os.fdopen(write, "wb"), "utf-8") as stream:
        for _ in range(3):
            print("epoch 1", file=stream, flush=True)
        assert os.fstat(stream.fileno()).st_rdev == Path(os.devnull).stat().st_rdev


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_full_disk_is_a_one_line_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", PROGRAM, "models"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "vitrail: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_outputs_are_not_an_error(tmp_path: Path, closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM, "look", "--lessons", "-o"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "gelu.png").exists()


def test_too_long_file_name_is_a_one_line_error(vitrail_: Run) -> None:
    done = vitrail_("explain", "x" * 300, "photo.jpg")
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert done.err.endswith("cannot be used: File name too long\n")


def test_terminal_without_box_characters_is_not_an_error() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", PROGRAM, "models", "ViT-B/16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "224?224" in done.stdout


def test_external_family_in_the_current_folder() -> None:
    command = [sys.executable, "-P", "-c", PROGRAM, "summary", "own_family:resmlp_tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLE.parent)
    assert done.stdout.startswith("ResMLP, input 1×3×224×224\n"), done.stderr


def test_nothing_else_is_imported_from_the_current_folder(
    vitrail_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine.py").write_text(EXAMPLE.read_text())
    assert vitrail_("summary", "of_mine:resmlp_tiny").code == 0
    assert str(tmp_path) not in sys.path


def test_started_processes_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('run')")
    ask = "import os, sys; from vitrail.cli import main; sys.argv = ['vitrail', '--version']\n"
    ask += (
        "try: main()\nfinally: os.execv(sys.executable, [sys.executable, '-c', 'import json; print(json.dumps([1]))'])"
    )
    command = [sys.executable, "-P", "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["[1]"], ""), done


@pytest.mark.parametrize(
    ("command", "most"),
    [
        ("predict weights.pth example:cat", 2),  # its first bytes may be those of an image
        ("train --data photos --init weights.pth --batch 2 --epochs 0.25 --out run", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not specify")
def test_weights_are_opened_once(
    vitrail_: Run, command: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_class_folders(tmp_path / "photos", ants=8, bees=8)
    tensors = vitrail.create("ViT-Ti/16", image_size=32, width=192, depth=1, classes=3).state_dict()
    torch.save(tensors, "weights.pth")
    opened, counts = list[object](), [True]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and counts:
            opened.append(arguments[0])

    sys.addaudithook(count)  # for os.open and open alike; it cannot be removed
    done = vitrail_(*command.split())
    counts.clear()
    assert done.code == 0, done.err
    assert 1 <= sum(Path(str(path)).name == "weights.pth" for path in opened) <= most
