"""The rules of the code base, as tests."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.checkpoint.layout import list_layouts
from vitrail.models import FAMILIES
from vitrail.models.base.family import Family
from vitrail.models.catalog.families import find_preset, load_family
from vitrail.recipes.request import Request
from vitrail.train.plan import Runtime
from vitrail.train.resume import resume_run
from vitrail.train.run import start_run

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitrail"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def count_lines(*paths: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def test_vit_and_layers_are_short() -> None:
    vit = PACKAGE / "models" / "vit.py"
    assert count_lines(vit) <= 250
    assert count_lines(vit, *(PACKAGE / "layers").glob("*.py")) <= 780


def test_files_are_short_and_have_a_name_and_a_docstring() -> None:
    for path in SOURCES:
        assert count_lines(path) <= 600, path
        assert path.stem not in ("utils", "common", "helpers", "misc")
        assert ast.get_docstring(parse(path)), f"{path}: a file starts with a docstring"
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                assert node.args.kwarg is None, f"{path}: no **kwargs in constructors"


def list_top_level(kind: type[ast.FunctionDef] | type[ast.ClassDef]) -> list[tuple[str, str]]:
    """Name and file of every top-level function or class."""
    nodes = [(path, node) for path in SOURCES for node in parse(path).body]
    return [(node.name, str(path.relative_to(PACKAGE))) for path, node in nodes if isinstance(node, kind)]


def test_class_names_have_one_owner() -> None:
    owners = dict[str, list[str]]()
    for name, path in list_top_level(ast.ClassDef):
        owners.setdefault(name, []).append(path)
    assert not {name: paths for name, paths in owners.items() if len(paths) > 1}


PARTICIPLE = re.compile(r"[a-z]+(ed|en|ing)")
VERBS = ("embed", "feed", "need", "open", "listen", "flatten", "whiten")  # that end like participles
IRREGULAR_PARTICIPLES = (
    *("begun", "bound", "built", "done", "drawn", "found", "gone", "grown", "held", "kept", "known", "laid", "left"),
    *("lost", "made", "meant", "met", "said", "sent", "shown", "spent", "taught", "thought", "told", "torn", "worn"),
)
ADJECTIVES = ("apart", "cold", "deaf", "empty", "full", "near", "plain", "quick", "short", "slow", "square", "whole")


def test_functions_are_not_named_by_a_bare_participle_or_adjective() -> None:
    bare = [
        f"{path}: {name}"
        for name, path in list_top_level(ast.FunctionDef)
        if name not in VERBS and (PARTICIPLE.fullmatch(name) or name in (*IRREGULAR_PARTICIPLES, *ADJECTIVES))
    ]
    assert len(bare) < 10, bare


OUTSIDE_CLI = [path for path in SOURCES if PACKAGE / "cli" not in path.parents and path != PACKAGE / "__main__.py"]
CSS_VARIABLE = re.compile(r"var\(--[\w-]+\)|--[\w-]+:")


def list_strings(path: Path) -> list[str]:
    """Every string of a file but its docstrings, without CSS variables."""
    docstrings = {id(node.value) for node in ast.walk(parse(path)) if isinstance(node, ast.Expr)}
    nodes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [CSS_VARIABLE.sub("", node.value) for node in nodes if isinstance(node.value, str)]


def test_messages_outside_cli_name_fields_not_options() -> None:
    """An error carries the field, and cli turns it into its option. Files for other systems contain their commands."""
    named = {
        str(path.relative_to(PACKAGE)): strings
        for path in OUTSIDE_CLI
        if path.parent != PACKAGE / "export" / "targets"
        and (strings := [text for text in list_strings(path) if re.search(r"(?<![\w-])--[a-z]", text)])
    }
    assert not named


def test_nothing_outside_cli_imports_it() -> None:
    for path in OUTSIDE_CLI:
        for node in ast.walk(parse(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else names
            assert not any(re.match(r"vitrail\.cli\b", module) for module in modules), path


PROBE = re.compile(r"hasattr|getattr")
REASON = re.compile(r"#\s*(?!noqa|pyright|type:)\w")


def test_probes_are_few_and_have_a_reason() -> None:
    """What a model can do is declared in its file; a probe is for objects of other libraries, and says why."""
    probes = list[str]()
    for path in SOURCES:
        lines = path.read_text("utf-8").splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if PROBE.search(line):
                probes.append(f"{path.relative_to(PACKAGE)}: {line.strip()}")
                assert REASON.search(line) or before.strip().startswith("# "), f"{probes[-1]}: say why in a comment"
    assert len(probes) <= 25, probes


def test_cli_is_small() -> None:
    """Most of it is help: nine tasks of `pretrain`, translation, captions and comparisons have texts of their own.

    The limit grows with new commands: 150 lines for each.
    """
    assert count_lines(*(PACKAGE / "cli").rglob("*.py")) <= 4000 + 2 * 150  # serve, data


def test_imports_only_point_down() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def list_imports(path: Path) -> list[str]:
    """Modules that a file imports, but not those for type checkers only."""
    for_types = {
        id(child)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    nodes = [node for node in ast.walk(parse(path)) if id(node) not in for_types]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return modules + [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]


def test_training_knows_no_images() -> None:
    """Batches are named tensors to the loop; what they hold is known to the tasks."""
    allowed = {"vitrail.data.batch"}
    for path in (PACKAGE / "train").glob("*.py"):
        known = {name for name in list_imports(path) if name.startswith(("vitrail.data", "vitrail.evaluation"))}
        assert known <= allowed, path
        assert not re.search(r"\b(?:top1|mixup|cutmix|smoothing|normali[sz]e|pixels)\b", path.read_text("utf-8")), path


LAYOUT_PLACES = (PACKAGE / "checkpoint", PACKAGE / "cli" / "convert.py")  # where a literal may be the name of a layout
OTHER_NAMES = {
    ("study/sequence_cost.py", "axial"),  # a kind of attention, whose cost is compared with others
    *(
        (place, "igpt") for place in ("tasks/__init__.py", "tasks/pretraining/igpt.py", "cli/pretrain.py")
    ),  # the task that trains it
    ("recipes/task_settings.py", "igpt"),
}


def test_no_family_is_named_outside_models() -> None:
    """A family declares what others need to know about it, so that a new one needs no edit outside models/.

    A literal may equal the name of a family only if it is the name of a layout, or of the policy called after it, in
    checkpoint/ and for `convert`; never where it is compared with a family or passed as one.
    """
    layouts, families = {layout.name for layout in list_layouts()}, set(FAMILIES)
    for path in (each for each in SOURCES if PACKAGE / "models" not in each.parents):
        place = str(path.relative_to(PACKAGE))
        of_layouts = any(path == each or each in path.parents for each in LAYOUT_PLACES)
        allowed = {name for name in families if (place, name) in OTHER_NAMES or (of_layouts and name in layouts)}
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant):
                assert node.value not in families - allowed, f"{place}:{node.lineno}"
            elif isinstance(node, ast.Compare | ast.keyword) and re.search("famil(y|ies)", text := ast.unparse(node)):
                assert not {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)} & families, text


def check_toy_family_in_a_run(folder: Path) -> None:
    """Train it by name, stop and resume, then export and explain the result; maps that it does not have are refused."""
    recipe = vitrail.open_recipe("fashion").with_settings({"model": "toy_small", "epochs": 0.1, "save_every": 1})
    request = Request(data="fashion", recipe=replace(recipe, fields={"image_size": 28, "patch_size": 7, "channels": 1}))
    start_run(request, folder / "run", Runtime(threads=1))
    (folder / "run" / "checkpoints" / "step-00000006.safetensors").unlink()
    resume_run(folder / "run", Runtime(threads=1))
    loaded = vitrail.open_model(str(folder / "run"))
    model: Any = loaded.module
    assert model.feature_maps(torch.zeros(1, 1, 28, 28))[0].shape == (1, 8, 4, 4)
    _, check = vitrail.export_model(loaded.module, folder / "shipped", preprocessing=loaded.preprocessing)
    assert check.difference < 1e-4
    explainer = vitrail.Explainer(str(folder / "run"))
    assert explainer.explain("example:cat", method="norms").maps.shape[-2:] == (4, 4)
    with pytest.raises(ConfigError, match="it has no attention"):
        explainer.explain("example:cat", method="rollout")


def test_a_new_family_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is listed, saved, loaded, adapted, converted, trained, resumed, exported and explained."""
    monkeypatch.setattr("vitrail.models.__path__", [str(PACKAGE / "models"), str(ROOT / "tests" / "support")])
    monkeypatch.setattr("vitrail.models.catalog.families.FAMILIES", (*FAMILIES, "toy_family"))
    try:
        assert vitrail.list_models("toy*") == ["toy_large", "toy_small"]
        model, images = vitrail.create("toy_small").eval(), torch.randn(2, 3, 32, 32)
        for path, layout in ((tmp_path / "own", "vitrail"), (tmp_path / "theirs.pth", "torchvision")):
            vitrail.save(model, path, to=layout)
            checkpoint = read(path)
            assert (checkpoint.layout, checkpoint.description.family) == (layout, "toy_family")
            assert torch.equal(checkpoint.model(images), model(images))
            report = read(path, image_size=64, classes=5).report
            assert list(report.resized) == ["pos_embed"]
            assert report.initialized == ("head.weight", "head.bias")
        assert {"stem.weight", "places", "layer1.fc1.bias"} <= torch.load(tmp_path / "theirs.pth").keys()
        with pytest.raises(CheckpointError, match="the family 'toy_family'; expected one of vitrail, torchvision"):
            vitrail.save(model, tmp_path / "file.pth", to="timm")
        check_toy_family_in_a_run(tmp_path)
    finally:
        monkeypatch.undo()
        sys.modules.pop("vitrail.models.toy_family", None)


def test_model_file_ends_with_its_family() -> None:
    for name in FAMILIES:
        family = load_family(name)
        module = sys.modules[family.config.__module__]
        assert isinstance(family, Family)
        assert family.name == name
        assert family.presets is module.PRESETS
        assert is_dataclass(family.config)
        with pytest.raises(FrozenInstanceError):
            setattr(next(iter(family.presets.values())), "classes", 1)  # noqa: B010
        assert all(field.kw_only for field in fields(family.config)), name
        assert set(family.aliases.values()) <= set(family.presets)
        last = ast.parse(Path(str(module.__file__)).read_text("utf-8")).body[-1]
        assert isinstance(last, ast.Assign)
        assert ast.unparse(last.targets[0]) == "FAMILY"


def test_no_other_file_imports_a_family() -> None:
    for path in SOURCES:
        others = "|".join(name for name in FAMILIES if path.name != f"{name}.py")
        pattern = rf"models\.(text\.)?({others})\b|models(\.text)? import .*\b({others})\b"
        assert not re.search(pattern, path.read_text("utf-8")), path


def test_shared_parts_do_not_know_families() -> None:
    for path in (PACKAGE / "models" / "parts").glob("*.py"):
        assert not re.search(r"models\.(base\.family|catalog)\b", path.read_text("utf-8")), path


OFFERED = {"images": ("tokens", "logits"), "text": ("encode", "decode", "start", "step", "attention_maps")}


SIZE_FIELDS = {"image_size", "classes", "width", "depth", "heads", "mlp_width", "stages", "widths"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_preset_survives_json_and_each_kind_builds_on_the_meta_device(name: str) -> None:
    """Of presets that differ only in size, one is built here; the slow tests of costs build all."""
    family = load_family(name)
    family.check_presets()
    kinds = dict[str, Any]()
    for name, config in family.presets.items():
        fields = asdict(config)
        assert family.configure(**json.loads(json.dumps(fields))) == config
        assert find_preset(name) == (family, config)
        kinds[json.dumps({key: value for key, value in fields.items() if key not in SIZE_FIELDS})] = config
    for config in kinds.values():
        with torch.device("meta"):
            model = family.build(config)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        for method in ("init_weights", "forward", *OFFERED[model.reads]):
            assert callable(getattr(model, method))


HEAVY = {"torch", "torch._dynamo", "numpy", "PIL", "safetensors", "matplotlib"}
HELPED = (
    *("", "models", "summary", "train", "pretrain dino", "eval", "compare", "probe", "bench"),
    *("runs", "ablate", "study", "study cost", "study positions", "explain", "look", "report"),
)
WITHOUT_TORCH = ["models", *(f"{command} --help" for command in HELPED)]
PROGRAM = """
import contextlib, io, sys, vitrail
loaded = [("import vitrail", *HEAVY & set(sys.modules))]
from vitrail.cli import build_app
for words in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()):
        build_app()(words.split(), exit_on_error=False, result_action="return_value")
    loaded.append((words, *HEAVY & set(sys.modules)))
print(loaded)
"""


def test_import_and_help_load_no_heavy_modules() -> None:
    commands = [*WITHOUT_TORCH, "predict vit_fashion example:cat"]
    program = f"COMMANDS, HEAVY = {commands}, {HEAVY}{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *without, last = ast.literal_eval(done.stdout)
    assert without == [(words,) for words in ("import vitrail", *WITHOUT_TORCH)]
    assert "torch" in last  # the check can fail
    assert "torch._dynamo" not in last, "the compiler takes a second to import"


def test_makefile_calls_existing_files() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    for module in re.findall(r"python -m (vitrail\S+)", text):
        assert importlib.util.find_spec(module), module
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script).exists(), script


def test_every_public_name_resolves() -> None:
    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
        assert name in dir(vitrail)
    with pytest.raises(AttributeError, match="has no attribute 'creat'"):
        _ = getattr(vitrail, "creat")  # noqa: B009


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("device", "str | torch.device | None"),
        ("progress", "bool | collections.abc.Callable[[int], object] | None"),
    ],
)
def test_public_functions_take_the_same_devices_and_progress(parameter: str, expected: str) -> None:
    """All but `fit`, which has callbacks, and steps that are called within one."""
    found = dict[str, str]()
    for name in set(vitrail.__all__) - {"fit"}:
        public = getattr(vitrail, name)
        members = {f".{key}": each for key, each in vars(public).items()} if inspect.isclass(public) else {"": public}
        for member, function in members.items():
            given = inspect.signature(function).parameters if inspect.isfunction(function) else {}
            if parameter in given and "chunk" not in member and "iterate" not in member:
                found[name + member] = str(given[parameter].annotation)
    assert len(found) >= 8
    assert {name: each for name, each in found.items() if each != expected} == {}


def test_tests_mirror_the_tree() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        assert folder.name in ("", "parity") or (PACKAGE / folder).is_dir(), path


def test_readme_shows_the_tree() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for path in PACKAGE.iterdir():
        if (path / "__init__.py").exists():
            assert re.search(rf"── {re.escape(path.name)}/ ", text), f"the README's tree does not show {path.name}/"
