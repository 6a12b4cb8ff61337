"""Requests that are refused: a status of HTTP, and one line that says what was given, what was expected, what to do."""

from collections.abc import Mapping
from math import ceil

from vitrail.base.errors import VitrailError, find_nearest_name

REASONS = ("full", "late", "gone", "large", "slow", "auth", "invalid")  # in the metrics


class RequestError(VitrailError):
    """A request that is not answered, with the reason that the metrics count."""

    def __init__(
        self, status: int, message: str, reason: str = "invalid", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})


def full_error(wait: float, allowed: float) -> RequestError:
    """429, not 503: load balancers take a 5xx for a broken machine."""
    seconds = max(1, ceil(wait))
    return RequestError(
        429,
        f"the expected wait is {wait:.2f} s; at most {allowed:g} s are accepted; try again in {seconds} s",
        "full",
        {"retry-after": str(seconds)},
    )


def unknown_model_error(name: str, known: list[str]) -> RequestError:
    near = find_nearest_name(name[:100], known)
    expected = f"did you mean {near}?" if near else f"expected one of {', '.join(known)}"
    return RequestError(404, f"no model has the name {name[:100]!r}; {expected}")
