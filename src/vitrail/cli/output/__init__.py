"""What commands print and write: help text, progress bars, reports."""
