"""What everything stands on: errors, files, text, tables, figures, progress, the machine."""
