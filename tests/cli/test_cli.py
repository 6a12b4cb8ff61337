"""The command line as a user meets it: in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from vitrail.cli import main; sys.argv[0] = 'vitrail'; main()"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)


def test_version() -> None:
    assert run("--version").stdout.strip() == f"vitrail {vitrail.__version__}"


@pytest.mark.parametrize("words", [(), ("--help",), ("models", "--help"), ("summary", "--help")])
def test_help_teaches(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 0
    assert "vitrail models" in done.stdout or "vitrail summary" in done.stdout


def test_models() -> None:
    lines = run("models", "deit_tiny*").stdout.splitlines()
    assert lines[0].split() == ["model", "parameters", "GMACs", "pixels", "also"]
    assert lines[2].split() == ["deit_tiny_distilled_patch16_224", "5,910,800", "1.261", "224×224", "DeiT-Ti-distilled"]
    assert len(lines) == 2 + 4
    assert run("models", "ViT-B/16").stdout.splitlines()[2].startswith("vit_base_patch16_224")
    assert len(run("models").stdout.splitlines()) == 2 + len(vitrail.list_models())


def test_models_as_json() -> None:
    found = json.loads(run("models", "DeiT-Ti", "--json").stdout)
    assert found["deit_tiny_patch16_224"]["parameters"] == 5_717_416


def test_summary() -> None:
    out = run(
        "summary", "DeiT-Ti", "--image-size", "64x32", "--classes", "10", "--set", "depth=2", "--depth", "1"
    ).stdout
    assert out.startswith("DeiT, input 1×3×64×32\n")
    assert "head         Linear      1×10" in out
    found = json.loads(run("summary", "ViT-Ti/16", "--image-size", "64", "--batch", "2", "--json").stdout)
    assert found["input"] == [2, 3, 64, 64]


def test_summary_of_a_family_from_outside() -> None:
    assert run("summary", f"{EXAMPLE}:mixer_tiny").stdout.startswith("Mixer, input 1×3×224×224\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("summary", "vit_b61"), "vitrail: unknown model 'vit_b61'; did you mean "),
        (
            ("summary", "ViT-B/16", "--image-size", "225"),
            "vitrail: image of 225×225 pixels is not a multiple of the 16×16",
        ),
        (
            ("summary", "ViT-B/16", "--image-size", "big"),
            "vitrail: --image-size 'big'; expected pixels such as 384, or ",
        ),
        (
            ("summary", "ViT-B/16", "--set", "heads=7"),
            "vitrail: width 768 cannot be shared by 7 heads; expected a divisor",
        ),
        (("summary", "ViT-B/16", "--set", "hedas=8"), "vitrail: unknown field of vit 'hedas'; did you mean 'heads'?"),
        (("summary", "ViT-B/16", "--set", "pool=men"), "vitrail: unknown pool 'men'; did you mean 'mean'?"),
        (("summary", "ViT-B/16", "--set", "pool"), "vitrail: --set 'pool'; expected FIELD=VALUE"),
        (("summary", "ViT-B/16", "--set", "pool=["), "vitrail: --set 'pool=['; expected FIELD=VALUE"),
        (("summary", "ViT-B/16", "--depth", "0"), "vitrail: --batch 1 --depth 0; expected both to be 1 or more"),
        (
            ("summary", "ViT-B/16", "--classes", "many"),
            'vitrail: Invalid value for --classes: unable to convert "many"',
        ),
        (("summary", "nowhere.py:tiny"), "vitrail: cannot import the family 'nowhere.py'"),
        (("summary",), 'vitrail: Command "summary" parameter MODEL requires an argument'),
        (("models", "vitt*"), "vitrail: unknown model 'vitt*'; "),
        (("sumary", "ViT-B/16"), 'vitrail: Unknown command "sumary"'),
        (("models", "--jsn"), "vitrail: Unknown option: --jsn. Did you mean --json?"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(message), done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -c 'from vitrail.cli import main; main()' models | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
