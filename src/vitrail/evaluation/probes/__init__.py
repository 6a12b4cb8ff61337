"""Probes of frozen features: k-NN, few-shot least squares and a linear classifier, next to baselines."""
