"""Export models to ONNX files that predict without torch, exactly or in int8."""
