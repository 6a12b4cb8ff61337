"""The progress bar of commands, on stderr."""

from vitrail.base.progress import progress_bar

__all__ = ["progress_bar"]
