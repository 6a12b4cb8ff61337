"""Exported folders with small graphs of our own making: good ones in no time, and such as no exporter would write."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.description import ONNX_FILE, ExportDescription, OutputKind

SIZE, CLASSES = (8, 8), 5
PREPROCESSING = Preprocessing(image_size=SIZE)
ENDLESS_ITERATIONS = 2**62
ADDED_TABLE = (
    np.random.default_rng(7).normal(size=(*SIZE, 3)).astype(np.float32)
)  # added to every image; used as it lies


def random_matrix(seed: int = 0, width: int = CLASSES) -> Any:
    return np.random.default_rng(seed).normal(size=(3, width)).astype(np.float32)


def write_graph_folder(folder: Path, kind: str = "good", *, seed: int = 0, outside: bool = False) -> Path:
    """An export whose graph is good, or loops, fails, returns too many or too few rows, or NaN."""
    output: OutputKind = "class" if kind == "features" else "logits"
    ends = {
        "good": [helper.make_node("Identity", ["y"], [output])],
        "features": [helper.make_node("Identity", ["y"], [output])],
        "NaN": [helper.make_node("Log", ["minus"], ["nan"]), helper.make_node("Add", ["y", "nan"], [output])],
        "no rows": [helper.make_node("Slice", ["y", "zero", "zero", "zero"], [output])],
        "two rows": [helper.make_node("Concat", ["y", "y"], [output], axis=0)],
        "too wide": [helper.make_node("Concat", ["y", "y"], [output], axis=1)],
        "fails": [helper.make_node("Reshape", ["y", "seven"], [output])],
        "loops": [helper.make_node("Loop", ["endless", "yes", "y"], [output], body=make_loop_body())],
    }
    nodes = [
        helper.make_node("Cast", ["pixels"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["numbers", "table"], ["x"]),
        helper.make_node("ReduceMean", ["x", "sides"], ["m"], keepdims=0),
        helper.make_node("MatMul", ["m", "w"], ["y"]),
        *ends[kind],
    ]
    constants = {
        "sides": np.array([1, 2]),
        "table": ADDED_TABLE,
        "w": random_matrix(seed),
        "zero": np.array([0]),
        "seven": np.array([7, CLASSES]),
        "endless": np.array(ENDLESS_ITERATIONS),
        "yes": np.array(True),
        "minus": np.array([-1.0], np.float32),
    }
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["batch", *SIZE, 3])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in constants.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    about = ExportDescription(
        precision="fp32", output=output, classes=CLASSES, preprocessing=PREPROCESSING, digest=kind
    )
    helper.set_model_props(model, {"vitrail": about.to_json()})
    folder.mkdir(parents=True)
    if outside:
        onnx.save(
            model, str(folder / ONNX_FILE), save_as_external_data=True, location=f"{ONNX_FILE}.data", size_threshold=50
        )
    else:
        onnx.save(model, str(folder / ONNX_FILE))
    about.write(folder)
    return folder


def make_loop_body() -> Any:
    value = helper.make_tensor_value_info
    return helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Identity", ["v"], ["v_next"])],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("v", TensorProto.FLOAT, None)],
        [value("go_on", TensorProto.BOOL, []), value("v_next", TensorProto.FLOAT, None)],
    )
