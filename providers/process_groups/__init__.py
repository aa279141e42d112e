"""Process groups: rank arithmetic, group creation, and device meshes."""

from runtime_di.providers.process_groups.embedding import caller_provided_embedding
from runtime_di.providers.process_groups.mesh import open_expert_mesh, open_mesh, open_shard_mesh
from runtime_di.providers.process_groups.parallel import ParallelSettings
from runtime_di.providers.process_groups.rank_grid import KINDS, EmbeddingRule, Kind, RankGrid
from runtime_di.providers.process_groups.service import ProcessGroups, open_process_groups
from runtime_di.providers.process_groups.settings import DistributedSettings, GroupSettings

__all__ = [
    "KINDS",
    "DistributedSettings",
    "EmbeddingRule",
    "GroupSettings",
    "Kind",
    "ParallelSettings",
    "ProcessGroups",
    "RankGrid",
    "caller_provided_embedding",
    "open_expert_mesh",
    "open_mesh",
    "open_process_groups",
    "open_shard_mesh",
]
