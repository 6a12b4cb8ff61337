"""Attention of a model: capture, rollout, distance, heads."""
