"""A pretended world with faults in any order: every step is committed once, by one generation, and steps go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import quick
from membership_simulation import World
from paceline.elastic.membership import Limits

FAULTS: dict[str, Callable[[World, int, int], None]] = {
    "kill": lambda world, one, other: world.kill(one),
    "kill, and what it said last is lost": lambda world, one, other: world.kill(one, loses_words=True),
    "kill two": lambda world, one, other: world.kill(one, other),
    "stop": lambda world, one, other: world.stop(one),
    "wake all": lambda world, one, other: world.wake_all(),
    "cut off from the head": lambda world, one, other: world.cut_off(one),
    "cut a link": lambda world, one, other: world.cut_link(one, other, for_good=False),
    "cut a link for good": lambda world, one, other: world.cut_link(one, other, for_good=True),
    "ask to leave": lambda world, one, other: world.ask_to_leave(one),
    "ask a host to leave": lambda world, one, other: world.ask_host_to_leave(*{one, other}, room=other % 3),
    "lose a host": lambda world, one, other: world.lose_host(*{one, other}, room=other % 3),
    "the head is lost alone": lambda world, one, other: world.change_head(),
    "the head is lost with its host": lambda world, one, other: world.change_head(*{one, other}),
    "the head is lost, and there is room for few": lambda world, one, other: world.change_head(one, room=other % 3),
    "a host comes": lambda world, one, other: world.grow(1 + other % 2),
    "resize": lambda world, one, other: world.resize(1 + other % world.limits.most),
    "finish": lambda world, one, other: world.finish(),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    after: int  # so many things have happened since the last one
    name: str
    one: int
    other: int

    def happen(self, world: World) -> None:
        world.run(self.after)
        ranks = sorted(world.workers)
        if ranks and not (world.is_ended or world.given_up):
            FAULTS[self.name](world, ranks[self.one % len(ranks)], ranks[self.other % len(ranks)])


faults = st.builds(
    Fault,
    after=st.integers(0, 120),
    name=st.sampled_from(sorted(FAULTS)),
    one=st.integers(0, 9),
    other=st.integers(0, 9),
)


@settings(max_examples=quick.examples(600))
@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 5),
    least=st.integers(1, 3),
    each=st.sampled_from([1, 1, 2]),
    passes=st.integers(1, 2),
    notices_gone=st.booleans(),
    last_step=st.sampled_from([1_000_000, 1_000_000, 15, 30]),
    begins_again=st.booleans(),
    programme=st.lists(faults, max_size=8),
)
def test_whatever_happens_every_step_is_committed_once_by_one_generation_and_steps_go_on(
    seed: int,
    replicas: int,
    least: int,
    each: int,
    passes: int,
    notices_gone: bool,
    last_step: int,
    begins_again: bool,
    programme: list[Fault],
) -> None:
    limits = Limits(least=min(least, replicas), most=5, workers_each=each)
    world = World(
        limits,
        replicas=replicas,
        seed=seed,
        passes=passes,
        notices_gone=notices_gone,
        last_step=last_step,
        begins_again=begins_again,
    )  # `World` itself refuses a step that is committed twice, or left out, and a run that is given up without need
    for fault in programme:
        fault.happen(world)
    world.wake_all()
    world.mend_links()
    goal = len(world.steps) + 3
    world.go_on_until(lambda: len(world.steps) >= goal or world.is_ended)
    event("given up" if world.given_up else "ended" if world.is_ended else "goes on")
    event("began again" if world.attempt else "never began again")
    if world.is_ended and not world.given_up and world.membership.ending is not None and world.num_killed == 0:
        assert world.saved == len(world.steps) or len(world.steps) == last_step


@pytest.mark.parametrize("seed", quick.some(range(20), step=5))
def test_after_many_losses_the_run_is_back_to_all_its_replicas(seed: int) -> None:
    world = World(Limits(least=1, most=4), replicas=4, seed=seed)
    for _ in range(10):
        world.run(150)
        members = [rank for rank, worker in world.workers.items() if worker.position is not None and worker.is_alive]
        if len(members) > 1:
            world.kill(world.random.choice(members))
    goal = len(world.steps) + 5
    world.go_on_until(lambda: len(world.steps) >= goal and len(world.membership.view.members) == 4)
    assert not world.given_up
    assert world.membership.view.members == (0, 1, 2, 3)


@pytest.mark.parametrize("seed", quick.some(range(20), step=5))
def test_a_host_that_was_cut_off_and_comes_back_to_life_commits_nothing_of_its_own(seed: int) -> None:
    world = World(Limits(least=1, most=4), replicas=4, seed=seed)
    world.run(100)
    for rank in (2, 3):
        world.cut_off(rank)
        world.stop(rank)
    cut = [world.workers[2], world.workers[3]]
    world.go_on_until(lambda: world.membership.num_members == 4 and len(world.past) == 2)
    steps = len(world.steps)
    world.wake_all()
    world.go_on_until(lambda: len(world.steps) >= steps + 5)
    assert all(len(worker.committed) <= steps for worker in cut)
    assert all(worker.is_alive for worker in cut)  # nothing reached them: it is the vote that keeps them from it


@pytest.mark.parametrize("seed", quick.some(range(6), step=3))
@pytest.mark.parametrize("is_frozen", [False, True])
def test_where_all_who_have_the_state_are_cut_off_only_they_or_those_who_begin_again_commit(
    seed: int, is_frozen: bool
) -> None:
    """The last replica on the head's side has left when the link is cut; `is_frozen`: the other side stands still, and
    wakes when others have begun again. `World` refuses a step of two authors."""
    world = World(Limits(least=1, most=2), replicas=2, seed=seed, begins_again=True)
    world.run(100)
    world.ask_to_leave(0)
    world.go_on_until(lambda: world.membership.view.members == (1,) and world.membership.is_formed)
    cut = world.workers[1]
    world.cut_off(1)
    steps = len(world.steps)
    if is_frozen:
        world.stop(1)
    else:
        world.go_on_until(lambda: len(world.steps) >= steps + 3)  # it goes on by itself
    world.go_on_until(lambda: world.attempt == 1)
    world.wake_all()
    goal = len(world.steps) + 5
    world.go_on_until(lambda: len(world.steps) >= goal and not cut.is_alive)


@pytest.mark.parametrize("seed", quick.some(range(20), step=5))
def test_everybody_who_is_asked_to_leave_has_saved_the_last_step(seed: int) -> None:
    world = World(Limits(least=2, most=4), replicas=4, seed=seed)
    world.run(100)
    for rank in (3, 1, 0, 2):
        world.ask_to_leave(rank)
    world.go_on_until(lambda: world.is_ended)
    assert not world.given_up
    assert world.saved == len(world.steps) > 0
