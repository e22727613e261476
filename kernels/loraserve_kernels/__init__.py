"""Kernels of loraserve: LoRA for rows of mixed adapters, paged attention, row-scaled int8 linears. Tensors only.

    layout     how one adapter lies in memory                 plan       which rows of a step belong to which adapter
    launch     the entries that model code calls              reference  plain PyTorch; defines correctness
    attention  paged attention                                gemm       int8 linears
    cpu        the CPU's fast paths (numba when installed, PyTorch otherwise)

    paged_layout  adapters in a GPU's memory               gpu_plan          a step's rows, as a GPU reads them
    gpu_lora      LoRA on a GPU, by the kernels of:        shrink, expand    Triton

Needs torch and numpy; uses numba when it's installed, and Triton on a GPU alone. Imports nothing of loraserve.
"""
