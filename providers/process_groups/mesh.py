"""Device meshes of this rank's groups, for DTensor, FSDP2 and distributed checkpoints."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from runtime_di.errors import Problem, ServiceDisabledError
from runtime_di.providers.process_groups.service import ProcessGroups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from runtime_di.providers.process_groups.rank_grid import Kind


def open_mesh(process_groups: ProcessGroups) -> DeviceMesh:
    """Assemble the mesh of the dense axes, slowest first: ``pp, dp, cp, tp``, or ``dp, pp, cp, tp`` by the order.

    Raises:
        ServiceDisabledError: the caller provided process groups, but none for some axis.
    """
    return _mesh(process_groups, process_groups.grid.axes, process_groups.grid.axes)


def open_shard_mesh(process_groups: ProcessGroups) -> DeviceMesh:
    """Assemble the mesh of the axes ``pp, dp_cp, tp``: its ``dp_cp`` is what FSDP shards over.

    It is separate from `open_mesh`: torch flattens ``dp`` and ``cp`` only by creating the groups of every rank.

    Raises:
        ServiceDisabledError: the caller provided process groups, but none for some axis.
    """
    return _mesh(process_groups, process_groups.grid.axes, ("pp", "dp_cp", "tp"))


def open_expert_mesh(process_groups: ProcessGroups) -> DeviceMesh:
    """Assemble the mesh of the expert axes: ``pp, edp, ep, etp``, or ``edp, pp, ep, etp`` by the order.

    Raises:
        ServiceDisabledError: the caller provided process groups, but none for some axis.
    """
    return _mesh(process_groups, process_groups.grid.expert_axes, process_groups.grid.expert_axes)


def _mesh(groups: ProcessGroups, axes: tuple[Kind, ...], names: tuple[Kind, ...]) -> DeviceMesh:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if missing := [name for name in names if groups.is_member(name) and name not in groups.kinds]:
        what = f"the mesh needs groups of {', '.join(missing)}, and none was provided"
        raise ServiceDisabledError(
            "There is no such mesh.", [Problem("process_groups", what, fix="provide the groups of every axis")]
        )
    grid = groups.grid
    ranks = torch.arange(grid.offset, grid.offset + grid.world_size).view([grid.sizes[axis] for axis in axes])
    order = [axes.index(axis) for name in names for axis in name.split("_")]
    shape = [prod(grid.sizes[axis] for axis in name.split("_")) for name in names]
    return DeviceMesh.from_group(
        [groups.group(name) for name in names],
        groups.device_type,
        mesh=ranks.permute(order).reshape(shape),
        mesh_dim_names=names,
    )
