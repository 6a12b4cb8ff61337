"""Checkpoint files at the byte level: tensors from safetensors, pickles and zip archives, and checksums."""
