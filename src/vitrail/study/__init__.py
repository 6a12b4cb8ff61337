"""Questions asked of trained models: who disagrees with whom."""
