"""Pictures in: any file or array to RGB, and from there to what a model was trained to see. Numpy and Pillow only."""
