"""Pages to open in a browser, each one file that needs nothing else."""
