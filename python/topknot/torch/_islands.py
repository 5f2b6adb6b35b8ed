"""Islands: ranks that step together, as hosts that average gradients inside, while changes of weights go between them."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .. import Error
from ._channel import Channel, trainable


def local(tensor: Any) -> torch.Tensor:
    """The tensor, or this rank's shard of it, in the same memory."""
    found: torch.Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return found


def is_sharded(tensor: torch.Tensor) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def reshard(model: Any) -> None:
    """Lets FSDP2's modules forget full parameters that a forward pass has left, so that the shards are the weights."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_backward"):
            module.reshard()


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def _group_inside(model: torch.nn.Module) -> tuple[str, Any]:
    """What makes an island's ranks step together, and their group."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise Error("LocalSteps takes FSDP2's modules: fully_shard(model, mesh=...) in place of FullyShardedDataParallel")
    ddps = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    found: list[tuple[str, Any]] = [("DistributedDataParallel", ddp.process_group) for ddp in ddps]
    for name, parameter in model.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        if mesh.ndim != 1:
            raise Error(
                f"parameter '{name}' is on a mesh of {mesh.ndim} dimensions (HSDP), and PyTorch averages over the first in every "
                "step; give fully_shard() the second alone, as mesh['inside'], and LocalSteps process_group=mesh"
            )
        found.append(("fully_shard()", mesh.get_group()))
        if _ranks(found[-1][1]) != _ranks(found[0][1]):
            raise Error(f"parameter '{name}' is on other ranks than those before it; an island has one mesh")
    if found and dist.get_world_size(found[0][1]) > 1:
        averaged = {id(p) for ddp in ddps for p in ddp.parameters()}
        for name, parameter in trainable(model).items():
            if id(parameter) not in averaged and not hasattr(parameter, "device_mesh"):
                raise Error(
                    f"parameter '{name}' is outside of {found[0][0]}, so that the island's ranks would not average its gradients; "
                    "put the whole model into it"
                )
    return found[0] if found else ("", None)


class Islands:
    """The groups of ranks, and which of them exchanges what. Without DistributedDataParallel and FSDP2 an island is one rank.

    Attributes: `channel`, to the ranks of equal place in the other islands; `inside`, to this island's, None if there are none;
    `place`, this rank's in the island; `count`, the island's ranks.

    Parameters that all ranks of an island have are shared out among these, whole and about equal in size.
    """

    def __init__(
        self, model: torch.nn.Module, group: Union[dist.ProcessGroup, DeviceMesh, None], channel: Optional[Channel] = None
    ) -> None:
        self._ranks: list[list[int]] = []  # of each island, by place; none where they change
        reshard(model)
        what, inside = _group_inside(model)
        if channel:
            if inside is not None:
                raise Error(f"a replica of a manager is one process: the model itself, without {what}")
            self.channel, self.inside, self.place, self.count = channel, None, 0, 1
            return
        if isinstance(group, DeviceMesh) and group.ndim == 2 and inside is not None:
            mesh, group = group, group.get_group(0)
            if _ranks(mesh.get_group(1)) != _ranks(inside):
                raise Error(
                    f"process_group is a mesh whose second dimension has here ranks {_ranks(mesh.get_group(1))}, and {what} has "
                    f"{_ranks(inside)}; give both the same mesh of (islands, ranks of an island), {what} its second dimension"
                )
        self.channel = Channel(group)
        self.inside = Channel(inside) if inside is not None and dist.get_world_size(inside) > 1 else None
        self.place, self.count = (self.inside.rank, self.inside.ranks) if self.inside else (0, 1)
        self.channel.total *= self.count
        self.channel.leads &= self.place == 0
        self._ranks = [[rank] for rank in _ranks(self.channel.group)]
        if not self.inside:
            return
        both = sorted({*_ranks(inside)} & {*_ranks(self.channel.group)} - {dist.get_rank()})
        if both:
            raise Error(
                f"LocalSteps takes the model itself, or one whose {what} has the ranks of one island: here it averages every gradient "
                f"with rank {both[0]}, which is in process_group too; give {what} the group or mesh of the island's ranks, and "
                "LocalSteps process_group=the ranks of equal place in the islands"
            )
        own = (_ranks(inside), self.place, self.count, [tuple(local(p).shape) for p in model.parameters()])
        others: list[Any] = [None] * self.channel.ranks
        dist.all_gather_object(others, own, group=self.channel.group)
        self._ranks = [other[0] for other in others]
        for rank, (_, *place, shapes) in zip(_ranks(self.channel.group), others):
            if place != [self.place, self.count]:
                raise Error(
                    f"rank {dist.get_rank()} has place {self.place} of {self.count} in its island, and rank {rank} of process_group "
                    f"{place[0]} of {place[1]}; process_group has the ranks of equal place, in islands of equal size"
                )
            if shapes != own[3]:
                raise Error(f"rank {rank} has parameters, or shards of them, of other sizes than rank {dist.get_rank()}")

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank of the island. Collective inside."""
        return self.inside.any(flag) if self.inside else flag

    def without_flag(self, flag: bool) -> list[int]:
        """The ranks of all islands that have the flag not set. Collective."""
        own = torch.tensor([float(flag)])
        own = torch.cat(self.inside.all_gather(own)) if self.inside else own
        flags = zip(self._ranks or [[rank] for rank in range(self.channel.ranks)], self.channel.all_gather(own))
        return sorted(rank for ranks, island in flags for rank, each in zip(ranks, island.tolist()) if not each)

    def take_first(self, tensor: torch.Tensor) -> None:
        """Takes the value of the first island's first rank, or of its rank of equal place for a shard. Collective."""
        shard = is_sharded(tensor)
        if shard or self.place == 0:
            self.channel.broadcast(local(tensor), 0)
        if self.inside and not shard:
            self.inside.broadcast(local(tensor), 0)

    def average(self, tensor: torch.Tensor) -> None:
        """Replaces it by the mean over all ranks. Collective."""
        if self.inside:
            self.inside.mean(tensor)
        if self.place == 0:
            self.channel.mean(tensor)
        if self.inside:
            self.inside.broadcast(tensor, 0)

    def share(self, tensor: torch.Tensor, owner: int) -> None:
        """Gives the owner's value to the island's other ranks. Collective inside."""
        if self.inside and not is_sharded(tensor):
            self.inside.broadcast(local(tensor), owner)

    def owners(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, int]:
        """The place that exchanges each: of shards each rank its own, if it has a part of it."""
        sizes = [0] * self.count
        found = {}
        for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].numel()):
            if is_sharded(parameter):
                found[name] = self.place if local(parameter).numel() else -1
                continue
            found[name] = sizes.index(min(sizes))
            sizes[found[name]] += parameter.numel()
        return found


def in_fragments(parameters: dict[str, torch.nn.Parameter], count: int) -> list[dict[str, torch.nn.Parameter]]:
    """Fragment f has layers f, f + count, ... A layer is a block, named up to its number ("model.layers.3"); what comes before the
    first block, as an embedding, belongs to it, and what comes after a block to that. Without blocks each module is a layer."""
    layers: dict[str, int] = {}
    numbered = any(part.isdigit() for name in parameters for part in name.split("."))
    fragments: list[dict[str, torch.nn.Parameter]] = [{} for _ in range(count)]
    for name, parameter in parameters.items():
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is not None or not numbered:
            key = ".".join(parts[: place + 1] if place is not None else parts[:-1] or parts)
            layer = layers.setdefault(key, len(layers))
        else:
            layer = max(0, len(layers) - 1)
        fragments[layer % count][name] = parameter
    if len(layers) < count:
        raise Error(f"fragments={count}, and the model has {len(layers)} layers that could take turns")
    return fragments
