"""What server and device objects of both faces share: finding devices, issuing on their queues, sizes in words.

A face adds only how to wait. Methods that start with `_start` issue something and return what to wait for; they and
everything else that touches a queue run inside the face's `_call` or its way of waiting.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from wsgrad.client.arrays import Array, check_dtype
from wsgrad.client.blobs import Hasher
from wsgrad.client.buffer import BaseBuffer, numbered_shape, size_in_words
from wsgrad.client.caller import caller_line
from wsgrad.client.devices import Devices
from wsgrad.client.handle import Handle
from wsgrad.client.program import BaseProgram
from wsgrad.client.recorders import OPEN, recorder_of, refuse
from wsgrad.errors import DeviceError, OutOfMemory
from wsgrad.transport.messages import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike, DTypeLike

    from wsgrad.client.core import Session
    from wsgrad.client.events import BaseEvent, Signalled
    from wsgrad.client.graph import BaseGraph
    from wsgrad.client.queue import Queue
    from wsgrad.client.recording import Recorder
    from wsgrad.client.waits import Wait

T = TypeVar("T")
B = TypeVar("B", bound=BaseBuffer)
P = TypeVar("P", bound=BaseProgram)
D = TypeVar("D", bound="BaseDevice[Any, Any]")

_MAX_NBYTES = (1 << 53) - 1  # what the protocol can say


class BaseServer(ABC, Generic[D]):
    """A session with a server. Don't make one yourself: `connect` and `open_server` do."""

    def __init__(self, session: Session, *, url: str, address: str, count: int | None) -> None:
        self._session = session
        self._url = url
        self._address = address
        self._count = count
        self._made: dict[str, D] = {}
        self._hasher: Hasher | None = None

    @property
    def url(self) -> str:
        """The server's address with its token: keep it from logs."""
        return self._url

    @property
    def devices(self) -> Devices[D]:
        """The server's devices, kept up to date."""
        return Devices(self)

    @property
    def closed(self) -> bool:
        """Whether the session is over: closed, or lost for good."""
        return self._session.over

    @property
    def info(self) -> Mapping[str, object]:
        """What the server says of itself: its name, version, limits."""
        return MappingProxyType(self._session.info)

    @property
    def relay_reasons(self) -> Mapping[str, str]:
        """Why copies to other servers, `statistics["relayed"]` of them, go through this client; by address."""
        return MappingProxyType(self._session.exchange.reasons)

    @property
    def statistics(self) -> Mapping[str, int]:
        """Counters of this session, such as `cache_hits`: uploads that the server's cache has brought."""
        return MappingProxyType(self._session.statistics)

    def __repr__(self) -> str:
        count = len(self._device_rows())
        state = "closed" if self._session.over else "open" if self._session.attached else "reconnecting"
        return f"<{type(self).__name__} {self._address}: {count} device{'' if count == 1 else 's'}, {state}>"

    def _device_rows(self) -> list[dict[str, object]]:
        rows = [row for row in self._session.devices if isinstance(row.get("id"), str)]
        return rows if self._count is None else rows[: self._count]

    def _device(self, identity: str) -> D:
        device = self._made.get(identity)
        if device is None:
            device = self._made[identity] = self._new_device(identity)
        return device

    def _look(self) -> None:
        """Take note of what the server has said; where something always listens there is nothing to do."""

    def _start_awaiting(self, name: str) -> Wait[D]:
        """A wait for a device of that id, label or kind."""
        self._session.check()
        devices = self.devices
        found: list[D] = []

        def came() -> bool:
            device = devices._awaited(name)
            if device is not None:
                found.append(device)
            return device is not None

        return self._session.when(came, lambda _: found[0])

    def _offer(self) -> str:
        """The devices there are, in words."""
        rows = self._device_rows()
        if not rows:
            return f"{self._address} offers no devices"
        return f"{self._address} offers {', '.join(str(row['id']) for row in rows)}"

    def _start_caching(self) -> None:
        """Ask the server's cache before uploads, if it has one."""
        if self._session.info.get("cache") is True:
            self._hasher = Hasher()
            self._session.sources.ask_first = True
        else:
            warnings.warn(
                f"cache=True has no effect: {self._address} has no cache; its owner needs 'wsgrad[cache]' installed "
                "and a --cache-size above 0",
                RuntimeWarning,
                stacklevel=3,
            )

    def _caller(self) -> object:
        """Tells the threads or tasks apart that use it."""
        return threading.get_ident()

    @abstractmethod
    def _new_device(self, identity: str) -> D: ...

    @abstractmethod
    def _call(self, issue: Callable[[], T]) -> T:
        """Issue something that nobody waits for."""

    @abstractmethod
    def _room(self, queue: Queue) -> None:
        """Let too much that is unsent, or ids that are still being freed, go first, or refuse."""

    @abstractmethod
    def _full(self, queue: Queue) -> None:
        """So many launches have been collected that they should go."""


class BaseDevice(ABC, Generic[B, P]):
    """One device in a session, with its own queue of commands, opened when it is first used."""

    def __init__(self, server: BaseServer[Any], identity: str) -> None:
        self._server = server
        self._id = identity
        self._row: dict[str, object] = {"id": identity}
        self._queue: Queue | None = None

    @property
    def id(self) -> str:
        """Its name, `node/kind/index`, the same as long as its node keeps its name."""
        return self._id

    @property
    def server(self) -> BaseServer[Any]:
        """The server object it belongs to."""
        return self._server

    @property
    def properties(self) -> Mapping[str, object]:
        """What is known of it: kind, dialects, compiler, processor, memory in bytes and more."""
        for row in self._server._session.devices:
            if row.get("id") == self._id:
                self._row = row
        return MappingProxyType(self._row)

    @property
    def kind(self) -> str:
        """The runtime behind it, such as `cpu`."""
        return str(self.properties.get("kind", "unknown"))

    @property
    def label(self) -> str:
        """The name its owner gave it."""
        return str(self.properties.get("label", self._id))

    @property
    def dialects(self) -> tuple[str, ...]:
        """The languages its programs may be written in."""
        dialects = self.properties.get("dialects")
        return tuple(str(dialect) for dialect in dialects) if isinstance(dialects, list) else ()

    def __repr__(self) -> str:
        properties = self.properties
        words = [self.kind, *self.dialects]
        words += [str(properties[key]) for key in ("cpu", "compiler") if properties.get(key)]
        threads, memory = properties.get("threads"), properties.get("memory")
        if isinstance(threads, int):
            words.append(f"{threads} thread{'' if threads == 1 else 's'}")
        if isinstance(memory, int):
            words.append(size_in_words(memory))
        queue = self._queue
        if queue is not None and queue.life.dead is not None and not queue.gone:
            words.append("lost")
        return f"<{type(self).__name__} {self._id!r}: {', '.join(words)}>"

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> B:
        """New memory, which is zero. Never waits.

        Args:
            shape: its shape.
            dtype: any of fixed size, `float32` if left out.
        """
        checked, sizes = check_dtype(dtype), numbered_shape(shape)
        if checked.subdtype is not None:
            # As in NumPy, an element that is an array gives the array dimensions.
            checked, inner = checked.subdtype
            sizes += inner
        self._make_room()
        return self._server._call(lambda: self._alloc(sizes, checked))

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> B:
        """The same as `empty`, for those who want to say it."""
        return self.empty(shape, dtype)

    def empty_like(self, other: BaseBuffer | Array) -> B:
        """New memory of the shape and dtype of a buffer or array."""
        return self.empty(other.shape, other.dtype)

    def program(
        self,
        source: str,
        entry: str,
        *,
        dialect: str | None = None,
        writes: Sequence[int] | None = None,
        alias: bool = False,
        name: str | None = None,
    ) -> P:
        """A program of this source that starts at the function `entry`. Never waits: it is compiled meanwhile.

        Args:
            source: its text.
            entry: the function that a launch calls.
            dialect: its language; needed only where the device has more than one.
            writes: positions of the arguments that it changes; without it every buffer counts as changed.
            alias: whether the same range may be given for several arguments of which one is written.
            name: how errors call it; `entry` if left out.

        Raises:
            DeviceError: the device has no such dialect.
            TypeError: the source or a name is not text.
            ValueError: `name` or `entry` can't be one.
        """
        if dialect is None:
            dialects = self.dialects
            if len(dialects) != 1:
                raise DeviceError(f"{self._id!r} has the dialects {dialects}; say dialect=")
            dialect = dialects[0]
        program = self._new_program(source, entry, dialect, writes, alias, entry if name is None else name)
        self._make_room()
        self._server._call(program._begin)
        return program

    def wait(self, event: BaseEvent) -> None:
        """Let nothing that is issued here from now on run before `event`, of any device or server. Never waits itself.

        If the event fails, with an error of its device, this device fails in its place with the same error.
        """
        refuse(self, "a wait for an event")
        self._make_room()
        known, session = event._event, self._server._session
        if event._device._server._session is session:
            self._server._call(lambda: session.events.wait(self._usable_queue(), known, self._line()))
            return
        copy = self._server._call(lambda: session.events.wait_for_copy(self._usable_queue(), known, self._line()))
        event._device._server._call(lambda: known.copied(session, copy))

    def _start_signal(self) -> Signalled:
        refuse(self, "a signal")
        return self._server._session.events.signal(self._usable_queue(), self._line())

    def _make_room(self) -> None:
        queue = self._queue
        if queue is not None:
            self._server._room(queue)

    def _live_queue(self) -> Queue:
        """The queue, opened if need be."""
        session = self._server._session
        session.check()
        queue = self._queue
        if queue is None or (queue.gone and queue.unraised is None):
            queue = self._queue = session.open_queue(self._id)
        return queue

    def _usable_queue(self) -> Queue:
        """The queue, of a device that is not lost.

        Raises:
            WsgradError: what it was lost by.
        """
        queue = self._live_queue()
        if queue.life.dead is not None:
            queue.raise_unraised()
        return queue

    def _waiting_queue(self) -> Queue:
        """The queue, for a call that waits and so raises what nobody was told of yet.

        Raises:
            LaunchError: inside a recording.
        """
        refuse(self, "a call that waits or reads")
        queue = self._queue
        if queue is None or queue.gone or queue.unraised is not None or self._server._session.ended is not None:
            queue = self._live_queue()
        queue.raise_unraised()
        return queue

    def _alloc(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> B:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes > _MAX_NBYTES:
            raise OutOfMemory(
                f"a buffer of shape {shape} and dtype {dtype} would have {nbytes} bytes, more than any device has"
            )
        queue = self._usable_queue()
        recorder = recorder_of(self) if OPEN else None
        identity = queue.life.buffers.take()
        handle = Handle(identity, queue.life, nbytes=nbytes)
        queue.alloc(identity, nbytes, line=self._line())
        buffer = self._new_buffer(handle, handle, 0, shape, dtype)
        if recorder is not None:
            recorder.own(buffer)
        return buffer

    def _line(self) -> str:
        return caller_line() if self._server._session.debug else ""

    def _start_array(self, data: Array, digest: bytes | None = None) -> Wait[B]:
        queue = self._waiting_queue()
        buffer = self._alloc(data.shape, data.dtype)
        return buffer._upload(queue, data, lambda _: buffer, digest)

    def _start_arrays(self, arrays: Sequence[Array], digests: Sequence[bytes | None]) -> Wait[list[B]]:
        queue = self._waiting_queue()
        waits: list[Wait[B]] = []

        def withdraw() -> None:
            for wait in waits:
                wait.withdraw()

        try:
            for data, digest in zip(arrays, digests, strict=True):
                buffer = self._alloc(data.shape, data.dtype)
                # The caller waits for all of them, so none needs a copy of its own.
                copied = INLINE_BYTES + 1
                waits.append(buffer._upload(queue, data, partial(_given, buffer), digest, copied_bytes=copied))
        except BaseException:
            withdraw()
            raise

        # Whatever fails one of them fails the wait for the last.
        return queue.synchronize(lambda _: [wait.result() for wait in waits], withdraw=withdraw)

    def _start_synchronize(self) -> Wait[None]:
        return self._waiting_queue().synchronize(lambda _: None)

    def _start_reopen(self) -> Wait[None]:
        refuse(self, "reopening a device")
        queue = self._live_queue()
        if queue.gone:  # its opening failed: the next queue is a new attempt
            queue.unraised = None
            return self._live_queue().synchronize(lambda _: None)
        return queue.reopen()

    def _close(self) -> None:
        refuse(self, "closing a device")
        if self._queue is not None:
            self._server._session.close_queue(self._queue)

    @staticmethod
    def _checked_array(data: ArrayLike, dtype: DTypeLike | None) -> Array:
        array = np.asarray(data, dtype=dtype)
        check_dtype(array.dtype)
        return array

    @abstractmethod
    def _new_graph(self, recorder: Recorder) -> BaseGraph: ...

    @abstractmethod
    def _new_buffer(
        self, handle: Handle, base: Handle, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> B: ...

    @abstractmethod
    def _new_program(
        self, source: str, entry: str, dialect: str, writes: Sequence[int] | None, alias: bool, name: str
    ) -> P: ...


def _given(buffer: B, _: object) -> B:
    return buffer
