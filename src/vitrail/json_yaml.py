"""JSON and YAML from untrusted files: limits on values, nesting and aliases, and checksums.

Everything here raises ValueError with a one-line reason; callers add the name of the file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_VALUES = 2**17  # each becomes an object of about 100 bytes, of perhaps 3 bytes in the file
MAX_NESTING = 64  # lists in lists in objects …
MAX_YAML_LENGTH = 2**18  # characters: a recipe has a thousand, and the parser takes 20 seconds for a megabyte
MAX_SCALAR_LENGTH = 2**12  # characters of one YAML value: a number of a million digits takes minutes
CHECKSUM_KEY = "checksum"
STRING_PATTERN = re.compile(
    r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL
)  # also one without its end: else each quote would search to it
BRACKET_PATTERN = re.compile(r"[\[\]{}]")


def parse_json(text: str) -> Any:
    """As json.loads, for text within limits on values and nesting."""
    if sum(text.count(mark) for mark in ",[{") > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES} values")
    depth = deepest = 0
    for bracket in BRACKET_PATTERN.findall(STRING_PATTERN.sub('""', text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ValueError(f"it is nested {deepest} levels deep; expected at most {MAX_NESTING}")
    return json.loads(text)


def parse_yaml(text: str) -> Any:
    """As yaml.safe_load, without aliases, which can expand a kilobyte to a gigabyte."""
    import yaml

    if len(text) > MAX_YAML_LENGTH:
        raise ValueError(f"it has {len(text):,} characters; expected at most {MAX_YAML_LENGTH:,}")
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
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
    """The object with a checksum of all other entries as its last entry, ready to be written as JSON."""
    rest = {name: value for name, value in data.items() if name != CHECKSUM_KEY}
    return {**rest, CHECKSUM_KEY: compute_json_checksum(rest)}


def verify_and_remove_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """The object without its checksum, which is verified if there is one."""
    rest = {name: value for name, value in data.items() if name != CHECKSUM_KEY}
    if CHECKSUM_KEY in data and data[CHECKSUM_KEY] != compute_json_checksum(rest):
        raise ValueError(
            "its contents do not match its checksum: it is damaged, or was edited; "
            f'if you edited it, delete its "{CHECKSUM_KEY}"'
        )
    return rest


def compute_json_checksum(data: Mapping[str, Any]) -> str:
    """A checksum of the values: whitespace and the order of the keys do not matter."""
    plain = json.loads(json.dumps(data, default=str))  # keys become strings before they are sorted
    return "sha256:" + hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
