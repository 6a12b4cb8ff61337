"""What layers and tokens represent: CKA, filters, positions, neighbors, PCA."""
