"""Command-line options shared by several commands, and what they are turned into."""
