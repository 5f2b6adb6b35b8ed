"""Gradient compression for PyTorch: a hook for DistributedDataParallel, local steps, and FSDP2 between hosts.

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = topknot.torch.CompressionHook(ddp, "topk", density=0.001)

compresses the gradients of each step. Without DistributedDataParallel,

    sync = topknot.torch.LocalSteps(model, "sparseloco", every=10)
    sync.step()  # after each optimizer.step()

exchanges changes of weights; of a model that DistributedDataParallel or FSDP2 has on some ranks, between these islands. In place
of a method's name both take an object with compress() and decompress().

Both work over gloo and nccl. Gradients on a GPU are compressed there if the library has CUDA and kernels for the method, or the
method is an object; else on the CPU. Local steps keep their state in CPU memory.
"""

from .fsdp import FsdpCompression
from .hook import CompressionHook, Times
from .local_steps import LocalSteps
from .method import Memory, PythonMethod
from .run import Run

__all__ = ["CompressionHook", "FsdpCompression", "LocalSteps", "Memory", "PythonMethod", "Run", "Times"]
