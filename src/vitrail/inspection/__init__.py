"""Inspection of models: summaries, attention maps, explanations and figures of weights and tokens."""
