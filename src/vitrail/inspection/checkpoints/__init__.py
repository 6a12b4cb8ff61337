"""Inspection of checkpoint files: layout, architecture, tensors, suspicious weights and checksums."""
