"""Kernels of loraserve: LoRA for rows of mixed adapters, paged attention, quantized linears.

They see tensors alone.

    ops        LoRA's entries, which model code calls for either device
    reference  plain PyTorch; defines correctness
    common     formats, layouts and plans that both devices share
    cpu        lora, attention, linear: numba where it's installed, PyTorch otherwise
    gpu        paged (adapters in a GPU's memory), lora, attention, gemm, rows, sampling: Triton

The package needs torch and numpy; it uses numba where it's installed, and Triton on a GPU alone. It
imports nothing of loraserve.
"""
