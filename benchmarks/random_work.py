"""Random programs for devices, each step checked against NumPy bit for bit; for either face, which a runner waits for.

A step that ran twice, not at all or out of order would show: launches append their number to a log on their device, and
what they compute depends on what was there. Where the devices are and what happens to the connection is not known here.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import trio

import wsgrad

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Steps: TypeAlias = Generator[Any, Any, None]

SOURCE: Final = """
void mix(int *restrict y, const int *restrict x, int n, int k)
{
    for (int i = 0; i < n; i++)
        y[i] = (int)(3u * (unsigned)y[i] + (unsigned)k * (unsigned)x[i] + 1u);
}
void stamp(int *y, int k, int i) { y[i] = (int)(5u * (unsigned)y[i] + (unsigned)(k + i)); }
void note(int *log, int *count, int number) { log[count[0]++ % 8192] = number; }
"""
_LOG: Final = 8192
_SIZES: Final = (1, 7, 64, 1_000, 8_192, 8_193, 40_000, 262_144, 300_001, 1_000_000)
_EXPIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Timed:
    """A call that waits, which the runner gives up after so many seconds; it answers `expired` then."""

    call: Callable[..., Any]
    seconds: float


def run_blocking(steps: Steps) -> None:
    """Run a program whose devices are of the blocking face."""
    answer: object = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration:
            return
        if isinstance(asked, Timed):
            try:
                answer = asked.call(timeout=asked.seconds)
            except TimeoutError:
                answer = _EXPIRED
        else:
            answer = asked


async def run_trio(steps: Steps) -> None:
    """Run a program whose devices are of the trio face."""
    answer: object = None
    error: Exception | None = None
    while True:
        try:
            asked = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration:
            return
        answer = error = None
        try:
            if isinstance(asked, Timed):
                answer = _EXPIRED
                with trio.move_on_after(asked.seconds):
                    answer = await asked.call()
            else:
                answer = await asked if inspect.isawaitable(asked) else asked
        except Exception as exc:
            error = exc  # for the program, which may expect it


@dataclass
class Tally:
    """What was done, and what was wrong with it."""

    commands: int = 0
    checks: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0
    twice: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.wrong or self.lost or self.twice)

    def add(self, other: Tally) -> None:
        """Take in another one."""
        for name in ("commands", "checks", "wrong", "lost", "twice"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.steps.update(other.steps)
        self.said += other.said

    def check(self, what: str, got: Array, expected: Array) -> None:
        """Compare results."""
        self.checks += 1
        if got.tobytes() != expected.tobytes():
            self.wrong += 1
            where = np.flatnonzero(got.ravel() != expected.ravel())
            self.said.append(
                f"{what}: {len(where)} of {got.size} differ, first at {where[0]}: "
                f"{got.ravel()[where[0]]} for {expected.ravel()[where[0]]}"
            )

    def check_log(self, what: str, got: Array, count: int, expected: list[int]) -> None:
        """Compare the numbers of the launches that have run with those that were issued."""
        self.checks += 1
        ran = got[: min(count, _LOG)].tolist()
        if ran == expected and count == len(expected):
            return
        issued, run = Counter(expected), Counter(ran)
        self.lost += (issued - run).total()
        self.twice += (run - issued).total()
        self.wrong += issued == run
        self.said.append(f"{what}: {count} launches ran, {len(expected)} were issued; first {ran[:5]}, {expected[:5]}")


class _Place:
    """A buffer and what it should hold."""

    def __init__(self, device: _Home, buffer: Any, array: Array) -> None:  # noqa: ANN401
        self.home = device
        self.buffer = buffer
        self.array = array


class _Home:
    """A device with its programs, its log and its buffers."""

    def __init__(self, device: Any) -> None:  # noqa: ANN401
        self.device = device
        self.places: list[_Place] = []
        self.noted: list[int] = []
        self.log: Any = None
        self.count: Any = None
        self.mix: Any = None
        self.stamp: Any = None
        self.note: Any = None

    def make_programs(self, salt: int = 0) -> None:
        source = SOURCE if not salt else f"{SOURCE}/* {salt} */"
        self.mix = self.device.program(source, "mix", writes=(0,))
        self.stamp = self.device.program(source, "stamp", writes=(0,))
        self.note = self.device.program(source, "note")

    def make_log(self) -> None:
        self.log = self.device.zeros(_LOG, np.int32)
        self.count = self.device.zeros(1, np.int32)
        self.noted = []


class Work:
    """A program over some devices, made up as it goes from a seed."""

    def __init__(
        self, devices: Sequence[Any], seed: int | str, *, alone: bool = True, most_nbytes: int = 4 << 20
    ) -> None:
        """Makes a program.

        Args:
            devices: what it runs on, of one face.
            seed: what it follows from.
            alone: whether nobody else uses these devices' sessions: then it also closes devices and makes errors, which
                whoever waits next would be told of.
            most_nbytes: the largest buffer.
        """
        self.tally = Tally()
        self._rng = random.Random(f"work/{seed}")
        self._numbers = np.random.default_rng(self._rng.randrange(1 << 30))
        self._homes = [_Home(device) for device in devices]
        self._sizes = [size for size in _SIZES if 4 * size <= most_nbytes]
        self._number = 0
        self._alone = int(alone)

    def steps(self, *, count: int | None = None, until: Callable[[], bool] = lambda: False) -> Steps:
        """The program: so many steps, or until something holds, and everything is compared at its end."""
        for home in self._homes:
            home.make_programs()
            home.make_log()
            for _ in range(3):
                yield from self._new_place(home)
        done = 0
        kinds: dict[Callable[[], Steps], int] = {
            self._upload: 12,
            self._write: 8,
            self._read: 12,
            self._mix: 14,
            self._notes: 8,
            self._stamp: 5,
            self._fill: 5,
            self._copy: 6,
            self._move: 10,
            self._event: 6,
            self._graph: 9,
            self._expiring_read: 4,
            self._expiring_upload: 3,
            self._replace: 5,
            self._new_programs: 1,
            self._timed: 2,
            self._synchronize: 2,
            self._broken: 2 * self._alone,
            self._close: self._alone,
        }
        while (count is None or done < count) and not until():
            step = self._rng.choices(list(kinds), weights=list(kinds.values()))[0]
            self.tally.steps[step.__name__[1:]] += 1
            yield from step()
            for home in self._homes:
                if len(home.noted) > _LOG // 2:
                    yield from self._check_log(home)
            done += 1
        for home in self._homes:
            for place in home.places:
                yield from self._compare("at the end", place.buffer, place.array)
            yield from self._check_log(home)

    # -- choosing

    def _home(self) -> _Home:
        return self._rng.choice(self._homes)

    def _place(self, home: _Home | None = None) -> _Place:
        return self._rng.choice((home or self._home()).places)

    def _range(self, place: _Place, count: int | None = None) -> tuple[Any, Array]:
        """A part of a buffer, or all of it, and of the array that it should equal."""
        size = len(place.array)
        if count is None and self._rng.random() < 0.3:
            return place.buffer, place.array
        wanted = self._rng.randint(1, size) if count is None else count
        start = self._rng.randint(0, size - wanted)
        return place.buffer[start : start + wanted], place.array[start : start + wanted]

    def _values(self, count: int) -> Array:
        return self._numbers.integers(-(1 << 31), 1 << 31, count, dtype=np.int32)

    def _pair(self, first: _Home, second: _Home) -> tuple[tuple[Any, Array], tuple[Any, Array]] | None:
        """Parts of equal size of two buffers; None where there is only one buffer to take."""
        target = self._place(first)
        others = [place for place in second.places if place is not target]
        if not others:
            return None
        source = self._rng.choice(others)
        most = min(len(target.array), len(source.array))
        count = most if self._rng.random() < 0.3 else self._rng.randint(1, most)
        return self._range(target, count), self._range(source, count)

    # -- steps

    def _new_place(self, home: _Home) -> Steps:
        size = self._rng.choice(self._sizes)
        self.tally.commands += 1
        if self._rng.random() < 0.4:
            array = np.zeros(size, np.int32)
            home.places.append(_Place(home, home.device.empty(size, np.int32), array))
            return
        array = self._values(size)
        buffer = yield home.device.array(array)
        home.places.append(_Place(home, buffer, array))

    def _upload(self) -> Steps:
        buffer, array = self._range(self._place())
        array[:] = self._values(len(array))
        self.tally.commands += 1
        yield buffer.copy_from(array.copy())

    def _write(self) -> Steps:
        place = self._place()
        buffer, array = self._range(place, self._rng.randint(1, min(len(place.array), 100)))
        array[:] = self._values(len(array))
        self.tally.commands += 1
        yield buffer.copy_from(array)
        yield buffer.device.server.flush()

    def _compare(self, what: str, buffer: Any, array: Array) -> Steps:  # noqa: ANN401
        self.tally.commands += 1
        expected = array.copy()
        got = yield buffer.numpy()
        self.tally.check(f"{what}, {buffer!r}", got, expected)

    def _read(self) -> Steps:
        yield from self._compare("read", *self._range(self._place()))

    def _mix(self) -> Steps:
        home = self._home()
        if (pair := self._pair(home, home)) is None:
            return
        (y, to), (x, by) = pair
        for _ in range(self._rng.randint(1, 4)):
            k = self._rng.randint(-5, 5)
            home.mix(y, x, len(to), k)
            _mix(to, by, k)
            self.tally.commands += 1
        yield

    def _notes(self) -> Steps:
        home = self._home()
        for _ in range(self._rng.choice((1, 2, 10, 300, 2_000))):
            self._note(home)
        yield home.device.server.flush()

    def _note(self, home: _Home) -> None:
        self._number += 1
        self.tally.commands += 1
        home.note(home.log, home.count, self._number)
        home.noted.append(self._number)

    def _stamp(self) -> Steps:
        buffer, array = self._range(self._place())
        home = next(home for home in self._homes if home.device is buffer.device)
        k = self._rng.randint(-9, 9)
        home.stamp(buffer, k, wsgrad.INDEX, grid=len(array))
        _stamp(array, k)
        self.tally.commands += 1
        yield

    def _fill(self) -> Steps:
        buffer, array = self._range(self._place())
        value = self._rng.choice((0, 7, -(1 << 31), 0x01010101))
        buffer.fill(value)
        array[:] = value
        self.tally.commands += 1
        yield

    def _copy(self) -> Steps:
        home = self._home()
        if (pair := self._pair(home, home)) is not None:
            yield from self._move_between(*pair)

    def _move(self) -> Steps:
        one, other = self._home(), self._home()
        if (pair := self._pair(one, other)) is not None:
            yield from self._move_between(*pair)

    def _move_between(self, target: tuple[Any, Array], source: tuple[Any, Array]) -> Steps:
        self.tally.commands += 1
        target[1][:] = source[1]
        yield target[0].copy_from(source[0])

    def _event(self) -> Steps:
        one, other = self._home(), self._home()
        event = one.device.signal()
        self.tally.commands += 2
        other.device.wait(event)
        self._note(other)
        if self._rng.random() < 0.4:
            yield event.wait()

    def _graph(self) -> Steps:
        homes = self._rng.sample(self._homes, self._rng.randint(1, len(self._homes)))
        ran: list[Callable[[], None]] = []
        number = self._number + 1
        k = wsgrad.Var("k", -5, 5)
        value = 0
        varies = False
        with wsgrad.record(*(home.device for home in homes)) as graph:
            for _ in range(self._rng.randint(1, 8)):
                home = self._rng.choice(homes)
                pair = self._pair(home, self._rng.choice(homes) if self._rng.random() < 0.4 else home)
                if pair is not None:
                    (y, to), (x, by) = pair
                    if y.device is x.device and self._rng.random() < 0.6:
                        home.mix(y, x, len(to), k)
                        varies = True
                        ran.append(lambda to=to, by=by: _mix(to, by, value))  # type: ignore[misc]
                    else:
                        yield y.copy_from(x)
                        ran.append(lambda to=to, by=by: to.__setitem__(slice(None), by))  # type: ignore[misc]
                home.note(home.log, home.count, number)
                ran.append(lambda home=home: home.noted.append(number))  # type: ignore[misc]
        self._number += 1
        for _ in range(self._rng.randint(1, 5)):
            value = self._rng.randint(-5, 5)
            graph.run(**({"k": value} if varies else {}))
            self.tally.commands += len(ran)
            for each in ran:
                each()
        if self._rng.random() < 0.5:
            yield graph.wait()

    def _expiring_read(self) -> Steps:
        buffer, array = self._range(self._place())
        target = np.empty_like(array)
        self.tally.commands += 1
        expected = array.copy()
        answer = yield Timed(lambda **timeout: buffer.copy_to(target, **timeout), 10 ** self._rng.uniform(-4, -1))
        if answer is not _EXPIRED:
            self.tally.check("a read in time", target, expected)

    def _expiring_upload(self) -> Steps:
        buffer, array = self._range(self._place())
        values = self._values(len(array))
        self.tally.commands += 1
        answer = yield Timed(lambda **timeout: buffer.copy_from(values, **timeout), 10 ** self._rng.uniform(-4, -1))
        if answer is not _EXPIRED:
            array[:] = values
            return
        # How much of it has come is open: each element is the old or the new one.
        got = yield buffer.numpy()
        self.tally.checks += 1
        if not ((got == array) | (got == values)).all():
            self.tally.wrong += 1
            self.tally.said.append(f"an upload in vain left what was never there in {buffer!r}")
        array[:] = got

    def _replace(self) -> Steps:
        home = self._home()
        place = home.places.pop(self._rng.randrange(len(home.places)))
        if self._rng.random() < 0.5:
            yield from self._compare("before it is freed", *self._range(place))
        place.buffer.free()
        yield from self._new_place(home)

    def _new_programs(self) -> Steps:
        home = self._home()
        home.make_programs(self._rng.randrange(3))
        if self._rng.random() < 0.5:
            yield home.mix.ready()

    def _timed(self) -> Steps:
        home = self._home()
        self._number += 1
        number = self._number
        self.tally.commands += 1
        yield home.note.timed(home.log, home.count, number)
        home.noted.append(number)

    def _synchronize(self) -> Steps:
        yield self._home().device.synchronize()

    def _broken(self) -> Steps:
        """What fails is told once, and what comes behind it runs."""
        home = self._home()
        broken = home.device.program("void broken(int *y) { no C }", "broken")
        broken(home.count)
        self.tally.checks += 1
        try:
            yield home.device.synchronize()
        except wsgrad.CompileError:
            return
        self.tally.wrong += 1
        self.tally.said.append("a program that does not compile has run")

    def _close(self) -> Steps:
        """A device that is closed opens anew, empty."""
        home = self._home()
        yield from self._check_log(home)
        for other in self._homes:
            yield other.device.synchronize()  # their copies to and from it would fail
        yield home.device.close()
        home.places.clear()
        home.make_programs()
        home.make_log()
        for _ in range(3):
            yield from self._new_place(home)

    def _check_log(self, home: _Home) -> Steps:
        got = yield home.log.numpy()
        count = yield home.count.numpy()
        self.tally.check_log(f"the log of {home.device.id}", got, int(count[0]), home.noted)
        home.count.fill(0)
        home.noted = []


def _mix(y: Array, x: Array, k: int) -> None:
    y[:] = np.int32(3) * y + np.int32(k) * x + np.int32(1)


def _stamp(y: Array, k: int) -> None:
    y[:] = np.int32(5) * y + (np.arange(len(y), dtype=np.int32) + np.int32(k))
