"""The order of compiles: fair among sessions and queues, what is waited for first."""

from dataclasses import dataclass

from wsgrad.server.turns import Turns


@dataclass(eq=False)
class Turn:
    session: str
    queue: int
    name: str
    over: bool = False


def waiting(turns, *names):
    """Add turns called `session queue anything`, such as `a1x`."""
    made = {name: Turn(name[0], int(name[1]), name) for name in names}
    for turn in made.values():
        turns.add(turn)
    return made


def order(turns):
    taken = []
    while (turn := turns.take()) is not None:
        taken.append(turn.name)
        turns.done(turn)
    return taken


def test_sessions_and_their_queues_take_turns():
    turns = Turns(1)
    waiting(turns, "a1a", "a1b", "a1c", "a2a", "a2b", "b1a", "b1b")
    assert order(turns) == ["a1a", "b1a", "a2a", "b1b", "a1b", "a2b", "a1c"]


def test_a_session_has_no_more_than_its_share_under_way():
    turns = Turns(2)
    waiting(turns, "a1a", "a1b", "a1c", "b1a")
    taken = [turns.take() for _ in range(4)]
    assert [turn and turn.name for turn in taken] == ["a1a", "b1a", "a1b", None]
    turns.done(taken[0])
    assert turns.take().name == "a1c"


def test_what_is_waited_for_comes_first():
    turns = Turns(1)
    made = waiting(turns, "a1a", "a1b", "a2a", "a2b")
    turns.hurry(made["a2b"])
    assert order(turns) == ["a2b", "a1a", "a2a", "a1b"]
    turns.hurry(made["a2b"])
    assert order(turns) == []


def test_what_left_or_is_over_gets_no_turn():
    turns = Turns(1)
    made = waiting(turns, "a1a", "a1b", "b1a", "c1a")
    turns.discard(made["a1a"])
    turns.discard(made["b1a"])
    turns.discard(made["b1a"])
    made["c1a"].over = True
    assert order(turns) == ["a1b"]
    assert not turns._waiting
    assert not turns._under_way
