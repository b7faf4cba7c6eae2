"""When a node process counts as stuck, whatever it writes on its control page."""

import pytest

from wsgrad.server.watchdog import Watchdog

BUSY = {"acked": 10, "sent": 20, "number": 11, "running": True, "may_idle": False}


def looks(watchdog, *steps):
    """Whether each step (time, changes) finds it stuck."""
    return [watchdog.look(now, **BUSY | changes) for now, changes in steps]


def test_a_command_over_the_limit_is_stuck_and_progress_starts_the_time_anew():
    watchdog = Watchdog(2.0)
    assert looks(watchdog, (0, {}), (1.9, {}), (2.1, {})) == [False, False, True]
    assert looks(watchdog, (3, {"number": 12}), (4.9, {}), (5.1, {})) == [False, False, True]
    assert looks(watchdog, (6, {"acked": 12, "number": 13}), (7.9, {"acked": 12, "number": 13})) == [False, False]


def test_a_node_without_commands_is_never_stuck():
    assert looks(Watchdog(1.0), *((t, {"acked": 20}) for t in range(0, 100, 7))) == [False] * 15


@pytest.mark.parametrize("number", [0, 10, 21, 1 << 40, (1 << 64) - 1])
def test_numbers_that_are_not_due_are_no_progress(number):
    watchdog = Watchdog(1.0)
    assert looks(watchdog, (0, {"number": number}), (0.9, {"number": number}), (1.1, {"number": number})) == [
        False,
        False,
        True,
    ]


def test_steps_of_a_graph_are_progress_while_they_go_on():
    assert looks(Watchdog(1.0), *((t * 0.9, {"step": t + 1}) for t in range(5))) == [False] * 5
    assert looks(Watchdog(1.0), (0, {"step": 4}), (0.9, {"step": 4}), (1.1, {"step": 3})) == [False, False, True]
    # Another command begins with its first step.
    assert looks(
        Watchdog(1.0),
        (0, {"step": 4}),
        (0.9, {"number": 12, "step": 1}),
        (1.8, {"number": 12, "step": 2}),
        (2.7, {"number": 12, "step": 2}),
        (2.9, {"number": 12, "step": 2}),
    ) == [False] * 4 + [True]


def test_going_back_and_forth_is_no_progress():
    steps = [(t / 10, {"number": 12 + t % 2}) for t in range(14)]
    assert True in looks(Watchdog(1.0), *steps)


def test_saying_that_it_waits_helps_only_inside_a_transfer():
    idle = {"running": False}
    assert looks(Watchdog(1.0), (0, idle), (1.1, idle)) == [False, True]
    idle["may_idle"] = True
    assert looks(Watchdog(1.0), (0, idle), (1.1, idle), (9, idle)) == [False, False, False]
