"""ONNX: torch models computed by ONNX Runtime, and by NVIDIA's TensorRT; and graphs of the user's
over columns."""
