"""Several grids in one world: which ranks they have, what each rank creates, and what passes between them."""

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
from runtime_di.launch import LaunchSettings
from runtime_di.providers import c10d, process_groups
from runtime_di.providers.grid_links import Link
from runtime_di.providers.grid_settings import GridSettings, GridsSettings
from runtime_di.providers.grids import Grids
from runtime_di.providers.module_rngs import module_seeds
from runtime_di.providers.process_groups import ProcessGroups
from runtime_di.providers.rank_grid import Kind, RankGrid
from runtime_di.providers.rng import RngSettings
from runtime_di.testing.ranks import RanksError, run_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_mock import MockerFixture

CPU = {"kind": "cpu"}


class Three(GridsSettings):
    """Three modules, of which each passes something to the next."""

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
    ("settings", "told"),
    [
        (
            two(3, 4),
            "grids.language.size: vision + language = 3 + 4 = 7 is not the world size 8\n"
            "  fix: start 7 ranks, or leave this size out",
        ),
        (
            two(8),
            "grids.vision.size: vision = 8 leaves no rank of 8 to language\n  fix: give 7 or fewer in all",
        ),
        (
            Three(a=GridSettings(size=4)),
            "grids.a.size: grids b, c have no size\n  fix: give a size to all grids, to all but one, or to none",
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
def test_misfits_are_told_with_their_factors(settings: GridsSettings, told: str) -> None:
    """B18: what does not fit is told before anything starts, with the factors and what would fit."""
    problems = "\n".join(str(problem) for problem in settings.problems(8))

    assert problems == told
    with pytest.raises(SettingsError):
        settings.layout(8)


def test_settings_tell_the_sources() -> None:
    """A wrong size is refused with the flag that said it, and so is a division of the whole world."""
    with pytest.raises(SettingsError) as size:
        MimoSettings.load(["--grids.vision.size", "1"])
    with pytest.raises(SettingsError) as whole:
        MimoSettings(parallel={"tensor": 2}, launch={"world_size": 2})

    assert "grids.vision.size = 1 (from command line --grids.vision.size): vision = 1 leaves no rank" in str(size.value)
    assert "each of them is divided by its own sizes\n    fix: set grids.language.parallel" in str(whole.value)


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
def test_every_rank_makes_as_many_groups(grids: dict[str, Any], mocker: MockerFixture) -> None:
    """B54: all ranks make groups in one order, on a grid or not, and each is in every group that it makes."""
    made = [
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

    assert all(own for calls in made for _, own in calls)
    assert [[name for name, _ in calls] for calls in made] == [[name for name, _ in made[0]]] * 8
    assert made[0][-1] == ("activations", True)


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


def test_halves_of_a_world_talk_among_themselves() -> None:
    """Each grid has groups and a mesh of its own, a link joins both, and no rank has what is of the other grid."""
    vision = ("vision", 1, 6, [0, 1], False, ["vision"])
    language = ("language", 5, 6, [2, 3], False, ["language"])

    assert run_ranks(halves, 4, {"timeout_s": 30}) == [vision, vision, language, language]


def adopt_after_uneven_groups() -> tuple[Any, ...]:
    """Let the caller's world have more groups on one rank than on the others."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    own = [dist.new_group([rank]) for _ in range(rank)]
    told = halves({"timeout_s": 30})
    for group in own:
        dist.destroy_process_group(group)
    assert dist.is_initialized()
    dist.destroy_process_group()
    return told


def test_grids_in_a_callers_world() -> None:
    """B7: a world that the caller initialised is divided too, though its ranks have made unequal numbers of groups."""
    told = run_ranks(adopt_after_uneven_groups, 4)

    assert [name for name, *_ in told] == ["vision", "vision", "language", "language"]


def test_a_callers_rule_is_not_asked_about_one_stage() -> None:
    """A rule for stages after the first divides the grid that has them; the world and the other grid have none."""
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
    """An embedding rule given at opening holds on every grid, and ranks must agree on it there too."""
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


def test_pretended_groups_make_pretended_grids() -> None:
    """Over process groups that only pretend, grids do too, and place embeddings as the caller's rule says."""
    launch = LaunchSettings(world_size=4, local_world_size=4)
    settings = MimoSettings(
        launch=launch, grids={"language": {"parallel": {"pipeline": 4}}}, vocabulary={"size": 4}, device=CPU
    )
    given = {"process_groups": ProcessGroups.pretend(RankGrid(world_size=4)), "embedding": lambda stages: stages[:2]}

    with MimoRuntime.open(settings, overrides=given) as runtime:
        assert runtime.grids["language"].ranks("embedding") == (0, 1)


def open_on_given_groups() -> tuple[Any, ...]:
    """Hand a runtime groups that this process made, and use them after it has closed."""
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=30))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroups.given(
        RankGrid(world_size=2, tp=2), {"tp": c10d.world_group(), "dp": alone, "pp": alone, "cp": alone}
    )
    with TrainingRuntime.open(
        TrainingSettings(parallel={"tensor": 2}, device=CPU), overrides={"process_groups": groups}
    ) as runtime:
        runtime.start()
        told = runtime.mesh["tp"].size(), runtime.vocabulary.tensor_parallel, runtime.rng.seeds["model_parallel"]
        disabled = [*runtime.disabled]
    groups.set_timeout(7)
    timeouts = {
        groups.group(kind)._get_backend(torch.device("cpu")).options._timeout.total_seconds() for kind in groups.kinds
    }
    dist.barrier(groups.group("tp"))
    dist.destroy_process_group()
    return *told, disabled, timeouts


def test_groups_that_the_caller_made() -> None:
    """B21: process groups given at opening are used by mesh and random numbers, and left to the caller on close.

    Meshes whose groups were not given are off, and a timeout set later reaches those that were.
    """
    told = run_ranks(open_on_given_groups, 2)

    assert [mesh for mesh, *_ in told] == [2, 2]
    assert told[0][2] != told[1][2]
    assert [timeouts for *_, timeouts in told] == [{7.0}] * 2
    assert [{*disabled} for *_, disabled, _ in told] == [{"shard_mesh", "expert_mesh"}] * 2


def divide_given_groups() -> list[str]:
    """Divide a world that the caller has made groups in, more of them on one rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    own = [dist.new_group([dist.get_rank()]) for _ in range(1 + dist.get_rank())]
    groups = ProcessGroups.given(
        RankGrid(world_size=2, tp=2), {"tp": c10d.world_group(), **dict.fromkeys(("dp", "pp", "cp"), own[0])}
    )
    settings = MimoSettings(grids={"vision": {"size": 1}}, device=CPU, vocabulary={"size": 4})
    with MimoRuntime.open(settings, overrides={"process_groups": groups}) as runtime:
        here = [*runtime.start().grids.here]
    dist.destroy_process_group()
    return here


def test_a_callers_groups_can_be_divided() -> None:
    """B7: grids are made on process groups that were given, whose ranks have made different numbers of groups."""
    assert run_ranks(divide_given_groups, 2) == [["vision"], ["language"]]


def give_wrong_groups() -> str:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        with pytest.raises(ServiceError) as refused:
            ProcessGroups.given(RankGrid(world_size=2, tp=2), {"tp": c10d.world_group()})
        with pytest.raises(ServiceError, match="no dp group was given"):
            ProcessGroups.given(RankGrid(world_size=1), {"tp": c10d.world_group()}).group("dp")
    finally:
        dist.destroy_process_group()
    return str(refused.value)


def test_given_groups_must_fit_their_grid() -> None:
    """Groups whose ranks are not those of the grid are refused, and a kind that was not given is told."""
    assert "group 'tp': has ranks [0], and the grid says [0, 1]" in give_wrong_groups()


def test_an_unknown_grid_is_told() -> None:
    """A misspelt name is refused with those that exist, and a mapping's own ways work."""
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
def test_every_sample_reaches_whoever_wants_it(source: RankGrid, target: RankGrid, backward: bool) -> None:
    """Each receiving rank gets each block of its samples once, from a rank that has it, in one order on all ranks."""
    size = max(grid.offset + grid.world_size for grid in (source, target))
    links = [link(source, target, rank).back if backward else link(source, target, rank) for rank in range(size)]
    routes = {rank: list(each.routes()) for rank, each in enumerate(links)}
    told = sorted({route for own in routes.values() for route in own})

    for rank, own in routes.items():
        assert own == [route for route in own if rank in route[1:]]
        assert {*own} == {route for route in told if rank in route[1:]}
    target = links[0].target
    stage = target.sizes["pp"] - 1 if backward else 0
    wanted = [
        (block, rank)
        for rank in range(size)
        if (place := target.coordinates(rank)) and place["pp"] == stage
        for block in range(links[0].num_blocks)
        if block * target.sizes["dp"] // links[0].num_blocks == place["dp"]
    ]
    assert sorted((block, receiver) for block, _, receiver in told) == sorted(wanted)


def carry_round(grids: Mapping[str, Any]) -> list[list[float]]:
    """Send each sample's number forwards, and its double back."""
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


def test_rows_go_over_and_come_back() -> None:
    """Real ranks get the rows of their own samples, across disjoint grids and on shared ranks that split otherwise."""
    disjoint = run_ranks(carry_round, 4, {"vision": {"size": 2}, "language": {"parallel": {"tensor": 2}}})
    shared = run_ranks(carry_round, 2, {"language": {"parallel": {"tensor": 2}}})

    assert disjoint == [[[], [0, 2]], [[], [4, 6]], [[0, 1, 2, 3], []], [[0, 1, 2, 3], []]]
    assert shared == [[[0, 1, 2, 3], [0, 2]], [[0, 1, 2, 3], [4, 6]]]


def test_missing_rows_are_told() -> None:
    """A rank that has to send and gives nothing, or rows that cannot be cut, is told before anything is sent."""
    sends = link(RankGrid(world_size=1), RankGrid(world_size=2, offset=1), rank=0)

    with pytest.raises(ServiceError, match=r"rank 0 needs rows that make 2 equal blocks, and got none"):
        sends.carry(None, None)
    with pytest.raises(ServiceError, match=r"and got 3"):
        sends.carry(torch.zeros(3, 1), None)


# Random numbers


def seeds(grids: MimoGridsSettings, world_size: int) -> list[dict[str, dict[str, int]]]:
    return [module_seeds(RngSettings(), Grids.pretend(grids, world_size, rank)) for rank in range(world_size)]


def test_modules_are_seeded_by_their_own_place() -> None:
    """B50: a module's seeds follow the rank's place on its grid, and no two modules or streams share one."""
    found = seeds(two(2, tensor=2, pipeline=2), 6)

    language = [found[rank]["language"] for rank in range(2, 6)]
    assert len({own["model_parallel"] for own in language}) == 4
    assert [own["base"] for own in language] == [language[0]["base"]] * 2 + [language[2]["base"]] * 2
    by_stream = {
        (name, stream): {own[name][stream] for own in found}
        for name in ("vision", "language")
        for stream in found[0][name]
    }
    assert sum(map(len, by_stream.values())) == len({seed for held in by_stream.values() for seed in held})


def test_weights_do_not_depend_on_the_division() -> None:
    """The seed of a module's weights is the same however many ranks it has and wherever they are."""
    found = [seeds(two(), 1)[0], *seeds(two(1), 2), *seeds(two(2, tensor=2), 4)]

    assert len({(own["vision"]["base"], own["language"]["base"]) for own in found}) == 1


def test_module_streams_keep_apart_on_one_rank() -> None:
    """B12: on shared ranks one module's draws leave another's, and the global generator, where they were."""
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


@pytest.mark.parametrize("failing", ["vision", "language"])
def test_a_failure_on_one_side_ends_the_other(failing: str) -> None:
    """B22: a rank that waits for rows of a failed one is told at once, not by a timeout; nobody hangs in closing."""
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


def test_ranks_open_again_and_again() -> None:
    """B53: a divided world opens and closes one time after another, and torch keeps nothing of it."""
    assert run_ranks(open_again, 4) == [0] * 4


def test_launch_of_a_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that knows its ranks gives them instead of the environment, which is not looked at."""
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
