"""What several tasks without labels share."""
