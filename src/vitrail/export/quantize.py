"""Quantize an ONNX file to int8: 7-bit weights per channel, 8-bit activations with dynamic ranges.

With ONNX Runtime's own tool. Weights use 7 of the 8 bits: the sum of two 8-bit products overflows the 16 bits of a CPU
without VNNI. A layer whose input has outliers stays in float32: with one range per tensor, all other values would round
to zero (ViT-Ti/16's block 7 has a channel 200 times the others).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import CheckpointError, VitrailError, describe_error, missing_package_error
from vitrail.export.agreement import count_agreeing_images
from vitrail.export.atomic_folder import write_folder_atomically
from vitrail.export.description import METADATA_KEY, ONNX_FILE, ExportDescription
from vitrail.export.onnx_session import open_session, run_onnx_file, run_with_timeout, silence_warnings

OUTLIER_RATIO = 100.0  # largest value over root mean square, above which an input is not quantized


def quantize_onnx_file(source: Path, target: Path, pixels: NDArray[np.uint8]) -> list[str]:
    """Write `target`; return the layers that stay in float32, which is decided with `pixels` (B, rows, columns, C)."""
    onnx = import_onnx()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    kept = find_outlier_layers(model, pixels)
    del model.graph.value_info[:]  # the quantizer would contradict these shapes
    with silence_warnings():
        quantize_dynamic(
            model,
            target,
            weight_type=QuantType.QInt8,
            reduce_range=True,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=kept,
            extra_options={"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    return kept


def find_outlier_layers(model: Any, pixels: NDArray[np.uint8]) -> list[str]:
    """The matrix products whose inputs have outliers for these images."""
    onnx = import_onnx()
    weights = {each.name for each in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    inputs = sorted({node.input[0] for node in products})
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in inputs)
    opened = open_session(probe.SerializeToString())
    largest, squares = dict.fromkeys(inputs, 0.0), dict.fromkeys(inputs, 0.0)
    for image in pixels:  # one by one, since the inputs of all layers are large
        for name, values in zip(inputs, run_with_timeout(opened, image[None], output_names=inputs), strict=True):
            largest[name] = max(largest[name], float(np.abs(values).max()))
            squares[name] += float(np.square(values, dtype=np.float64).mean()) / len(pixels)
    return [node.name for node in products if largest[node.input[0]] > OUTLIER_RATIO * squares[node.input[0]] ** 0.5]


def import_onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise missing_package_error("writing an ONNX file", "onnx", "export") from None
    return onnx


def write_int8_export(file: Path, folder: Path, about: ExportDescription, pixels: NDArray[np.uint8]) -> None:
    """Quantize an exported file into an exported folder, and record how often both agree on these images."""
    with write_folder_atomically(folder) as place:
        try:
            quantize_onnx_file(file, place / ONNX_FILE, pixels[:8])
            same = count_agreeing_images(
                run_onnx_file(place / ONNX_FILE, pixels), run_onnx_file(file, pixels), about.output
            )
        except (OSError, VitrailError):
            raise
        except Exception as error:  # for an untrusted graph, the quantizer may raise anything
            raise CheckpointError(
                f"{file} cannot be quantized to int8: {describe_error(error)}; expected an export"
            ) from error
        about = replace(about, precision="int8", agreement={"pictures": len(pixels), "same": same})
        write_description_and_onnx_metadata(place, about)


def write_description_and_onnx_metadata(place: Path, about: ExportDescription) -> None:
    """Write the description next to the ONNX file and into it, so that the file can be used alone."""
    onnx = import_onnx()
    model = onnx.load(str(place / ONNX_FILE), load_external_data=False)
    onnx.helper.set_model_props(model, {METADATA_KEY: about.to_json()})
    onnx.save(model, str(place / ONNX_FILE))
    about.write(place)
