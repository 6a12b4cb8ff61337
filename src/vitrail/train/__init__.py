"""Training: recipes, the loop, distillation, run folders, resuming and evaluation."""
