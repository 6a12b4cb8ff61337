"""What clients of Hugging Face and curl send: the bytes themselves, JSON with base64, or a form.

The bytes decide, not the Content-Type: curl calls a photo a form, and InferenceClient sends bytes without a type.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.base.kinds import ServedModel, ServedTensor
from vitrail.serve.multipart import is_multipart, parse_multipart
from vitrail.serve.request_errors import RequestError

MAX_ITEMS = 64  # per request
MAX_JSON_MARKS = 500_000  # brackets, commas and quotes: while JSON is parsed, nobody else is answered


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The items of a request, each the name of an input and its value."""

    items: list[tuple[str, Any]]
    parameters: Mapping[str, Any]
    several: bool = False  # whether a list is answered with a list


def read_request(body: bytes, query: Mapping[str, str], served: ServedModel) -> Asked:
    first = served.inputs[0]
    parameters = dict(query)
    if not body:
        raise RequestError(400, f"the body is empty; send {describe_item(first)}")
    if is_multipart(body):
        content, fields = parse_multipart(body)
        return Asked(items=[(first.name, content)], parameters={**parameters, **fields})
    if body.lstrip()[:1] != b"{":
        return Asked(items=[(first.name, body)], parameters=parameters)
    given = parse_json(body)
    inputs, more = given.get("inputs"), given.get("parameters") or {}
    if not isinstance(more, dict):
        raise RequestError(400, f"parameters is {type(more).__name__}; expected an object")
    several = isinstance(inputs, list)
    listed = inputs if isinstance(inputs, list) else [inputs]
    if not 0 < len(listed) <= MAX_ITEMS:
        raise RequestError(400, f"{len(listed)} inputs; expected 1 to {MAX_ITEMS}")
    items = [(first.name, decode_input(each, first)) for each in listed]
    return Asked(items=items, parameters={**parameters, **more}, several=several)


def describe_item(tensor: ServedTensor) -> str:
    return "a text in UTF-8" if tensor.text else "the bytes of a file"


def parse_json(body: bytes) -> dict[str, Any]:
    marks = sum(map(body.count, (b"[", b"{", b",", b'"')))
    if marks > MAX_JSON_MARKS:
        raise RequestError(
            413,
            f"the JSON has {marks:,} brackets, commas and quotes; at most {MAX_JSON_MARKS:,} are accepted; send files "
            "in base64, or tensors in binary",
            "large",
        )
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400, f"the body is not valid JSON: {str(error)[:100]}; send JSON or the file itself"
        ) from None
    if not isinstance(given, dict):
        raise RequestError(400, "the body is not a JSON object; expected one with inputs")
    return given


def decode_input(value: Any, tensor: ServedTensor) -> bytes:
    """The bytes of an input in JSON: base64 of a file, or a text as it is."""
    if not isinstance(value, str):
        given = "nothing" if value is None else type(value).__name__
        raise RequestError(400, f"inputs is {given}; expected {'a text' if tensor.text else 'a file in base64'}")
    if tensor.text:
        return value.encode("utf-8", "replace")
    if value[:8].lower().startswith(("http://", "https://")):
        raise RequestError(400, "inputs is a URL, which is not downloaded; send the file in base64")
    if value.startswith("data:"):
        value = value.partition(",")[2]
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            400, "inputs is not valid base64; send the file in base64, or its bytes as the body"
        ) from None
