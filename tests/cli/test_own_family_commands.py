"""A model of one's own in every command: its code runs only with --trust-code, and exports need none."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.base.errors import VitrailError
from vitrail.cli import COMMANDS, COMMANDS_WITHOUT_MODELS, build_app
from vitrail.models.catalog.external_families import TRUSTED, trust

Run = Callable[..., Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family.py"
RAN = "\nimport pathlib\npathlib.Path({path!r}).write_text('ran')\n"
SIZES = "--image-size 28 --set patch_size=7 --set width=16 --set depth=2"
SHORT = "--data fashion --batch 32 --epochs 0.01 --threads 1"
STUDENT = "--model ViT-Ti/16 --image-size 28 --set patch_size=7 --set width=16 --set heads=2 --set depth=1"
READING = {  # command → what it writes, if anything
    "eval run": "",
    "eval run --wrong wrong.html": "wrong.html",
    "predict run example:cat --top 1": "",
    "predict run example:cat -o rows.csv": "rows.csv",
    "embed run example:cat -o features.npy": "features.npy",
    "probe run --data fashion --shots 1 --seeds 1 -o probe": "probe/probe.json",
    "compare run vit_fashion -o table.md": "table.md",
    "explain run example:cat -o explained": "explained/cat.norms.png",
    "look run --images 4 -o figures": "figures/filters.png",
    "report run --images 4 --explained 1 -o report.html": "report.html",
    "bench run --engines eager --batches 1 --rounds 2 --starts 1 -o speed": "speed/bench.json",
    "convert run converted --to vitrail": "converted/config.json",
    "export run shipped": "shipped/model.onnx",
    "predict run example:cat --engine onnx": "",
    "summary run": "",
    "summary run/model": "",
}
TRAINING = {
    f"train --init run {SHORT} -o tuned": "tuned/model/config.json",
    f"distill --teacher run {SHORT} {STUDENT} -o student": "student/model/config.json",
    f"pretrain simmim --init run {SHORT} --mask-size 7 --then probe -o masked": "masked/probe.json",
    f"ablate fashion --init run --without flip {SHORT} --dry-run": "",
}


def forget_code(folder: Path) -> None:
    """So that the next command would run the code again."""
    for name in [name for name in sys.modules if name.startswith(str(folder))]:
        del sys.modules[name]
    (folder / "ran").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with resmlp.py, which says when it runs, and the run of its model."""
    folder = tmp_path_factory.mktemp("own").resolve()
    (folder / "resmlp.py").write_text(EXAMPLE.read_text() + RAN.format(path=str(folder / "ran")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = f"train --model resmlp.py:resmlp_tiny {SIZES} {SHORT} -o run"
        build_app(["train"])(words.split(), exit_on_error=False, print_error=False, result_action="return_value")
    return folder


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    forget_code(trained)
    return trained


def check_line(done: Any, *texts: str) -> None:
    """One line on stderr besides notes, exit code 2, and no code was run."""
    lines = [line for line in done.err.splitlines() if not line.startswith("vitrail: note: ")]
    assert (done.code, len(lines)) == (2, 1), done.err
    assert all(text in done.err for text in texts), done.err
    assert not Path("ran").exists()


@pytest.mark.parametrize("command", [*READING, *TRAINING])
def test_every_command_needs_and_takes_trust_code(command: str, vitrail_: Run, folder: Path) -> None:
    written = {**READING, **TRAINING}[command]
    done = vitrail_(*command.split())
    option = f"--trust-code {folder}/resmlp.py:resmlp_tiny"
    if command.startswith("summary"):  # which shows what it can without the code
        assert (done.code, not Path("ran").exists()) == (0, True)
        assert "".join(option.split()) in "".join(done.out.split())  # lines end anywhere in a long path
    else:
        check_line(done, option)
    assert not written or not Path(written).exists()
    done = vitrail_(*command.split(), "--trust-code", "resmlp.py:resmlp_tiny")
    assert done.code == 0, done.err
    assert not written or Path(written).exists()
    assert TRUSTED.get() == (), "it holds for one command"


def test_all_commands_that_open_models_have_the_option(vitrail_: Run) -> None:
    for name in COMMANDS:
        assert ("--trust-code" in vitrail_(*name.split(), "--help").out) == (name not in COMMANDS_WITHOUT_MODELS), name


def test_next_steps_and_further_runs(vitrail_: Run, folder: Path) -> None:
    code = f"--trust-code {folder}/resmlp.py:resmlp_tiny"
    done = vitrail_(*f"train --init run {SHORT} -o next --trust-code resmlp.py:resmlp_tiny".split())
    assert f"vitrail eval next {code}, vitrail predict next {code} photo.jpg" in done.out
    assert f"next/model (0.0 MB) and {folder}/resmlp.py: all that others need" in done.out
    assert json.loads(Path("next/model/config.json").read_text())["code"] == code.split()[1]
    forget_code(folder)
    check_line(vitrail_("train", "--resume", "next", "--epochs", "0.02"), code)
    assert vitrail_(*f"train --resume next --epochs 0.02 {code}".split()).code == 0


def test_exports_run_no_code(vitrail_: Run, folder: Path) -> None:
    assert vitrail_("export", "run", "export", "--trust-code", "resmlp.py:resmlp_tiny").code == 0
    forget_code(folder)
    assert vitrail_("predict", "export", "example:cat", "--top", "1").code == 0
    assert not Path("ran").exists()


def test_cached_exports_follow_the_code(vitrail_: Run, folder: Path) -> None:
    """The same weights in changed code are another model."""
    words = (
        "predict",
        "run",
        "example:cat",
        "--engine",
        "onnx",
        "--top",
        "1",
        "--trust-code",
        "changed.py:resmlp_tiny",
    )
    code = (folder / "resmlp.py").read_text()
    results = list[str]()
    for text in (code, code.replace("tokens.mean(1)", "-tokens.mean(1)")):
        (folder / "changed.py").write_text(text)
        forget_code(folder)
        results.append(vitrail_(*words).out)
    assert results[0] != results[1]


def test_a_teacher_is_another_one_if_its_code_changes(folder: Path) -> None:
    """A run whose teacher has changed cannot be resumed, and cached logits are computed again."""
    code = (folder / "resmlp.py").read_text()
    found = list[str]()
    for text in (code, code, code.replace("tokens.mean(1)", "-tokens.mean(1)")):
        (folder / "changed.py").write_text(text)
        forget_code(folder)
        with trust("changed.py:resmlp_tiny"):
            found.append(vitrail.Teacher.from_name("run").fingerprint())
    assert found[0] == found[1] != found[2]


def test_translators_trust_code_as_predictors_do() -> None:
    with pytest.raises(VitrailError, match="`trust_code` mixer; expected FILE"):
        vitrail.Translator("transformer_tatoeba", trust_code="mixer")
    assert vitrail.Translator("transformer_tatoeba", trust_code="mixer.py:mixer_tiny").languages == ("de", "en")


def test_python(folder: Path) -> None:
    code = f"{folder}/resmlp.py:resmlp_tiny"
    for open_it in (vitrail.open_model, vitrail.load, vitrail.Predictor, vitrail.Explainer):
        name = "run/model" if open_it is vitrail.load else "run"
        with pytest.raises(VitrailError, match=f"add `trust_code` {code}$"):
            open_it(name)
        assert not Path("ran").exists()
        opened: Any = open_it(name, trust_code="resmlp.py:resmlp_tiny")
        assert Path("ran").exists()
        with pytest.raises(VitrailError, match="trust_code"):
            open_it(name)
        if open_it is vitrail.Explainer:
            vitrail.save(opened.loaded.model, "saved")
        forget_code(folder)
    assert vitrail.describe("saved").code == code


def edit_config(folder: Path, **changes: Any) -> None:
    """Edit config.json as somebody who sends it would."""
    data = json.loads((folder / "config.json").read_text()) | changes
    del data["checksum"]
    (folder / "config.json").write_text(json.dumps({name: value for name, value in data.items() if value is not None}))


@pytest.fixture
def theirs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder from somebody else, and code of theirs, which must never run."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "resmlp.py", tmp_path / "resmlp.py")
    evil = EXAMPLE.read_text() + RAN.format(path=str(tmp_path / "ran"))
    (tmp_path / "evil.py").write_text(evil)
    return shutil.copytree(folder / "run" / "model", tmp_path / "theirs")


NAMES = ("os:path", "evil:resmlp_tiny", "evil.py:resmlp_tiny", "/dev/zero.py:x", "a b.py:$(touch ran)", "x.py:--device")


@pytest.mark.parametrize("name", NAMES)
def test_names_in_a_file_are_only_shown(name: str, theirs: Path, vitrail_: Run) -> None:
    edit_config(theirs, code=name)
    check_line(vitrail_("predict", "theirs", "example:cat"), "--trust-code ", name)
    done = vitrail_("predict", "theirs", "example:cat", "--trust-code", "resmlp.py:resmlp_tiny")
    assert (done.code, Path("ran").exists()) == (0, False), "what the user names is used, not what the file names"


@pytest.mark.parametrize("name", ["x.py:a\nb", "\x1b[2J.py:a", "\u202e.py:a", "vit", "", 5, ["resmlp.py:resmlp_tiny"]])
def test_malformed_names_are_refused(name: Any, theirs: Path, vitrail_: Run) -> None:
    edit_config(theirs, code=name)
    done = vitrail_("predict", "theirs", "example:cat", "--trust-code", "resmlp.py:resmlp_tiny")
    check_line(done, "config.json: code is ", "expected FILE.py:NAME or MODULE:NAME")


def test_a_file_with_code_is_not_opened_as_a_family_of_the_package(
    tmp_path: Path, vitrail_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vitrail.save(vitrail.create("ViT-Ti/16", image_size=32, depth=1, classes=2), "vit")
    edit_config(tmp_path / "vit", code="os:path")
    check_line(vitrail_("predict", "vit", "example:cat"), "--trust-code os:path")


OTHER = EXAMPLE.read_text().replace('name="resmlp"', 'name="other"')
CHANGED = {
    "other.py:resmlp_tiny": (
        OTHER,
        "of the family 'resmlp', but --trust-code is other.py:resmlp_tiny of the family other",
    ),
    "resmlp.py:resmlp_tinny": (EXAMPLE.read_text(), "did you mean 'resmlp_tiny'?"),
    "os:path": ("", "'os' has no FAMILY"),
    "gone.py:resmlp_tiny": (None, "cannot import the family 'gone.py': FileNotFoundError"),
    "broken.py:resmlp_tiny": ("raise KeyError('x')", "cannot import the family 'broken.py': KeyError"),
    "empty.py:resmlp_tiny": ("", "'empty.py' has no FAMILY"),
    "renamed.py:resmlp_tiny": (EXAMPLE.read_text().replace("depth", "blocks_"), "unknown resmlp field 'depth'"),
    "wider.py:resmlp_tiny": (EXAMPLE.read_text().replace("4 * width", "3 * width"), "does not fit its config"),
    "resmlp.py": (None, "--trust-code resmlp.py; expected FILE.py:NAME or MODULE:NAME"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_and_changed_files_are_one_line(name: str, theirs: Path, vitrail_: Run) -> None:
    text, message = CHANGED[name]
    file = Path(name.partition(":")[0])
    if text is not None and file.suffix == ".py":
        file.write_text(text)
    check_line(vitrail_("predict", "theirs", "example:cat", "--trust-code", name), message)


def test_moved_files_and_folders_of_earlier_versions(theirs: Path, vitrail_: Run) -> None:
    Path("elsewhere").mkdir()
    shutil.move("resmlp.py", "elsewhere/renamed.py")
    code = "elsewhere/renamed.py:resmlp_small"  # any preset of the family
    assert vitrail_("predict", "theirs", "example:cat", "--trust-code", code).code == 0
    edit_config(theirs, code=None)
    check_line(vitrail_("predict", "theirs", "example:cat"), "unknown family 'resmlp'", "--trust-code FILE.py:NAME")
    assert vitrail_("predict", "theirs", "example:cat", "--trust-code", code).code == 0
    other = ("--trust-code", "evil.py:resmlp_tiny", "--trust-code", code)
    Path("evil.py").write_text(OTHER)
    assert vitrail_("compare", "theirs", "--data", "fashion", *other).code == 0, "each model finds its family"


def test_a_preset_has_no_weights(theirs: Path, vitrail_: Run) -> None:
    check_line(
        vitrail_("predict", "resmlp.py:resmlp_tiny", "example:cat"), "has no weights", "--model resmlp.py:resmlp"
    )
