"""One process, one event loop: open the models, listen, and end without losing a request."""

import asyncio
import ctypes
import signal
import socket
import struct
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from vitrail.base.errors import ConfigError, describe_error
from vitrail.serve.app import build_app
from vitrail.serve.connection import make_connection_class
from vitrail.serve.model_table import ModelTable, host_model, parse_names
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings

SO_ATTACH_FILTER, BPF_RETURN = 26, 6  # of Linux; Python has no names for them


def bind_socket(host: str, port: int) -> socket.socket:
    """Before models are opened, so that a busy port is found at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"`port` {port} of {host} cannot be used: {describe_error(error)}; use another `port`, or 0 for any",
            ("port",),
        ) from None
    return made


def drop_new_connections(listening: socket.socket) -> None:
    """Let the kernel ignore who connects from now on: whoever connects before the port is closed would be reset.

    They try again by themselves, and then find the port closed. Only Linux has this filter.
    """
    if sys.platform != "linux":
        return
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    with suppress(OSError):
        program = struct.pack("HL", 1, ctypes.addressof(drop_all))  # one instruction
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


class DrainingServer(uvicorn.Server):
    """After SIGTERM, requests are still answered for some seconds while balancers look elsewhere."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self.service, self.on_ready = service, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGINT, self.end)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept who has connected already: closing the port would reset them."""
        loop, accepted = asyncio.get_running_loop(), list[socket.socket]()
        for listening in sockets or ():
            listening.setblocking(False)
            drop_new_connections(listening)
            with suppress(OSError):  # nobody is left
                while True:
                    accepted.append(listening.accept()[0])
        for server in self.servers:
            server.close()
        for each in accepted:
            each.setblocking(False)
            await loop.connect_accepted_socket(self.make_connection, each)
        await super().shutdown(sockets)

    def make_connection(self) -> asyncio.Protocol:
        """As uvicorn does for each connection that it accepts."""
        make: Any = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def reload(self) -> None:
        self.reloads = asyncio.ensure_future(self.service.reload_all())

    def drain(self) -> None:
        if not self.service.draining:
            self.service.draining = True
            asyncio.get_running_loop().call_later(self.service.settings.drain, self.end)

    def end(self) -> None:
        self.service.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True


def serve_models(models: Sequence[str], settings: ServeSettings, on_ready: Callable[[str, Service], object]) -> None:
    """Serve until a signal; `on_ready` is told the address."""
    names = parse_names(models)
    listening = bind_socket(settings.host, settings.port)
    table = ModelTable([host_model(name, source, settings.options) for name, source in names.items()])
    service = Service(table, settings)
    config = uvicorn.Config(
        build_app(service),
        http=make_connection_class(settings, service.metrics.count_refusal),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=settings.proxy is not None,
        timeout_keep_alive=int(settings.keep_alive),
    )
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    service.start()
    try:
        DrainingServer(config, service, lambda: on_ready(address, service)).run([listening])
    finally:
        service.stop()
