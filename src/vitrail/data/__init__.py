"""Pictures in: any file or array to RGB, and from there to what a model is trained on and was trained to see."""
