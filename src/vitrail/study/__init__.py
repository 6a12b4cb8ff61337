"""Questions asked of models and trainings: what each ingredient of a recipe gives."""
