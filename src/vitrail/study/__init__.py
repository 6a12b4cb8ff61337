"""Questions asked of models and trainings: who disagrees with whom, what each ingredient of a recipe gives."""
