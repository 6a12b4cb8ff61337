"""The settings of the service, and which of them may be combined."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from vitrail.base.errors import ConfigError

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")  # of this machine, in the header Host
MIN_TOKEN_LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Durations are seconds, sizes are bytes."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 is any free port
    token: str | None = None  # that every request has to carry
    admin_token: str | None = None  # for reloading models
    allow_anonymous: bool = False  # other machines, without a token
    proxy: str | None = None  # the name by which a reverse proxy on this machine is reached
    max_wait: float = 0.5  # expected in the queue, else the request is rejected
    max_explore_wait: float = 10.0  # the same for explanations
    timeout: float = 5.0  # until a prediction is answered
    explore_timeout: float = 60.0
    header_timeout: float = 5.0  # until the headers of a request are complete
    body_timeout: float = 10.0  # until its body is complete, and until an answer has been read
    keep_alive: float = 75.0  # longer than that of the proxy in front
    drain: float = 5.0  # requests are still accepted for so long after SIGTERM
    max_body: int = 16 * 2**20
    max_buffered: int = 128 * 2**20  # of all requests that wait
    max_connections: int = 1000
    log: bool = True  # a line per request on stderr
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the command `serve` of the kinds

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"`port` {self.port}; expected 1 to {2**16 - 1}, or 0 for any free port")
        for name in ("max_wait", "timeout", "header_timeout", "body_timeout", "max_body", "max_buffered", "drain"):
            value = vars(self)[name]
            if not value > 0 and not (name == "drain" and value == 0):
                raise ConfigError(f"`{name}` {value}; expected more than 0")
        for name in ("token", "admin_token"):
            value = vars(self)[name]
            if value is not None and (len(value) < MIN_TOKEN_LENGTH or not value.isascii() or not value.isprintable()):
                raise ConfigError(
                    f"the {name.replace('_', ' ')} has {len(value)} characters; expected at least {MIN_TOKEN_LENGTH}, "
                    "letters and digits, as from: openssl rand -hex 16"
                )
        if not self.is_local and self.token is None and not self.allow_anonymous:
            raise ConfigError(
                f"`host` {self.host} can be reached from other machines; give a `token_file`, or `allow_anonymous` for "
                "everyone in the network"
            )

    @property
    def known_hosts(self) -> tuple[str, ...] | None:
        """What the header Host may say; None is anything."""
        if not self.is_local:
            return None
        return LOCAL_NAMES if self.proxy is None else (*LOCAL_NAMES, self.proxy.lower())

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
