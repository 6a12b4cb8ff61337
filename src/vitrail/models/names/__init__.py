"""What public checkpoints call the tensors of our models."""
