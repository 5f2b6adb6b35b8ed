"""Gradient compression in a PyTorch training: a communication hook for DistributedDataParallel, and local steps.

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = topknot.torch.CompressionHook(ddp, "topk", density=0.001)

and train on as before; or, without DistributedDataParallel,

    sync = topknot.torch.LocalSteps(model, "sparseloco", every=10)
    ...
    optimizer.step()
    sync.step()

Both work over gloo and nccl. Gradients of a GPU are compressed there where the library was built with CUDA and the method
has kernels, else by the CPU, copied there and back. Local steps keep their state in the CPU's memory.
"""

from .hook import CompressionHook, FsdpCompression, LocalSteps, Times

__all__ = ["CompressionHook", "FsdpCompression", "LocalSteps", "Times"]
