"""One line of JSON per request on stderr. Neither photos nor texts nor tokens are written."""

import json
import re
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

ID = re.compile(r"[A-Za-z0-9-]{1,64}")
TRACE = re.compile(r"[0-9a-f-]{1,64}")


def choose_request_id(given: str | None) -> str:
    """The client's own, if it is harmless."""
    return given if given is not None and ID.fullmatch(given) else uuid.uuid4().hex[:16]


def read_trace(given: str | None) -> str | None:
    return given if given is not None and TRACE.fullmatch(given) else None


def write_log(facts: Mapping[str, Any]) -> None:
    """A log that cannot be written must not stop the service."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts}
    try:
        sys.stderr.write(json.dumps({name: value for name, value in line.items() if value is not None}) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
