"""Public data sets that `--data NAME` downloads: the table of their addresses, and the download into the cache."""
