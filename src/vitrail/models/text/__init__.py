"""Architectures that read or write text, and their parts."""
