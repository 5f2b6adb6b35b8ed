"""Compression between hosts that shard a model by FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import Error
from .._methods import Value
from ._channel import (
    AnyCompressor, Channel, all_parts, check_has_values, check_settings, check_type, device_for, in_place, parts_of, plain_name,
    residuals_of, saved_state, sum_of_residuals, trainable, wait_for, warn_of_adam,
)  # fmt: skip


class FsdpCompression:
    """Compresses what FSDP2 exchanges between hosts. Each host shards the model over a mesh of its own ranks
    (`fully_shard`). This class averages the shards' gradients over `process_group`, the ranks of equal place on all hosts.

    model: after fully_shard(). Each module that was given to it is one vector, compressed by itself.
    method, keys: as for CompressionHook. Methods for matrices (powersgd) see one column.
    optimizer: only for a warning if the method does not suit it.

    A gradient that is not finite on one host becomes NaN on all. With a GradScaler, residuals are of scaled gradients, and
    what a skipped step has sent is lost.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: str = "topk",
        *,
        process_group: Union[dist.ProcessGroup, DeviceMesh],
        optimizer: Optional[torch.optim.Optimizer] = None,
        keys: Optional[dict[str, Value]] = None,
        **more: Value,
    ) -> None:
        try:
            from torch.distributed.fsdp import FSDPModule
            from torch.distributed.tensor import Replicate
        except ImportError as error:
            raise Error("this PyTorch has no FSDP2 (torch.distributed.fsdp.fully_shard); 2.10 has") from error
        modules = {plain_name(name): module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        if not modules:
            raise Error("no module is sharded; call torch.distributed.fsdp.fully_shard() first")
        for name, parameter in trainable(model).items():
            check_has_values(parameter, f"parameter '{name}'")
            # The replicas are the mesh's first dimension. FSDP2 cannot skip its own sum over them and still call the hook.
            if next(iter(getattr(parameter, "placements", ())), None) == Replicate():
                raise Error(
                    f"parameter '{name}' is sharded over a 2-D mesh (HSDP): FSDP2 averages over its replicas uncompressed before "
                    "the hook; give fully_shard() the mesh's second dimension alone, and process_group= that of the first"
                )
        self.module, self._mesh = model, getattr(next(iter(trainable(model).values())), "device_mesh", None)
        self.method, self.keys = method, {"dense_1d": False, **(keys or {}), **more}
        if self.keys.get("lr_inside"):
            raise Error("lr_inside needs a learning rate, which FSDP2's hook does not know")
        warn_of_adam(method, optimizer)
        self._channel = Channel(process_group)
        self._shard = "0 of 1"
        if self._mesh is not None:
            self._shard = f"{self._mesh.get_local_rank()} of {self._mesh.size()}"
            self._channel.total *= self._mesh.size()
            self._channel.leads &= self._mesh.get_local_rank() == 0
        self._compressors: dict[str, AnyCompressor] = {}
        self._pinned: dict[str, torch.Tensor] = {}
        # A compressor's state, until its first gradients tell the shard's length; or how many hosts there were, and the states of
        # the ranks whose residuals this rank takes over.
        self._loaded: dict[str, Union[torch.Tensor, tuple[int, dict[int, torch.Tensor]]]] = {}
        self._steps: dict[str, int] = {}
        self.device = device_for(method, self.keys, model.parameters(), self._channel)
        self._keys = {**self.keys, "device": self.device}
        self._channel.compressor(method, {"all": (64,)}, self._keys)  # refuses wrong keys now
        for name, module in modules.items():
            if not hasattr(module, "set_all_reduce_hook"):
                raise Error("this PyTorch's FSDP2 has no set_all_reduce_hook(); that of 2.10 has")
            module.set_all_reduce_hook(functools.partial(self._hook, name))

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent to other hosts."""
        return self._channel.bytes_sent

    @torch.no_grad()
    def _hook(self, name: str, shard: torch.Tensor) -> None:
        check_type(shard, "a shard's gradient")
        if name not in self._compressors:
            self._compressors[name] = self._made(name, shard.numel())
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        here = in_place(shard, self.device, self._pinned, name)
        wait_for(here)
        with self._channel.timed(3):
            if not self._channel.average(self._compressors[name], {0: here}, step, name):
                shard.fill_(float("nan"))
            elif here is not shard:
                shard.copy_(here)

    def _made(self, name: str, numel: int) -> AnyCompressor:
        shapes: dict[str, tuple[int, ...]] = {name: (numel,)}
        made = self._channel.compressor(self.method, shapes, self._keys)
        loaded = self._loaded.pop(name, None)
        if isinstance(loaded, torch.Tensor):
            made.load(loaded.numpy())
        elif loaded:
            before, states = loaded
            residuals = []
            for rank, state in states.items():
                old = self._channel.compressor(self.method, shapes, self._keys, (rank, before))
                old.load(state.numpy())
                residuals.append(residuals_of(old))
            for each, residual in sum_of_residuals(residuals, self._channel.ranks / before).items():
                made.set_residual(each, residual.numpy())
        return made

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, under a key that names the rank. Each rank saves its own, between backward passes."""
        states = {**self._loaded, **{name: saved_state(compressor) for name, compressor in self._compressors.items()}}
        settings = {"method": self.method, **self.keys}
        return self._channel.named_state(settings=settings, steps=dict(self._steps), states=states, shard=self._shard)

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Makes this rank's state from the states of all ranks of a run with another number of hosts, of as many ranks each. It
        has the sum of the residuals of hosts host, host + hosts, ..., scaled so that the residuals of all have the same average.
        Other state of a method (velocities, thresholds) starts anew."""
        parts = all_parts([part for state in states for part in parts_of(state) if part.get("shard") == self._shard])
        before, mine = len(parts), range(self._channel.rank, len(parts), self._channel.ranks)
        if any(not isinstance(state, torch.Tensor) for part in parts for state in part["states"].values()):
            raise Error("states that were merged make a step before they are merged again")
        merged = {name: (before, {rank: parts[rank]["states"][name] for rank in mine}) for name in parts[0]["states"]}
        return self._channel.named_state(**{**parts[0], "states": merged})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state_dict() of the same rank, number of ranks, method and keys."""
        state = self._channel.own_state(state)
        check_settings(state, {"method": self.method, **self.keys})
        self._steps = dict(state["steps"])
        # The first gradients tell the shards' lengths; the hook then makes the compressors and loads these states.
        self._loaded = dict(state["states"])
        self._compressors.clear()
