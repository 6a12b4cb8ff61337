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

from vitrail.errors import CheckpointError, ConfigError, VitrailError, one_line
from vitrail.export.agreement import agreeing
from vitrail.export.exported import METADATA, MODEL, Exported
from vitrail.export.folder import written_whole
from vitrail.export.session import answers, quiet, run_with_timeout, session
from vitrail.files import file_checksum

OUTLYING = 100.0  # times the root mean square: an input whose largest number is above it is not quantised


def quantise(source: Path, target: Path, pixels: NDArray[np.uint8]) -> list[str]:
    """Writes `target`; the names of the products that stay in float32. `pixels` (B, rows, columns, C) show which."""
    onnx = needed()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    kept = outlying(model, pixels)
    del model.graph.value_info[:]  # shapes that the quantiser would contradict
    with quiet():
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


def outlying(model: Any, pixels: NDArray[np.uint8]) -> list[str]:
    """The products with weights whose input, for these pictures, has a number far above the rest."""
    onnx = needed()
    weights = {each.name for each in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    inputs = sorted({node.input[0] for node in products})
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in inputs)
    opened = session(probe.SerializeToString())
    largest, squares = dict.fromkeys(inputs, 0.0), dict.fromkeys(inputs, 0.0)
    for picture in pixels:  # one by one: all inputs of all layers at once are large
        for name, values in zip(inputs, run_with_timeout(opened, picture[None], names=inputs), strict=True):
            largest[name] = max(largest[name], float(np.abs(values).max()))
            squares[name] += float(np.square(values, dtype=np.float64).mean()) / len(pixels)
    return [node.name for node in products if largest[node.input[0]] > OUTLYING * squares[node.input[0]] ** 0.5]


def needed() -> Any:
    try:
        import onnx
    except ImportError:
        raise ConfigError("exporting needs onnx; expected it installed: pip install 'vitrail[export]'") from None
    return onnx


def in_8_bits(
    file: Path, folder: Path, about: Exported, pixels: NDArray[np.uint8], checksum: str | None = None
) -> None:
    """An exported file as an exported folder in 8 bits, with how far the two agree on these pictures.

    If `checksum` is given, nothing is written unless it is still the file's after quantising.
    """
    with written_whole(folder) as place:
        try:
            quantise(file, place / MODEL, pixels[:8])
            same = agreeing(answers(place / MODEL, pixels), answers(file, pixels), about.output)
        except (OSError, VitrailError):
            raise
        except Exception as error:  # for an untrusted graph, the quantiser may raise anything
            raise CheckpointError(
                f"{file} cannot be quantised to int8: {one_line(error)}; expected an export"
            ) from error
        about = replace(about, precision="int8", agreement={"pictures": len(pixels), "same": same})
        describe(place, about)
        if checksum not in (None, file_checksum(file)):
            raise CheckpointError(f"{file} was replaced while it was quantised to int8; try again")


def describe(place: Path, about: Exported) -> None:
    """Beside the file, and inside it too, so that it can travel alone."""
    onnx = needed()
    model = onnx.load(str(place / MODEL), load_external_data=False)
    onnx.helper.set_model_props(model, {METADATA: about.to_json()})
    onnx.save(model, str(place / MODEL))
    about.write(place)
