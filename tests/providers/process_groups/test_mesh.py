"""The meshes, as the parallelisms of torch use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from runtime_di.providers.process_groups.mesh import open_expert_mesh, open_mesh, open_shard_mesh
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.rank_grid import KINDS
from runtime_di.providers.process_groups.settings import DistributedSettings
from runtime_di.settings.launch import LaunchSettings
from runtime_di.testing.ranks import run_ranks
from tests.support.open_process_groups import opened

if TYPE_CHECKING:
    from pathlib import Path


def shard_and_save(folder: str) -> tuple[list[int], bool]:
    with opened(ParallelSettings(tensor=2)) as groups:
        mesh = open_mesh(groups)
        whole = torch.arange(8.0)
        sharded = distribute_tensor(whole, mesh["tp"], [Shard(0)])
        save({"weight": sharded}, checkpoint_id=folder)
        loaded = {"weight": distribute_tensor(torch.zeros(8), mesh["dp", "tp"], [Shard(0), Shard(0)])}
        load(loaded, checkpoint_id=folder)
        return sharded.to_local().int().tolist(), torch.equal(loaded["weight"].full_tensor(), whole)


@pytest.mark.processes
def test_tensors_are_sharded_and_saved_on_the_mesh(tmp_path: Path) -> None:
    """A tensor sharded over tp is saved, and loaded sharded over dp and tp."""
    assert run_ranks(shard_and_save, 4, str(tmp_path)) == [([0, 1, 2, 3], True), ([4, 5, 6, 7], True)] * 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def expected_gradients(num_inputs: int) -> dict[str, torch.Tensor]:
    """The gradients of one process that sees all inputs."""
    reference = model()
    sum(reference(inputs(index)).square().sum() for index in range(num_inputs)).div(num_inputs).backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}


def inputs(index: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4) * (index + 1)


def gradients_with_fsdp_and_tp() -> bool:
    with opened(ParallelSettings(tensor=2, context=2)) as groups:
        mesh = open_shard_mesh(groups)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        sharded = parallelize_module(model(), mesh["tp"], plan)
        fully_shard(sharded, mesh=mesh["dp_cp"])
        sharded(inputs(groups.index("dp_cp"))).square().sum().backward()
        grads = {name: parameter.grad for name, parameter in sharded.named_parameters()}
        got = {name: grad.full_tensor() for name, grad in grads.items() if isinstance(grad, DTensor)}
        return all(torch.allclose(got[name], grad, atol=1e-5) for name, grad in expected_gradients(4).items())


@pytest.mark.processes
def test_fsdp_and_tensor_parallel_share_the_flat_mesh() -> None:
    """FSDP2 over dp_cp with tensor parallelism gives the gradients of one process that sees all inputs."""
    assert run_ranks(gradients_with_fsdp_and_tp, 8) == [True] * 8


def gradients_with_ddp() -> bool:
    with opened() as groups:
        replicated = DistributedDataParallel(model(), device_mesh=open_mesh(groups)["dp"])
        replicated(inputs(groups.index("dp"))).square().sum().backward()
        got = {name: parameter.grad for name, parameter in replicated.module.named_parameters()}
        return all(torch.allclose(got[name], grad, atol=1e-5) for name, grad in expected_gradients(2).items())


@pytest.mark.processes
def test_ddp_replicates_over_an_axis() -> None:
    """DistributedDataParallel over dp averages the gradients of its ranks."""
    assert run_ranks(gradients_with_ddp, 2) == [True, True]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_axes_are_the_groups(order: Any) -> None:
    """Each axis of every mesh is this rank's group of that kind, with the same ranks."""
    parallel = ParallelSettings(tensor=2, pipeline=2, context=2, expert=2, order=order)
    launch = LaunchSettings(rank=13, world_size=16)

    with opened(parallel, DistributedSettings(backend="fake"), launch) as groups:
        meshes = open_mesh(groups), open_shard_mesh(groups), open_expert_mesh(groups)

        for mesh in meshes:
            for axis in (kind for kind in KINDS if kind in (mesh.mesh_dim_names or ())):
                assert mesh[axis].get_group() is groups.group(axis)
                assert mesh[axis].mesh.tolist() == list(groups.ranks(axis))
                assert mesh.get_local_rank(axis) == groups.index(axis)
    assert (
        meshes[0].mesh_dim_names
        == {
            "tp-cp-ep-dp-pp": ("pp", "dp", "cp", "tp"),
            "tp-cp-ep-pp-dp": ("dp", "pp", "cp", "tp"),
        }[order]
    )
    assert meshes[1].mesh_dim_names == ("pp", "dp_cp", "tp")
    assert sorted(meshes[2].mesh_dim_names or ()) == ["edp", "ep", "etp", "pp"]


def experts_on_their_mesh() -> tuple[list[int], list[int]]:
    """Shard experts over ep; return those of this rank, and those of its whole ep group."""
    with opened(ParallelSettings(tensor=2, expert=4, expert_tensor=1)) as groups:
        mesh = open_expert_mesh(groups)
        experts = distribute_tensor(torch.arange(8), mesh["edp", "ep"], [Replicate(), Shard(0)])
        return experts.to_local().tolist(), experts.full_tensor().tolist()


@pytest.mark.processes
def test_experts_are_sharded_on_the_expert_mesh() -> None:
    """Experts sharded over ep are on the ranks of each ep group in order, and replicated over edp."""
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]] * 2

    assert run_ranks(experts_on_their_mesh, 8) == [(experts, [*range(8)]) for experts in expected]
