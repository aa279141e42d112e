"""Several grids in one world: their ranks, the groups that each rank creates, and the links between grids."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from runtime_di import SettingsError
from runtime_di.containers import MimoGridsSettings, MimoRuntime, MimoSettings, TrainingRuntime, TrainingSettings
from runtime_di.errors import ServiceError
from runtime_di.providers.distributed import c10d
from runtime_di.providers.grids.links import Link
from runtime_di.providers.grids.rngs import module_seeds
from runtime_di.providers.grids.service import Grids
from runtime_di.providers.grids.settings import GridSettings, GridsSettings
from runtime_di.providers.process_groups import service as process_groups
from runtime_di.providers.process_groups.rank_grid import Kind, RankGrid
from runtime_di.providers.process_groups.service import ProcessGroups
from runtime_di.providers.rng.settings import RngSettings
from runtime_di.settings.launch import LaunchSettings
from runtime_di.testing.ranks import RanksError, run_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_mock import MockerFixture

CPU = {"kind": "cpu"}


class Three(GridsSettings):
    """Three modules, linked in order."""

    links: ClassVar = {"first": ("a", "b"), "second": ("b", "c")}

    a: GridSettings = GridSettings()
    b: GridSettings = GridSettings()
    c: GridSettings = GridSettings()


def two(vision: int | None = None, language: int | None = None, **parallel: Any) -> MimoGridsSettings:
    return MimoGridsSettings(
        vision=GridSettings(size=vision), language=GridSettings.model_validate({"size": language, "parallel": parallel})
    )


def places(settings: GridsSettings, world_size: int) -> dict[str, tuple[int, int]]:
    return {name: (grid.offset, grid.world_size) for name, grid in settings.layout(world_size).items()}


# Layout


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (two(), {"vision": (0, 8), "language": (0, 8)}),
        (two(2, 6), {"vision": (0, 2), "language": (2, 6)}),
        (two(2), {"vision": (0, 2), "language": (2, 6)}),
        (two(None, 2), {"vision": (0, 6), "language": (6, 2)}),
        (Three(b=GridSettings(size=2), c=GridSettings(size=2)), {"a": (0, 4), "b": (4, 2), "c": (6, 2)}),
    ],
    ids=["shared", "sizes", "rest is last", "rest is first", "three"],
)
def test_ranks_of_each_grid(settings: GridsSettings, expected: dict[str, tuple[int, int]]) -> None:
    """Grids without sizes share the world; with sizes they follow each other, and one without takes the rest."""
    assert places(settings, 8) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            two(3, 4),
            "grids.language.size: vision + language = 3 + 4 = 7 is not the world size 8\n"
            "  fix: start 7 ranks, or leave this size out",
        ),
        (
            two(8),
            "grids.vision.size: vision = 8 leaves no rank of 8 for language\n  fix: use 7 or fewer in total",
        ),
        (
            Three(a=GridSettings(size=4)),
            "grids.a.size: grids b, c have no size\n  fix: set a size on all grids, on all but one, or on none",
        ),
        (
            two(2, 6, expert_tensor=4, expert=2),
            "grids.language.parallel.expert_tensor: expert_tensor x expert x pipeline = 4 x 2 x 1 = 8 does not divide "
            "the grid's size 6\n  fix: choose expert_tensor from 1, 3",
        ),
        (
            two(2, 6, tensor=2),
            "grids.language.size: language has 3 data-parallel ranks and vision 2: neither divides the other\n"
            "  fix: change a size",
        ),
    ],
    ids=["sum", "no rest", "two rests", "within a grid", "link"],
)
def test_problems_have_factors(settings: GridsSettings, expected: str) -> None:
    """B18: sizes that do not fit are reported before anything starts, with their factors and a fix."""
    problems = "\n".join(str(problem) for problem in settings.problems(8))

    assert problems == expected
    with pytest.raises(SettingsError):
        settings.layout(8)


def test_settings_errors_name_the_sources() -> None:
    """A wrong size is refused with the flag that set it, and so are parallel sizes of the whole world."""
    with pytest.raises(SettingsError) as size:
        MimoSettings.load(["--grids.vision.size", "1"])
    with pytest.raises(SettingsError) as whole:
        MimoSettings(parallel={"tensor": 2}, launch={"world_size": 2})

    assert "grids.vision.size = 1 (from command line --grids.vision.size): vision = 1 leaves no rank" in str(size.value)
    assert "each grid has its own parallel sizes\n    fix: set grids.language.parallel" in str(whole.value)


# Groups


def calls_of(mocker: MockerFixture, settings: MimoSettings) -> list[tuple[str, bool]]:
    new_group = mocker.spy(dist, "new_group")
    with MimoRuntime.open(settings) as runtime:
        runtime.start()
    calls = [(call.kwargs["group_desc"], settings.launch.rank in call.args[0]) for call in new_group.call_args_list]
    mocker.stop(new_group)
    return calls


@pytest.mark.parametrize(
    "grids",
    [
        {},
        {"vision": {"size": 2}, "language": {"parallel": {"tensor": 2, "pipeline": 3}}},
        {"vision": {"size": 4, "parallel": {"pipeline": 4}}, "language": {"parallel": {"expert": 4}}},
    ],
    ids=["shared", "language with stages", "vision with stages"],
)
def test_every_rank_creates_as_many_groups(grids: dict[str, Any], mocker: MockerFixture) -> None:
    """B54: all ranks create groups in one order, on a grid or not, and each is in every group that it creates."""
    created = [
        calls_of(
            mocker,
            MimoSettings(
                grids=grids,
                launch={"rank": rank, "world_size": 8},
                distributed={"backend": "fake"},
                device=CPU,
                batch={"global_size": 8},
            ),
        )
        for rank in range(8)
    ]

    assert all(own for calls in created for _, own in calls)
    assert [[name for name, _ in calls] for calls in created] == [[name for name, _ in created[0]]] * 8
    assert created[0][-1] == ("activations", True)


def halves(distributed: Mapping[str, Any]) -> tuple[Any, ...]:
    """Open a world of two vision ranks and two language ranks, and use every group of this rank."""
    settings = MimoSettings(
        grids={"vision": {"size": 2}, "language": {"parallel": {"tensor": 2}}}, device=CPU, distributed=distributed
    )
    with MimoRuntime.open(settings) as runtime:
        runtime.start()
        (name,) = runtime.grids.here
        grid = runtime.grids[name]
        kind: Kind = "tp" if name == "language" else "dp"
        total = torch.tensor([runtime.process_groups.rank])
        dist.all_reduce(total, group=grid.group(kind))
        ranks = torch.tensor([grid.rank])
        dist.all_reduce(ranks, group=runtime.grids.links["activations"].group)
        whole = DTensor.from_local(torch.tensor([grid.rank]), grid.mesh[kind], [Shard(0)]).full_tensor()
        elsewhere = runtime.grids["vision" if name == "language" else "language"]
        with pytest.raises(ServiceError, match=f"rank {grid.rank} is in no"):
            _ = elsewhere.mesh
        return name, int(total), int(ranks), whole.tolist(), elsewhere.is_here, sorted(runtime.rngs)


@pytest.mark.processes
def test_halves_of_a_world_communicate() -> None:
    """Each grid has its own groups and mesh, a link connects both, and no rank has a mesh or rng of the other grid."""
    vision = ("vision", 1, 6, [0, 1], False, ["vision"])
    language = ("language", 5, 6, [2, 3], False, ["language"])

    assert run_ranks(halves, 4, {"timeout_s": 30}) == [vision, vision, language, language]


def adopt_after_uneven_groups() -> tuple[Any, ...]:
    """Open grids in a caller's world that has more groups on one rank than on the others."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    own = [dist.new_group([rank]) for _ in range(rank)]
    result = halves({"timeout_s": 30})
    for group in own:
        dist.destroy_process_group(group)
    assert dist.is_initialized()
    dist.destroy_process_group()
    return result


@pytest.mark.processes
def test_grids_in_a_callers_world() -> None:
    """B7: a world that the caller initialised is divided too, though its ranks created different numbers of groups."""
    results = run_ranks(adopt_after_uneven_groups, 4)

    assert [name for name, *_ in results] == ["vision", "vision", "language", "language"]


def test_a_callers_rule_is_not_called_for_one_stage() -> None:
    """A rule for later stages applies to the grid that has them, not to the world and the grid with one stage."""
    settings = MimoSettings(
        launch={"world_size": 8},
        grids={"language": {"size": 4, "parallel": {"pipeline": 4}}},
        distributed={"backend": "fake"},
        device=CPU,
        batch={"global_size": 8},
    )

    with MimoRuntime.open(settings, overrides={"embedding": lambda stages: stages[1:3]}) as runtime:
        runtime.start()

        assert runtime.grids["language"].grid.groups("embedding") == [(5, 6)]
        assert runtime.grids["vision"].ranks("embedding") == runtime.process_groups.ranks("embedding") == (0,)


def test_a_callers_rule_places_embeddings_on_each_grid(mocker: MockerFixture) -> None:
    """An embedding rule provided at opening applies to every grid, and ranks must agree on each."""
    settings = MimoSettings(
        grids={"language": {"parallel": {"pipeline": 4}}},
        launch={"world_size": 4},
        distributed={"backend": "fake"},
        device=CPU,
        batch={"global_size": 4},
    )

    joined = mocker.spy(process_groups, "join_world")
    with MimoRuntime.open(settings, overrides={"embedding": lambda stages: stages[:2]}) as runtime:
        runtime.start()

        agreed = joined.call_args.kwargs["agreement"].values
        assert [agreed[f"embedding stages{grid}"] for grid in ("", " vision", " language")] == [[0], [0], [0, 1]]
        assert runtime.grids["language"].ranks("embedding") == (0, 1)
        assert runtime.grids["vision"].ranks("embedding") == (0,)


def test_pretended_groups_lead_to_pretended_grids() -> None:
    """With pretended process groups, grids are pretended too, and follow the caller's embedding rule."""
    launch = LaunchSettings(world_size=4, local_world_size=4)
    settings = MimoSettings(
        launch=launch, grids={"language": {"parallel": {"pipeline": 4}}}, vocabulary={"size": 4}, device=CPU
    )
    overrides = {
        "process_groups": ProcessGroups.pretend(RankGrid(world_size=4)),
        "embedding": lambda stages: stages[:2],
    }

    with MimoRuntime.open(settings, overrides=overrides) as runtime:
        assert runtime.grids["language"].ranks("embedding") == (0, 1)


def open_on_provided_groups() -> tuple[Any, ...]:
    """Provide a runtime with groups that this process created, and use them after it has closed."""
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=30))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroups.provided(
        RankGrid(world_size=2, tp=2), {"tp": c10d.world_group(), "dp": alone, "pp": alone, "cp": alone}
    )
    with TrainingRuntime.open(
        TrainingSettings(parallel={"tensor": 2}, device=CPU), overrides={"process_groups": groups}
    ) as runtime:
        runtime.start()
        found = runtime.mesh["tp"].size(), runtime.vocabulary.tensor_parallel, runtime.rng.seeds["model_parallel"]
        disabled = [*runtime.disabled]
    groups.set_timeout(7)
    timeouts = {
        groups.group(kind)._get_backend(torch.device("cpu")).options._timeout.total_seconds() for kind in groups.kinds
    }
    dist.barrier(groups.group("tp"))
    dist.destroy_process_group()
    return *found, disabled, timeouts


@pytest.mark.processes
def test_groups_that_the_caller_created() -> None:
    """B21: mesh and random numbers use process groups provided at opening, which stay the caller's after close.

    Meshes whose groups were not provided are disabled, and a timeout set later reaches the provided groups.
    """
    results = run_ranks(open_on_provided_groups, 2)

    assert [mesh for mesh, *_ in results] == [2, 2]
    assert results[0][2] != results[1][2]
    assert [timeouts for *_, timeouts in results] == [{7.0}] * 2
    assert [{*disabled} for *_, disabled, _ in results] == [{"shard_mesh", "expert_mesh"}] * 2


def divide_provided_groups() -> list[str]:
    """Divide a world in which the caller has created groups, more of them on one rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    own = [dist.new_group([dist.get_rank()]) for _ in range(1 + dist.get_rank())]
    groups = ProcessGroups.provided(
        RankGrid(world_size=2, tp=2), {"tp": c10d.world_group(), **dict.fromkeys(("dp", "pp", "cp"), own[0])}
    )
    settings = MimoSettings(grids={"vision": {"size": 1}}, device=CPU, vocabulary={"size": 4})
    with MimoRuntime.open(settings, overrides={"process_groups": groups}) as runtime:
        here = [*runtime.start().grids.here]
    dist.destroy_process_group()
    return here


@pytest.mark.processes
def test_a_callers_groups_can_be_divided() -> None:
    """B7: grids divide provided process groups, though ranks have created different numbers of groups."""
    assert run_ranks(divide_provided_groups, 2) == [["vision"], ["language"]]


def provide_wrong_groups() -> str:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        with pytest.raises(ServiceError) as refused:
            ProcessGroups.provided(RankGrid(world_size=2, tp=2), {"tp": c10d.world_group()})
        with pytest.raises(ServiceError, match="no dp group was provided"):
            ProcessGroups.provided(RankGrid(world_size=1), {"tp": c10d.world_group()}).group("dp")
    finally:
        dist.destroy_process_group()
    return str(refused.value)


def test_provided_groups_must_match_their_grid() -> None:
    """Groups with other ranks than the grid are refused, and the error of a kind that was not provided says so."""
    assert "group 'tp': has ranks [0], but the grid has [0, 1]" in provide_wrong_groups()


def test_an_unknown_grid_is_refused() -> None:
    """The error of a misspelt name lists those that exist, and the methods of a mapping work."""
    grids = Grids.pretend(two(1), world_size=2)

    assert (list(grids), "vision" in grids, grids.get("sound")) == (["vision", "language"], True, None)
    with pytest.raises(KeyError) as refused:
        grids["sound"]
    assert str(refused.value) == "There is no such grid:\n  sound: unknown\n    fix: choose from vision, language"


# Links


def link(source: RankGrid, target: RankGrid, rank: int) -> Link:
    return Link("activations", source, target, rank)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (RankGrid(world_size=1), RankGrid(world_size=1, offset=1)),
        (RankGrid(world_size=2), RankGrid(world_size=2, tp=2, offset=2)),
        (RankGrid(world_size=2), RankGrid(world_size=6, tp=2, pp=3, offset=2)),
        (RankGrid(world_size=4, pp=2, order="tp-cp-ep-pp-dp"), RankGrid(world_size=8, cp=2, offset=4)),
        (RankGrid(world_size=4), RankGrid(world_size=4, tp=2)),
    ],
    ids=["one to one", "to tensor ranks", "to stages", "from stages", "shared"],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "back"])
def test_every_sample_reaches_its_receivers(source: RankGrid, target: RankGrid, backward: bool) -> None:
    """Each receiving rank gets each block of its samples once, from a rank that has it, in one order on all ranks."""
    size = max(grid.offset + grid.world_size for grid in (source, target))
    links = [link(source, target, rank).back if backward else link(source, target, rank) for rank in range(size)]
    routes = {rank: list(each.routes()) for rank, each in enumerate(links)}
    all_routes = sorted({route for own in routes.values() for route in own})

    for rank, own in routes.items():
        assert own == [route for route in own if rank in route[1:]]
        assert {*own} == {route for route in all_routes if rank in route[1:]}
    target = links[0].target
    stage = target.sizes["pp"] - 1 if backward else 0
    expected = [
        (block, rank)
        for rank in range(size)
        if (coordinates := target.coordinates(rank)) and coordinates["pp"] == stage
        for block in range(links[0].num_blocks)
        if block * target.sizes["dp"] // links[0].num_blocks == coordinates["dp"]
    ]
    assert sorted((block, receiver) for block, _, receiver in all_routes) == sorted(expected)


def carry_round(grids: Mapping[str, Any]) -> list[list[float]]:
    """Send each sample's number forward, and its double back."""
    settings = MimoSettings(grids=grids, device=CPU, distributed={"timeout_s": 30}, batch={"global_size": 4})
    with MimoRuntime.open(settings) as runtime:
        runtime.start()
        way = runtime.grids.links["activations"]
        numbers = torch.arange(4.0)[:, None]
        shares = {name: numbers.chunk(grid.size("dp"))[grid.index("dp")] for name, grid in runtime.grids.here.items()}
        arrived = torch.empty_like(shares["language"]) if "language" in shares else None
        way.carry(shares.get("vision"), arrived)
        returned = torch.empty_like(shares["vision"]) if "vision" in shares else None
        way.back.carry(None if arrived is None else 2 * arrived, returned)
        return [[] if rows is None else rows.flatten().tolist() for rows in (arrived, returned)]


@pytest.mark.processes
def test_rows_are_sent_and_returned() -> None:
    """Ranks get the rows of their own samples, across disjoint grids and on shared ranks with other parallel sizes."""
    disjoint = run_ranks(carry_round, 4, {"vision": {"size": 2}, "language": {"parallel": {"tensor": 2}}})
    shared = run_ranks(carry_round, 2, {"language": {"parallel": {"tensor": 2}}})

    assert disjoint == [[[], [0, 2]], [[], [4, 6]], [[0, 1, 2, 3], []], [[0, 1, 2, 3], []]]
    assert shared == [[[0, 1, 2, 3], [0, 2]], [[0, 1, 2, 3], [4, 6]]]


def test_missing_rows_are_refused() -> None:
    """A rank that must send raises before anything is sent if rows are missing or cannot be split."""
    sends = link(RankGrid(world_size=1), RankGrid(world_size=2, offset=1), rank=0)

    with pytest.raises(ServiceError, match=r"rank 0 needs rows that split into 2 equal blocks, and got none"):
        sends.carry(None, None)
    with pytest.raises(ServiceError, match=r"and got 3"):
        sends.carry(torch.zeros(3, 1), None)


# Random numbers


def seeds(grids: MimoGridsSettings, world_size: int) -> list[dict[str, dict[str, int]]]:
    return [module_seeds(RngSettings(), Grids.pretend(grids, world_size, rank)) for rank in range(world_size)]


def test_modules_are_seeded_by_their_coordinates() -> None:
    """B50: a module's seeds follow the rank's coordinates on its grid, and no two modules or streams share one."""
    found = seeds(two(2, tensor=2, pipeline=2), 6)

    language = [found[rank]["language"] for rank in range(2, 6)]
    assert len({own["model_parallel"] for own in language}) == 4
    assert [own["base"] for own in language] == [language[0]["base"]] * 2 + [language[2]["base"]] * 2
    by_stream = {
        (name, stream): {own[name][stream] for own in found}
        for name in ("vision", "language")
        for stream in found[0][name]
    }
    assert sum(map(len, by_stream.values())) == len({seed for values in by_stream.values() for seed in values})


def test_weights_do_not_depend_on_the_division() -> None:
    """The seed of a module's weights does not depend on the number and place of its ranks."""
    found = [seeds(two(), 1)[0], *seeds(two(1), 2), *seeds(two(2, tensor=2), 4)]

    assert len({(own["vision"]["base"], own["language"]["base"]) for own in found}) == 1


def test_module_streams_are_independent_on_one_rank() -> None:
    """B12: on shared ranks, draws of one module change neither another module's stream nor the global generator."""
    with MimoRuntime.open(MimoSettings(device=CPU)) as runtime:
        runtime.start()
        before = torch.get_rng_state()
        with runtime.rngs["vision"].fork("base"):
            first = torch.rand(3)
        with runtime.rngs["language"].fork("base"):
            second = torch.rand(3)

        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(first, second)
        state = runtime.rngs["language"].state_dict()
        drawn = torch.rand(3, generator=runtime.rngs["language"].generator("base"))
        runtime.rngs["language"].load_state_dict(state)
        assert torch.equal(drawn, torch.rand(3, generator=runtime.rngs["language"].generator("base")))


# Failures


def fail_on_one_side(failing: str) -> None:
    settings = MimoSettings(
        grids={"vision": {"size": 1}}, device=CPU, distributed={"timeout_s": 60}, log={"level": "ERROR"}
    )
    with MimoRuntime.open(settings) as runtime:
        runtime.start()
        if failing in runtime.grids.here:
            raise KeyError(failing)
        rows = torch.zeros(1, 1)
        way = runtime.grids.links["activations"]
        (way if failing == "vision" else way.back).carry(None, rows)


@pytest.mark.processes
@pytest.mark.parametrize("failing", ["vision", "language"])
def test_a_failure_on_one_side_ends_the_other(failing: str) -> None:
    """B22: a rank that waits for rows of a failed one fails at once, without a timeout; no rank hangs in close."""
    with pytest.raises(RanksError) as failed:
        run_ranks(fail_on_one_side, 2, failing, timeout_s=40)

    kinds = {rank: type(error) for rank, error in failed.value.exceptions.items()}
    other = 1 if failing == "vision" else 0
    assert kinds[1 - other] is KeyError
    assert other in failed.value.failures, failed.value
    assert "was killed" not in failed.value.failures[other]


def open_again() -> int:
    for _ in range(3):
        halves({"timeout_s": 30})
    return dist.distributed_c10d._world.group_count + len(dist.distributed_c10d._world.pg_map)


@pytest.mark.processes
def test_ranks_open_again_and_again() -> None:
    """B53: a divided world opens and closes repeatedly, and torch keeps nothing of it."""
    assert run_ranks(open_again, 4) == [0] * 4


def test_launch_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch settings that the caller passes are used instead of the environment, which is not read."""
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "64")
    settings = MimoSettings(
        launch=LaunchSettings(rank=3, world_size=4),
        grids={"vision": {"size": 2}},
        distributed={"backend": "fake"},
        device=CPU,
    )

    with MimoRuntime.open(settings) as runtime:
        runtime.start()

        assert (runtime.grids["language"].index("dp"), list(runtime.grids.here)) == (1, ["language"])
