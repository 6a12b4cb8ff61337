"""What a checkpoint file holds: its layout, architecture, tensors, suspicious weights and checksums."""
