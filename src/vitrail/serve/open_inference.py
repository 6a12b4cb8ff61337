"""The Open Inference Protocol, version 2, as Triton and KServe speak it: JSON, with tensors as lists or as raw bytes.

A request has one input; its first dimension counts items, which are computed one by one.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.kinds import ServedModel, ServedTensor
from vitrail.serve.hugging_face import MAX_ITEMS, parse_json
from vitrail.serve.request_errors import RequestError

DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
HEADER_LENGTH = "inference-header-content-length"
PROTOCOL_PARAMETERS = ("binary_data_output", "timeout", "priority", "sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True, kw_only=True)
class WantedOutput:
    tensor: ServedTensor
    binary: bool
    classes: int  # of the answer; 0 is the values themselves


@dataclass(frozen=True, kw_only=True)
class InferRequest:
    id: str | None
    items: list[tuple[str, Any]]
    outputs: list[WantedOutput]
    parameters: Mapping[str, Any]
    seconds: float | None  # that the client waits


def describe_tensor(tensor: ServedTensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]}


def read_infer_request(body: bytes, header_length: str | None, served: ServedModel) -> InferRequest:
    head, raw = split_body(body, header_length)
    given = parse_json(head)
    request_id = given.get("id")
    if request_id is not None and (not isinstance(request_id, str) or len(request_id) > 200):
        raise RequestError(400, f"id is {str(request_id)[:40]!r}; expected a text of at most 200 characters")
    parameters = read_object(given, "parameters")
    inputs = given.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        count = len(inputs) if isinstance(inputs, list) else 0
        raise RequestError(400, f"{count} inputs; expected one of {join_names(served.inputs)}")
    tensor = find_tensor(inputs[0].get("name"), served.inputs, "input")
    items = read_items(inputs[0], tensor, raw)
    return InferRequest(
        id=request_id,
        items=[(tensor.name, each) for each in items],
        outputs=read_outputs(given, parameters, served.outputs),
        parameters={name: value for name, value in parameters.items() if name not in PROTOCOL_PARAMETERS},
        seconds=read_timeout(parameters.get("timeout")),
    )


def split_body(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """The JSON and the raw bytes after it."""
    if header_length is None:
        return body, b""
    if not header_length.isdecimal() or len(header_length) > 9 or int(header_length) > len(body):
        raise RequestError(
            400, f"Inference-Header-Content-Length is {header_length[:20]!r}; expected at most {len(body)}"
        )
    return body[: int(header_length)], body[int(header_length) :]


def read_object(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = given.get(name)
    if not isinstance(found, dict | None):
        raise RequestError(400, f"{name} is {type(found).__name__}; expected an object")
    return found or {}


def read_timeout(microseconds: Any) -> float | None:
    if microseconds is None:
        return None
    if isinstance(microseconds, bool) or not isinstance(microseconds, int) or microseconds < 0:
        raise RequestError(400, f"timeout is {str(microseconds)[:40]}; expected microseconds")
    return microseconds / 1e6 or None


def join_names(tensors: Sequence[ServedTensor]) -> str:
    return ", ".join(each.name for each in tensors)


def find_tensor(name: Any, tensors: Sequence[ServedTensor], what: str) -> ServedTensor:
    for each in tensors:
        if each.name == name:
            return each
    raise RequestError(400, f"unknown {what} {str(name)[:60]!r}; expected one of {join_names(tensors)}")


def read_items(given: Mapping[str, Any], tensor: ServedTensor, raw: bytes) -> list[Any]:
    """The values of an input, one per item."""
    if given.get("datatype") != tensor.datatype:
        raise RequestError(
            400, f"{tensor.name} is {str(given.get('datatype'))[:20]!r}; expected the datatype {tensor.datatype}"
        )
    shape = read_shape(given.get("shape"), tensor)
    size = read_object(given, "parameters").get("binary_data_size")
    if size is None:
        if raw:
            raise RequestError(400, f"{len(raw)} bytes after the JSON; expected binary_data_size of {tensor.name}")
        return read_list(given.get("data"), tensor, shape)
    if isinstance(size, bool) or size != len(raw):
        raise RequestError(400, f"binary_data_size is {str(size)[:20]}; {len(raw)} bytes follow the JSON")
    if tensor.datatype == "BYTES":
        return split_bytes(raw, shape[0])
    dtype = np.dtype(DTYPES[tensor.datatype])
    if len(raw) != prod(shape) * dtype.itemsize:
        raise RequestError(400, f"{tensor.name} has {len(raw)} bytes; expected {prod(shape) * dtype.itemsize}")
    return list(np.frombuffer(raw, dtype).reshape(shape))


def read_shape(given: Any, tensor: ServedTensor) -> list[int]:
    valid = isinstance(given, list) and all(type(each) is int and 0 < each < 2**24 for each in given)
    shape: list[int] = given if valid else []
    if tensor.datatype == "BYTES" and shape[1:] == [1]:
        shape = shape[:1]
    expected = [-1, *tensor.shape]
    if len(shape) != len(expected) or any(each not in (-1, size) for each, size in zip(expected, shape, strict=True)):
        raise RequestError(400, f"{tensor.name} has the shape {str(given)[:60]}; expected {expected}")
    if shape[0] > MAX_ITEMS:
        raise RequestError(400, f"{shape[0]} items; expected at most {MAX_ITEMS} per request")
    return shape


def read_list(data: Any, tensor: ServedTensor, shape: list[int]) -> list[Any]:
    """Values in JSON, nested as the shape or flat."""
    if not isinstance(data, list):
        raise RequestError(400, f"{tensor.name} has no data; expected a list, or binary_data_size and bytes")
    if tensor.datatype == "BYTES":
        texts: list[Any] = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in data]
        if len(texts) != shape[0] or not all(isinstance(each, str) for each in texts):
            raise RequestError(400, f"{tensor.name} is not a list of {shape[0]} texts; send one text per item")
        return [each.encode("utf-8", "replace") if tensor.text else decode_base64(each) for each in texts]
    dtype = np.dtype(DTYPES[tensor.datatype])
    try:
        values: NDArray[Any] = np.asarray(data)
        numeric = values.dtype.kind in ("iuf" if dtype.kind == "f" else "iu")
        fits = numeric and values.size == prod(shape)
        if fits and dtype.kind in "iu":
            limits = np.iinfo(dtype)
            fits = bool(limits.min <= values.min() and values.max() <= limits.max)
    except (ValueError, OverflowError, RecursionError):
        fits, values = False, np.empty(0)
    if not fits:
        raise RequestError(
            400, f"{tensor.name} does not hold {prod(shape)} values of {tensor.datatype}; check its data"
        )
    return list(values.astype(dtype).reshape(shape))


def decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, "the data is not valid base64; send a file in base64, or as binary data") from None


def split_bytes(raw: bytes, count: int) -> list[bytes]:
    """Elements of BYTES: the length as 4 bytes, then the bytes."""
    found, place = list[bytes](), 0
    while place + 4 <= len(raw) and len(found) < count:
        length = int.from_bytes(raw[place : place + 4], "little")
        found.append(raw[place + 4 : place + 4 + length])
        place += 4 + length
    if len(found) != count or place != len(raw):
        raise RequestError(400, f"the bytes do not hold {count} elements with their lengths; check the data")
    return found


def read_outputs(
    given: Mapping[str, Any], parameters: Mapping[str, Any], tensors: Sequence[ServedTensor]
) -> list[WantedOutput]:
    """The outputs that are asked for; all without any."""
    listed = given.get("outputs")
    by_default = bool(parameters.get("binary_data_output"))
    if listed is None or listed == []:
        return [WantedOutput(tensor=each, binary=by_default, classes=0) for each in tensors]
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed) or len(listed) > 64:
        raise RequestError(400, f"outputs is {str(listed)[:40]}; expected a list of objects")
    found = list[WantedOutput]()
    for each in listed:
        tensor, how = find_tensor(each.get("name"), tensors, "output"), read_object(each, "parameters")
        classes = how.get("classification", 0)
        most = tensor.shape[0] if len(tensor.shape) == 1 and tensor.datatype == "FP32" else 0
        if type(classes) is not int or not classes >= 0 or (classes and not most):
            raise RequestError(400, f"classification is {str(classes)[:20]} for {tensor.name}; expected 1 to {most}")
        binary = bool(how.get("binary_data", by_default))
        found.append(WantedOutput(tensor=tensor, binary=binary, classes=min(classes, most)))
    return found


def write_answer(model: str, asked: InferRequest, results: Sequence[Mapping[str, Any]]) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON if raw bytes follow."""
    outputs, chunks = list[dict[str, Any]](), list[bytes]()
    for wanted in asked.outputs:
        values = [each[wanted.tensor.name] for each in results]
        about, raw, plain = write_output(wanted, values)
        if wanted.binary:
            about["parameters"] = {"binary_data_size": len(raw)}
            chunks.append(raw)
        else:
            about["data"] = plain
        outputs.append(about)
    head: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": outputs}
    if asked.id is not None:
        head["id"] = asked.id
    encoded = json.dumps(head).encode()
    return b"".join((encoded, *chunks)), len(encoded) if chunks else None


def write_output(wanted: WantedOutput, values: Sequence[Any]) -> tuple[dict[str, Any], bytes, list[Any]]:
    """Its description, its values as bytes, and as a list."""
    tensor = wanted.tensor
    if wanted.classes:
        texts = [text for each in values for text in list_classes(np.asarray(each), tensor, wanted.classes)]
        return write_texts(tensor.name, [len(values), wanted.classes], texts)
    if tensor.datatype == "BYTES":
        texts = [text for each in values for text in ([each] if isinstance(each, bytes) else each)]
        return write_texts(tensor.name, [len(values), *tensor.shape], texts)
    array = np.stack([np.asarray(each) for each in values]).astype(DTYPES[tensor.datatype])
    about = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(array.shape)}
    if wanted.binary:
        return about, array.tobytes(), []
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(500, f"{tensor.name} is not finite, which JSON cannot hold; ask for binary_data")
    return about, b"", array.ravel().tolist()


def write_texts(name: str, shape: list[int], texts: list[bytes]) -> tuple[dict[str, Any], bytes, list[Any]]:
    raw = b"".join(len(each).to_bytes(4, "little") + each for each in texts)
    return {"name": name, "datatype": "BYTES", "shape": shape}, raw, [each.decode("utf-8", "replace") for each in texts]


def list_classes(values: NDArray[Any], tensor: ServedTensor, count: int) -> list[bytes]:
    """VALUE:INDEX:LABEL of the largest values."""
    order = np.argsort(-values, kind="stable")[:count]
    labels = tensor.labels
    return [
        f"{values[index]:f}:{index}{'' if labels is None else f':{labels[index]}'}".encode() for index in order.tolist()
    ]
