"""Which patches a prediction depends on: maps, overlays, checks."""
