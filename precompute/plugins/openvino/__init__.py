"""OpenVINO: torch models as OpenVINO graphs on a CPU, in float32, bfloat16 or 8-bit integers."""
