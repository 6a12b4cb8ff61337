"""Studies of models and training: comparisons, ablations, positions, cost and speed. NAME_results.py holds results."""
