"""An ONNX file in 8 bits: weights of 7 bits for each channel, activations of 8 bits measured as they come.

By ONNX Runtime's own tool. Weights use 7 of the 8 bits: two products of 8 bits each overflow the 16 bits in which a CPU
without VNNI adds them. A layer whose input has one number far above the rest stays in float32: measured in one step for
all numbers of a tensor, the rest would drown in it (ViT-Ti/16's block 7 has such a channel, 200 times the others).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import CheckpointError, ConfigError, VitrailError, describe_error
from vitrail.export.agreement import count_agreeing_images
from vitrail.export.atomic_folder import write_folder_atomically
from vitrail.export.description import METADATA_KEY, ONNX_FILE, ExportDescription
from vitrail.export.onnx_session import open_session, run_onnx_file, run_with_timeout, silence_warnings
from vitrail.files import file_checksum

OUTLIER_RATIO = 100.0  # times the root mean square: an input whose largest number is above it is not quantised


def quantise_onnx_file(source: Path, target: Path, pixels: NDArray[np.uint8]) -> list[str]:
    """Writes `target`; the names of the products that stay in float32. `pixels` (B, rows, columns, C) show which."""
    onnx = import_onnx()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    kept = find_outlier_layers(model, pixels)
    del model.graph.value_info[:]  # shapes that the quantiser would contradict
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
    """The products with weights whose input, for these pictures, has a number far above the rest."""
    onnx = import_onnx()
    weights = {each.name for each in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    inputs = sorted({node.input[0] for node in products})
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in inputs)
    opened = open_session(probe.SerializeToString())
    largest, squares = dict.fromkeys(inputs, 0.0), dict.fromkeys(inputs, 0.0)
    for picture in pixels:  # one by one: all inputs of all layers at once are large
        for name, values in zip(inputs, run_with_timeout(opened, picture[None], output_names=inputs), strict=True):
            largest[name] = max(largest[name], float(np.abs(values).max()))
            squares[name] += float(np.square(values, dtype=np.float64).mean()) / len(pixels)
    return [node.name for node in products if largest[node.input[0]] > OUTLIER_RATIO * squares[node.input[0]] ** 0.5]


def import_onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise ConfigError("exporting needs onnx; expected it installed: pip install 'vitrail[export]'") from None
    return onnx


def write_int8_export(
    file: Path, folder: Path, about: ExportDescription, pixels: NDArray[np.uint8], checksum: str | None = None
) -> None:
    """An exported file as an exported folder in 8 bits, with how far the two agree on these pictures.

    If `checksum` is given, nothing is written unless it is still the file's after quantising.
    """
    with write_folder_atomically(folder) as place:
        try:
            quantise_onnx_file(file, place / ONNX_FILE, pixels[:8])
            same = count_agreeing_images(
                run_onnx_file(place / ONNX_FILE, pixels), run_onnx_file(file, pixels), about.output
            )
        except (OSError, VitrailError):
            raise
        except Exception as error:  # for an untrusted graph, the quantiser may raise anything
            raise CheckpointError(
                f"{file} cannot be quantised to int8: {describe_error(error)}; expected an export"
            ) from error
        about = replace(about, precision="int8", agreement={"pictures": len(pixels), "same": same})
        write_description(place, about)
        if checksum not in (None, file_checksum(file)):
            raise CheckpointError(f"{file} was replaced while it was quantised to int8; try again")


def write_description(place: Path, about: ExportDescription) -> None:
    """Beside the file, and inside it too, so that it can travel alone."""
    onnx = import_onnx()
    model = onnx.load(str(place / ONNX_FILE), load_external_data=False)
    onnx.helper.set_model_props(model, {METADATA_KEY: about.to_json()})
    onnx.save(model, str(place / ONNX_FILE))
    about.write(place)
