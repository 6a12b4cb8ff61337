"""What may be found instead of a file: pipes, devices, folders, sockets, links to them, circular links."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is limited to about 100 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_link_to_folder(path: Path) -> None:
    folder = path.with_name(f"{path.name} folder")
    folder.mkdir()
    path.symlink_to(folder)


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name(f"{path.name} pipe"))
    path.symlink_to(path.with_name(f"{path.name} pipe"))


SPECIAL_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a pipe": make_link_to_pipe,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "folder": lambda path: path.mkdir(),
    "link to a folder": make_link_to_folder,
    "socket": make_socket,
    "link in a circle": lambda path: path.symlink_to(path),
    "link that leads nowhere": lambda path: path.symlink_to(path.with_name("nowhere")),
}
