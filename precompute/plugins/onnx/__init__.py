"""ONNX: torch models computed by ONNX Runtime, and by NVIDIA's TensorRT."""
