"""Evaluation of classifiers: metrics, data, plots."""
