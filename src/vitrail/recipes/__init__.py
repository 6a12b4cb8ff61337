"""Recipes, the settings of training runs, and requests for runs."""
