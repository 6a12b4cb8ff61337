"""Which process may write in OUT.partial: a lock in the folder, which is created with it and removed with it."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from vitrail.base.errors import VitrailError
from vitrail.base.locks import lock_folder

MAX_LOCK_ATTEMPTS = 100  # a folder may disappear between creating and locking it, when its previous owner finishes


class FolderOwnership:
    """The lock on a folder. The folder is created for it and removed at the end if it is empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: ExitStack | None = None

    def acquire(self) -> None:
        """Create the folder and lock it; InUseError if another process or thread owns it. Does nothing if held."""
        for attempts_left in reversed(range(MAX_LOCK_ATTEMPTS)):
            if self.held is not None:
                return
            self.folder.mkdir(exist_ok=True)
            stack = ExitStack()
            stack.callback(self.remove_if_empty)
            try:
                stack.enter_context(lock_folder(self.folder))
                self.held = stack
            except VitrailError:
                stack.close()
                if not attempts_left or os.path.lexists(self.folder):
                    raise

    def release(self) -> None:
        if self.held is not None:
            held, self.held = self.held, None
            held.close()

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()
