"""Models by name: presets, aliases, external families, and errors for unknown names."""

import subprocess
import sys
from dataclasses import make_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saved_models import write_model_folder, write_run_folder
from torch import nn

import vitrail
from vitrail.base.errors import ConfigError, VitrailError
from vitrail.checkpoint.layouts import PARTS_OF_NAMES
from vitrail.models.base.family import Family
from vitrail.models.catalog.external_families import MOVED_MODULES
from vitrail.models.catalog.families import find_preset, list_family_entries, load_built_in_families, load_family
from vitrail.models.vit import ViT, ViTConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_family.py"


def test_create_replaces_fields() -> None:
    model = vitrail.create("vit_tiny_patch16_224", classes=10, image_size=(32, 64), depth=1)
    assert isinstance(model, ViT)
    assert model.config.image_size == (32, 64)
    assert model(torch.randn(2, 3, 32, 64)).shape == (2, 10)


def test_aliases_refer_to_presets() -> None:
    for family in load_built_in_families():
        for alias, preset in family.aliases.items():
            assert find_preset(alias) == (family, family.presets[preset]), alias
    assert find_preset("ViT-B/16")[1] == find_preset("vit_base_patch16_224")[1]
    assert find_preset("DeiT-Ti")[1] == find_preset("deit_tiny_patch16_224")[1]
    assert find_preset("R50+ViT-B/16")[1] == find_preset("vit_base_r50_s16_224")[1]


def test_no_two_models_share_a_name() -> None:
    names = [name for family in load_built_in_families() for name in (*family.presets, *family.aliases)]
    assert len(names) == len(set(names))


def test_list_models() -> None:
    everything = vitrail.list_models()
    assert len(everything) == sum(len(family.presets) for family in load_built_in_families())
    assert set(vitrail.list_models("deit*")) == {name for name in everything if name.startswith("deit")}
    assert vitrail.list_models("vit_base_patch*_224") == [
        "vit_base_patch8_224",
        "vit_base_patch14_224",
        "vit_base_patch16_18x2_224",
        "vit_base_patch16_224",
        "vit_base_patch16_gap_224",
        "vit_base_patch16_mean_224",
        "vit_base_patch16_siglip_224",
        "vit_base_patch16_siglip_gap_224",
        "vit_base_patch32_224",
        "vit_base_patch32_mean_224",
    ]
    assert vitrail.list_models("ViT-L/16*") == [f"vit_large_patch16_{pixels}" for pixels in (224, 384, 512)]
    assert vitrail.list_models("nothing*") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_base_patch61_224", r"unknown model 'vit_base_patch61_224'; did you mean 'vit_base_patch16_224'\?"),
        ("VIT-b/16", r"unknown model 'VIT-b/16'; did you mean 'ViT-B/16'\?"),
        ("vit_tinny", r"unknown model 'vit_tinny'; did you mean 'vit_tiny_patch16_224'\?"),
        ("vgg", r"unknown model 'vgg'; `vitrail models` lists"),
        ("", r"unknown model ''; `vitrail models` lists"),
        (
            "no_such_package:tiny",
            r"cannot import the family 'no_such_package': ModuleNotFoundError: .*; expected a module or a \.py",
        ),
        ("missing.py:tiny", r"cannot import the family 'missing\.py': FileNotFoundError"),
        ("json:tiny", r"'json' has no FAMILY; expected FAMILY = vitrail\.models\.base\.family\.Family"),
        (f"{EXAMPLE}:resmlp_tinny", r"unknown model 'resmlp_tinny'; did you mean 'resmlp_tiny'\?"),
        (
            f"{EXAMPLE}",
            r"own_family.py' has no preset; expected .*own_family\.py:resmlp_tiny or another of its presets",
        ),
        (None, r"the model name is None; expected a string"),
    ],
)
def test_unknown_models(name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vitrail.create(name)


def test_unknown_fields() -> None:
    with pytest.raises(VitrailError, match=r"unknown vit field 'image_sise'; did you mean 'image_size'\?"):
        vitrail.create("ViT-Ti/16", image_sise=384)
    with pytest.raises(ConfigError, match=r"unknown vit field 'drop_path_rate'; did you mean 'stochastic_depth'\?"):
        vitrail.create("ViT-Ti/16", drop_path_rate=0.1)
    for name, given, ours in (
        ("swin_tiny_patch4_window7_224", "embed_dim", "widths"),
        ("swin_tiny_patch4_window7_224", "window_size", "windows"),
        ("pvt_v2_b0", "depths", "stages"),
        ("ViT-Ti/16", "num_attention_heads", "heads"),
        ("ViT-Ti/16", "hidden_size", "width"),
    ):
        with pytest.raises(ConfigError, match=rf"unknown \w+ field '{given}'; did you mean '{ours}'\?"):
            vitrail.create(name, **{given: 1})
    with pytest.raises(ConfigError, match=r"unknown deit field 'reg_tokens'; expected one of "):
        vitrail.create("DeiT-Ti", reg_tokens=4)


def test_external_family_by_file_and_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = vitrail.create(f"{EXAMPLE}:resmlp_tiny", classes=3, depth=1)
    assert type(vitrail.create(f"{EXAMPLE}:resmlp_tiny", depth=1)) is type(by_file), "a file is run once"
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    by_module = vitrail.create("own_family:resmlp_tiny", classes=3, depth=1)
    sys.modules.pop("own_family")
    for model in (by_file, by_module):
        assert model(torch.randn(2, 3, 224, 224)).shape == (2, 3)
    assert vitrail.summarize(by_file).parameters == sum(parameter.numel() for parameter in by_file.parameters())


def test_external_file_with_postponed_annotations_or_an_error(tmp_path: Path) -> None:
    file = tmp_path / "json.py"  # the name of a standard module
    file.write_text("from __future__ import annotations\n" + EXAMPLE.read_text("utf-8"), "utf-8")
    assert vitrail.create(f"{file}:resmlp_tiny", depth=1) is not None
    assert Path(str(sys.modules["json"].__file__)).name == "__init__.py"
    broken = tmp_path / "broken.py"
    broken.write_text("FAMILY = 1 / 0\n")
    with pytest.raises(
        ConfigError, match=r"cannot import the family '.*broken\.py': ZeroDivisionError: division by zero"
    ):
        vitrail.create(f"{broken}:tiny")


@pytest.mark.parametrize("module", ["contract", "family", "checks"])
def test_a_file_that_imports_a_module_by_its_old_path_says_the_new_one(module: str, tmp_path: Path) -> None:
    file, new = tmp_path / "old.py", f"vitrail.models.base.{module}"
    text = EXAMPLE.read_text("utf-8")
    assert new in text
    file.write_text(text.replace(new, f"vitrail.models.{module}"), "utf-8")
    with pytest.raises(ConfigError, match=f"old.py imports vitrail.models.{module}, which is now {new}$") as caught:
        vitrail.create(f"{file}:resmlp_tiny")
    assert "\n" not in str(caught.value)


def test_every_new_path_of_a_moved_module_exists() -> None:
    for old, new in MOVED_MODULES.items():
        assert find_spec(new) is not None
        with pytest.raises(ModuleNotFoundError):
            import_module(old)


@pytest.mark.parametrize(
    ("declaration", "wrong", "message"),
    [
        ("config.width, config.depth)\n", "config.width, config.depth + 1)\n", r"levels of ResMLP names 'blocks\.1'"),
        ('"mean", "head"', '"mean", "fc"', "classifiers of ResMLP names 'fc'"),
        ("patch_embed.proj.weight", "stem.weight", r"first_filters of ResMLP is 'stem\.weight'"),
        ("    first_filters", "    final_norm = 'end'\n    first_filters", "final_norm of ResMLP names 'end'"),
        ("    first_filters", "    classifier_tokens = ('class',)\n    first_filters", "classifier_tokens .*'class'"),
        ("    first_filters", "    heads = ()\n    first_filters", "ResMLP declares `heads`; expected `classifiers`"),
        ("self.sizes, self.classifiers = ImageSizes(), (", "self.classifiers = (", "no attribute 'sizes'; expected"),
    ],
)
def test_wrong_declarations_of_a_family_are_refused(declaration: str, wrong: str, message: str, tmp_path: Path) -> None:
    """With blocks that do not exist, `train_blocks` would freeze all of them."""
    text = EXAMPLE.read_text()
    assert declaration in text
    (tmp_path / "wrong.py").write_text(text.replace(declaration, wrong))
    with pytest.raises(ConfigError, match=message):
        vitrail.create(f"{tmp_path / 'wrong.py'}:resmlp_tiny", image_size=32, width=8, depth=1)


def test_inconsistent_family_is_refused() -> None:
    family = load_family("vit")
    with pytest.raises(
        ConfigError, match=r"family 'own' is .*Linear.*; expected a subclass of vitrail\.models\.base\.contract\."
    ):
        Family(name="own", config=family.config, build=nn.Linear, presets={})  # pyright: ignore[reportArgumentType]
    no_channels = make_dataclass("NoChannels", ["image_size", "classes"], frozen=True)
    with pytest.raises(ConfigError, match="family 'own' has no channels"):
        Family(name="own", config=no_channels, build=family.build, presets={})
    with pytest.raises(ConfigError, match=r"preset 'a' of the family 'own' is a dict; expected a ViTConfig"):
        Family(name="own", config=family.config, build=family.build, presets={"a": {}})
    with pytest.raises(ConfigError, match=r"alias 'A' of the family 'own' names 'b'; expected one of its presets: a"):
        Family(name="own", config=family.config, build=family.build, presets={"a": ViTConfig()}, aliases={"A": "b"})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vit_b61", {}),
        ("ViT-B/16", {"hedas": 3}),
        ("ViT-B/16", {"heads": 7}),
        ("DeiT-B", {"image_size": 225}),
        ("R50+ViT-B/16", {"stages": [0]}),
    ],
)
def test_config_is_checked_before_anything_is_built(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    for family in ("vit", "deit", "hybrid"):
        load_family(family)
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *_: built.append(self))  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(ConfigError):
        vitrail.create(name, **fields)
    assert built == []


OPENED = {  # what is done in this order in one process, and the only family that it imports
    "vitrail.list_models('ViT*')": "",
    "vitrail.create('ViT-Ti/16', depth=1)": "vit",
    "vitrail.load('cct_cifar10')": "cct",
    "vitrail.describe('folder')": "",
    "vitrail.load('folder')": "axial",
    "vitrail.open_model('run')": "linformer",
    "vitrail.load('timm.pth', heads=2)": "cait",
    "vitrail.load('deit.pth', heads=2)": "parallel_vit",
    "vitrail.load('hf', heads=2)": "deit",
    "vitrail.load('authors.pth', heads=2)": "deepvit",
    "vitrail.load('akamaster.th')": "resnet",
    "vitrail.load('google.npz')": "hybrid",
}
FOREIGN_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "timm.pth": ("cait_xxs24_224", {"class_depth": 1}),
    "deit.pth": ("deit_small_patch16_18x2_LS", {}),
    "hf": ("DeiT-Ti-distilled", {}),
    "authors.pth": ("DeepViT-16B", {}),
    "google.npz": ("R50+ViT-B/16", {"stages": (1, 1, 1)}),
}
PROGRAM = """
import sys, warnings
import vitrail
from vitrail.models import FAMILIES
warnings.simplefilter("ignore")
known = set()
for program in {programs}:
    eval(program)
    places = {{name: {{f"vitrail.models.{{name}}", f"vitrail.models.text.{{name}}"}} for name in FAMILIES}}
    imported = {{name for name in FAMILIES if places[name] & set(sys.modules)}}
    print(*(imported - known), sep=",")
    known = imported
"""


@pytest.mark.filterwarnings("ignore:.*cannot store")
def test_opening_a_model_imports_only_its_family(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "folder", "axial_tiny_patch16_224")
    write_run_folder(tmp_path / "run", tmp_path, preset="linformer_tiny_patch16_224")
    cifar: dict[str, Any] = {"stem": "cifar", "shortcut": "padding", "width": 16, "stages": (1, 1, 1)}
    resnet = vitrail.create("resnet18", image_size=32, classes=10, **cifar)
    vitrail.save(resnet, tmp_path / "akamaster.th", to="akamaster")
    for file, (name, fields) in FOREIGN_FILES.items():
        model = vitrail.create(name, image_size=32, width=32, depth=1, heads=2, classes=3, **fields)
        vitrail.save(model, tmp_path / file, to=Path(file).stem)
    program = PROGRAM.format(programs=list(OPENED))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert dict(zip(OPENED, done.stdout.splitlines(), strict=True)) == OPENED


@pytest.mark.parametrize("layout", PARTS_OF_NAMES)
def test_files_of_a_layout_have_tensors_with_the_parts_of_names_by_which_it_is_tried(layout: str) -> None:
    sources = [each for _, entry in list_family_entries() for each in entry.sources if each.layout == layout]
    for markers in filter(None, (each.markers for each in sources)):
        assert any(part in marker for marker in markers for part in PARTS_OF_NAMES[layout])
