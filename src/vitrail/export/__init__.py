"""Models for machines without torch: ONNX files with all that predicting takes inside, as they are or in 8 bits."""
