"""Parse JSON and YAML from untrusted files, with limits on size, nesting and aliases; checksums of JSON objects.

All functions raise ValueError with a one-line reason; callers add the name of the file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_VALUES = 2**17  # three bytes in the file can become an object of about 100 bytes
MAX_NESTING = 64  # levels of lists and objects
MAX_YAML_LENGTH = 2**18  # characters: a recipe has about a thousand, and the parser takes 20 seconds per megabyte
MAX_SCALAR_LENGTH = 2**12  # characters of one YAML value: parsing a number of a million digits takes minutes
CHECKSUM_KEY = "checksum"
# The closing quote is optional: otherwise each unclosed quote would scan to the end of the text.
STRING_PATTERN = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
BRACKET_PATTERN = re.compile(r"[\[\]{}]")


def parse_json(text: str, max_values: int = MAX_VALUES) -> Any:
    """Like json.loads, for text within the limits on values and nesting."""
    if sum(text.count(mark) for mark in ",[{") > max_values:
        raise ValueError(f"it has more than {max_values} values")
    depth = deepest = 0
    for bracket in BRACKET_PATTERN.findall(STRING_PATTERN.sub('""', text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ValueError(f"it is nested {deepest} levels deep; expected at most {MAX_NESTING}")
    return json.loads(text)


def parse_yaml(text: str) -> Any:
    """Like yaml.safe_load, without aliases, which can expand a kilobyte to a gigabyte."""
    import yaml

    if len(text) > MAX_YAML_LENGTH:
        raise ValueError(f"it has {len(text):,} characters; expected at most {MAX_YAML_LENGTH:,}")
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
                raise ValueError("it has anchors or aliases (& and *); expected plain values")
            if isinstance(event, yaml.CollectionStartEvent | yaml.CollectionEndEvent):
                depth += 1 if isinstance(event, yaml.CollectionStartEvent) else -1
            if depth > MAX_NESTING:
                raise ValueError(f"it is nested too deep; expected at most {MAX_NESTING} levels")
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR_LENGTH:
                raise ValueError(
                    f"one of its values has {len(event.value):,} characters; expected at most {MAX_SCALAR_LENGTH:,}"
                )
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def add_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Append a checksum of all other entries; the result is ready to be written as JSON."""
    rest = {name: value for name, value in data.items() if name != CHECKSUM_KEY}
    return {**rest, CHECKSUM_KEY: compute_json_checksum(rest)}


def verify_and_remove_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Verify the checksum, if there is one, and return the object without it."""
    rest = {name: value for name, value in data.items() if name != CHECKSUM_KEY}
    if CHECKSUM_KEY in data and data[CHECKSUM_KEY] != compute_json_checksum(rest):
        raise ValueError(
            "its contents do not match its checksum: it is damaged or was edited; "
            f'if you edited it, delete its "{CHECKSUM_KEY}"'
        )
    return rest


def compute_json_checksum(data: Mapping[str, Any]) -> str:
    """Checksum of the values; whitespace and the order of keys do not matter."""
    plain = json.loads(json.dumps(data, default=str))  # keys become strings before they are sorted
    return "sha256:" + hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
