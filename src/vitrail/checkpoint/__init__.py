"""Models on disk: a folder that describes itself, written whole or not at all, and read without running any code."""
