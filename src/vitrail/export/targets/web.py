"""A page that runs the model in the browser, for any static host: no server computes anything."""

import json
from importlib import import_module
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
from PIL import __version__ as pillow_version

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.export.description import ONNX_DATA_FILE, ONNX_FILE
from vitrail.export.exported_model import ExportedModel
from vitrail.export.onnx_session import open_session, run_with_timeout
from vitrail.export.targets.deployment import Deployment
from vitrail.models.base.checks import pair

PAGE_FOLDER = Path(__file__).with_name("web_page")
SHARED_FOLDER = Path(vitrail.__file__).parent / "serve" / "page"  # of `vitrail serve`, which draws the same photo
SHARED_FILES = ("tokens.css", "dom.js", "maths.js", "colors.js", "photo.js", "favicon.svg")
RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
DOWN_FIRST = int(pillow_version.partition(".")[0]) >= 13  # Pillow resizes columns first where that is less work
DEFAULT_RUNTIME = Path("node_modules/onnxruntime-web")


def find_runtime(given: Path | None) -> Path:
    """The folder with the files of onnxruntime-web, which is not part of vitrail: they have 14 MB."""
    folder = given or DEFAULT_RUNTIME
    for each in (folder / "dist", folder):
        if all((each / name).is_file() for name in RUNTIME_FILES):
            return each
    raise ConfigError(
        f"{folder} has no {RUNTIME_FILES[0]}; run npm install onnxruntime-web here, or give its folder as `web_runtime`"
    )


def write_web(made: Deployment) -> list[str]:
    about, how = made.about, made.about.preprocessing
    if about.output != "logits":
        raise ConfigError("`for_target` web with `features`; expected classes")
    if (made.model / ONNX_DATA_FILE).exists():
        raise ConfigError("`for_target` web for a model of more than 2 GB; expected one that a browser can load")
    maps, reason = add_maps(made)
    facts = {
        "name": made.name,
        "size": pair(how.image_size),
        "channels": len(how.mean),
        "crop": how.crop,
        "fit": how.fit,
        "middle": how.middle,
        "interpolation": how.interpolation,
        "down_first": DOWN_FIRST,
        "labels": about.labels,
        "precision": about.precision,
        "megabytes": round(made.megabytes, 1),
        "maps": maps,
        "reason": reason,
        **{name: made.overlay.get(name) for name in ("grid", "prefix", "reads")},
    }
    made.write("page.json", json.dumps(facts, ensure_ascii=False, allow_nan=False))
    runtime = find_runtime(made.runtime)
    (made.folder / "ort").mkdir()
    copied = [
        *((SHARED_FOLDER, each, "") for each in SHARED_FILES),
        *((runtime, each, "ort") for each in RUNTIME_FILES),
    ]
    for source, name, folder in [*copied, *((PAGE_FOLDER, each.name, "") for each in PAGE_FOLDER.iterdir())]:
        copyfile(source / name, made.folder / folder / name)
    ExportedModel(made.model)  # reads the checksums
    return [f"overlay: {'rollout of its attention' if maps else f'none, since {reason}'}"]


def add_maps(made: Deployment) -> tuple[list[str], str]:
    """Make the attention of each layer an output of the file: their names, from the first layer; else why not."""
    seen = made.overlay
    possible = seen.get("parts", {}).get("rollout", "its layers are not known")
    if made.about.merge or made.about.multiple:
        return [], "similar patches are merged" if made.about.merge else "its images have any size"
    if possible is not True:
        return [], possible
    onnx: Any = import_module("onnx")
    file, tokens = made.model / ONNX_FILE, len(seen["prefix"]) + seen["grid"][0] * seen["grid"][1]
    model = onnx.load(str(file))
    names = [node.output[0] for node in model.graph.node if node.op_type == "Softmax"]
    outputs = {name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names}
    model.graph.output.extend(outputs.values())
    pixels = np.zeros((1, *made.input_shape), np.uint8)
    arrays = run_with_timeout(open_session(model.SerializeToString(), 1), pixels, output_names=names) if names else []
    maps = [name for name, each in zip(names, arrays, strict=True) if each.ndim == 4 and each.shape[3] == tokens]
    if len(maps) != len(seen["heads"]):
        return [], "its layers have other tokens than its patches"
    for name in set(names) - set(maps):
        model.graph.output.remove(outputs[name])
    onnx.save(model, str(file))
    made.about.write(made.model)
    return maps, ""
