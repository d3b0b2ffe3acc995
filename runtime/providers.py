"""The devices that graphs run on with ONNX Runtime."""

from __future__ import annotations

CPU, CUDA = "cpu", "cuda"
PROVIDERS = {CPU: "CPUExecutionProvider", CUDA: "CUDAExecutionProvider"}  # ONNX Runtime's names for them
