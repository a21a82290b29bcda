"""The door's account, on a clock of its own; and the order in the waiting room."""

from __future__ import annotations

from itertools import pairwise

import pytest

from racerd.serve.door import CALM_SECONDS, CREDIT_SECONDS, SHARE, SHUT_SECONDS_MAX, Door
from racerd.serve.waiting_room import WaitingRoom


def serve_crowd(door: Door, seconds: float, each_takes: float) -> float:
    """Newcomers that wait one behind the other from 0 to `seconds`. Returns what they took."""
    now = taken = 0.0
    while now < seconds:
        wait = door.wait_seconds(now)
        if wait:
            now += wait
            continue
        door.entered(now)
        now += each_takes
        taken += each_takes
        door.took(each_takes, now)
    return taken


@pytest.mark.parametrize("each_takes", [0.0001, 0.003, 0.05])
def test_newcomers_have_their_share_while_others_are_served(each_takes: float) -> None:
    """F73: a tenth of the time, no more and no less, however many come and whatever each takes."""
    door = Door()
    door.work_began()
    assert serve_crowd(door, 100.0, each_takes) == pytest.approx(100.0 * SHARE, rel=0.05)


def test_nobody_waits_where_nobody_else_is_served() -> None:
    """What newcomers took then is not held against those that come when others are served."""
    door = Door()
    assert serve_crowd(door, 10.0, 0.003) == pytest.approx(10.0, rel=0.01)
    assert not door.took(1.0, 10.0)
    door.work_began()
    assert door.wait_seconds(10.0) == 0.0


def test_a_share_that_was_not_used_is_kept_for_a_while() -> None:
    """Who starts with a dozen connections does not wait; who goes on coming does."""
    door = Door()
    door.work_began()
    at_once = CREDIT_SECONDS * SHARE
    assert serve_crowd(door, at_once, 0.005) == pytest.approx(at_once)
    later = 100.0
    for _ in range(int(at_once / 0.005)):
        assert door.wait_seconds(later) == 0.0
        door.entered(later)
        later += 0.005
        door.took(0.005, later)
    for _ in range(3):
        door.took(0.005, later)
    assert door.wait_seconds(later) > 0.0


def test_a_client_is_being_served_between_two_of_its_reads() -> None:
    door = Door()
    door.work_began()
    door.work_ended(1.0)
    door.entered(1.0)
    door.took(0.2, 1.0)
    assert door.wait_seconds(1.0 + CALM_SECONDS / 2) > 0.0
    assert door.wait_seconds(1.0 + CALM_SECONDS) == 0.0


def test_the_door_is_never_shut_for_long() -> None:
    """R7: no newcomer starves, whatever those before it took and go on taking."""
    door = Door()
    door.work_began()
    entered, now = [], 0.0
    for _ in range(1000):  # Ten seconds in which those that are in take all of the time.
        now += 0.01
        door.took(0.01, now)
        if not door.wait_seconds(now):
            door.entered(now)
            entered.append(now)
    gaps = [after - before for before, after in pairwise(entered)]
    assert len(entered) > 5
    assert max(gaps) <= SHUT_SECONDS_MAX + 0.02


def test_the_door_says_why_it_is_shut() -> None:
    door = Door()
    assert door.describe(0.0) == "open: no established connection is being served"
    door.work_began()
    assert door.describe(0.0).startswith("open: newcomers have a share left while 1 ")
    door.took(0.108, 0.0)
    door.entered(0.0)
    assert door.describe(0.0).startswith("shut for 80 ms: newcomers have had their share while 1 ")


def test_who_comes_a_hundred_times_waits_behind_itself() -> None:
    room: WaitingRoom[str] = WaitingRoom(200)
    for number in range(100):
        room.add("greedy", f"greedy {number}")
    room.add("modest", "modest 0")
    room.add("other", "other 0")
    assert (len(room), room.peers) == (102, 3)
    taken = [room.take() for _ in range(5)]
    assert taken == ["greedy 0", "modest 0", "other 0", "greedy 1", "greedy 2"]
    room.add("modest", "modest 1")
    assert [room.take(), room.take()] == ["greedy 3", "modest 1"]


def test_the_waiting_room_has_an_end() -> None:
    room: WaitingRoom[int] = WaitingRoom(2)
    room.add("a", 1)
    assert not room.full
    room.add("a", 2)
    assert room.full
    with pytest.raises(ValueError, match="full"):
        room.add("b", 3)
    assert [room.take(), room.take(), room.take()] == [1, 2, None]
    assert not len(room)
