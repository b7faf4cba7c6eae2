"""One device's commands in a session: numbers them in issue order, batches them, and decides who gets which error.

Sans-IO: what it says goes to the session's link through its outbox, what the server says arrives through the `on_*`
methods. Only `launches.append` and `life.freed.append` may be called without the driver's lock: each is one operation
that no other thread and no interrupt can cut.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from wsgrad.client.arrays import MemorySource
from wsgrad.client.events import Signals
from wsgrad.client.life import Life
from wsgrad.client.outbox import WINDOW, Joint, Outbox, Stream
from wsgrad.client.pending import Compilation, Incoming, Pending
from wsgrad.client.waits import Failure, Wait
from wsgrad.errors import ProtocolError
from wsgrad.transport.cbor import encode
from wsgrad.transport.commands import (
    Alloc,
    Clear,
    Command,
    Download,
    Drop,
    Free,
    Launch,
    Read,
    Upload,
    UploadCached,
    Write,
    command_array,
)
from wsgrad.transport.express import MAX_DATA, request
from wsgrad.transport.messages import (
    INLINE_BYTES,
    MAX_WORDS_BYTES,
    Batch,
    KnownProgram,
    Launches,
    Program,
    Reopen,
    Source,
    message_array,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.client.arrays import Sink
    from wsgrad.client.arrays import Source as UploadSource
    from wsgrad.client.blobs import Sources
    from wsgrad.transport.link import Link

T = TypeVar("T")

MAX_PACKED = 512
"""So many launches are collected before they are sent."""
_MAX_BATCH_NBYTES = 32 << 10
_U31 = 0x7FFFFFFF
# So many launches travel as commands of a batch where there is one: a message of their own costs each end more than
# packing them saves.
_FEW_LAUNCHES = 2


class Queue:
    """Owned by the session.

    Attributes:
        launches: packed launches that are not numbered yet; appended to without the lock.
        lines: with `debug`, where the user issued each of `launches`.
        life: of the device; another one after `reopen`.
        pending: what callers wait for.
        outbox: what is to be sent.
        unraised: an error that no caller has met yet.
        over: nothing will be heard of it any more.
        signals: those that are not settled.
        gone: it was closed, or never opened: what is used next is another queue.
        sources: set by the session: the sources that it has sent.
        release: set by the session; told of memory that answers may no longer be received into.
    """

    def __init__(
        self,
        link: Link,
        number: int,
        device: str,
        *,
        max_buffers: int,
        max_programs: int,
        max_cost: int = WINDOW,
        max_commands: int = 1 << 32,
        debug: bool = False,
    ) -> None:
        self.number = number
        self.device = device
        self.debug = debug
        self.launches: list[bytes] = []
        self.lines: list[str] = []
        self.life = Life(max_buffers=max_buffers, max_programs=max_programs)
        self.pending = Pending()
        self.outbox = Outbox(link, number, max_cost=max_cost, max_commands=max_commands)
        self.unraised: Failure | None = None
        self.gone = False
        self.over = False
        self.signals = Signals()
        self.sources: Sources | None = None
        self.release: Callable[[object], None] | None = None
        self._limits = (max_buffers, max_programs)
        self._next = 1
        self._transfers = 0
        self._named: dict[int, bytes] = {}
        self._batch: list[list[object]] = []
        self._batch_nbytes = 0
        self._issued_at: deque[tuple[int, str]] = deque()

    # -- issuing ------------------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether something was issued that is in no message yet; frees alone can wait."""
        return bool(self.launches) or bool(self._batch)

    @property
    def last(self) -> int:
        """The number of the last command that was issued; launches that are not numbered yet come after it."""
        return self._next - 1

    @property
    def unfinished(self) -> int:
        """How many commands were issued that are not known to have run."""
        return self._next - 1 - max(self.outbox.acked, 0) + len(self.launches)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of commands in memory that are not given to the link."""
        return self.outbox.unsent_bytes + self._batch_nbytes

    def command(self, command: Command, *, nbytes: int = 48, line: str = "") -> int:
        """Issue a command that takes about `nbytes` bytes in its message; returns its number."""
        return self._append(command_array(command), nbytes, line)

    def alloc(self, buffer: int, nbytes: int, *, line: str = "") -> None:
        """Issue an allocation, behind the frees of what was given back: its memory may be needed for this one."""
        self._issue_frees()
        self.command(Alloc(buffer, nbytes), line=line)

    def write(self, buffer: int, data: memoryview, *, line: str = "") -> None:
        """Issue a write of up to `INLINE_BYTES` bytes, which are copied."""
        self.command(Write(buffer, 0, bytes(data)), nbytes=48 + len(data), line=line)

    def upload(
        self,
        buffer: int,
        nbytes: int,
        source: UploadSource,
        finish: Callable[[object], T],
        *,
        digest: bytes | None = None,
        line: str = "",
    ) -> Wait[T]:
        """Issue an upload from memory that may change again once the wait is settled.

        With a digest the server's cache is asked first.
        """
        if digest is None:
            stream = self._upload(buffer, nbytes, source, 0, line)
        else:
            transfer = self._transfer()
            number = self.command(UploadCached(transfer, buffer, 0, nbytes, digest), nbytes=80, line=line)
            stream = Stream(number, transfer, source, nbytes)
            self.outbox.put_cached(stream)

        def withdraw() -> None:
            stream.aborted = True
            self.outbox.pump()

        return self.pending.until(stream.number, finish, withdraw=withdraw)

    def upload_copy(self, buffer: int, data: bytes, *, line: str = "") -> None:
        """Issue an upload of bytes that nobody else changes; nothing to wait for."""
        self._upload(buffer, len(data), MemorySource(memoryview(data)), len(data), line)

    def read(self, buffer: int, nbytes: int, sink: Sink, finish: Callable[[object], T], *, line: str = "") -> Wait[T]:
        """Issue a read of a whole buffer or view into `sink`."""
        if not nbytes:
            return self.synchronize(finish)
        incoming: Incoming[T]
        if nbytes <= INLINE_BYTES:
            incoming = Incoming(nbytes, sink, finish, lambda: self._withdraw_read(incoming, None))
            if self.launches:
                self._take_launches(followed=True)
            if nbytes <= MAX_DATA and not self._batch:
                incoming.number = self._take_number(line)
                self.outbox.put(request(self.number, incoming.number, buffer, nbytes), None, incoming.number)
            else:
                incoming.number = self._append([Read.KIND, buffer, 0, nbytes], 48, line)
            self.pending.read(incoming)
        else:
            transfer = self._transfer()
            incoming = Incoming(nbytes, sink, finish, lambda: self._withdraw_read(incoming, transfer))
            incoming.number = self.command(Download(transfer, buffer, 0, nbytes), line=line)
            self.pending.download(transfer, incoming)
        return incoming

    def _withdraw_read(self, incoming: Incoming[T], transfer: int | None) -> None:
        if transfer is None:
            self.pending.forget_read(incoming.number)
        elif self.pending.forget_download(transfer):
            self._close_batch()
            self.outbox.abort(transfer, incoming.number)
            self.outbox.pump()
        if self.release is not None:
            self.release(incoming.sink.owner)

    def timed_launch(self, launch: Launch, *, line: str = "") -> Wait[float]:
        """Issue a timed launch; the result is in seconds."""

        def finish(value: object) -> float:
            if type(value) is not float or not value >= 0:
                raise ProtocolError(f"the server answered a timed launch with {value!r:.40} instead of seconds")
            return value

        number = self.command(launch, nbytes=64 + 9 * len(launch.arguments), line=line)
        return self.pending.result(number, finish)

    def synchronize(
        self, finish: Callable[[object], T] | None = None, *, withdraw: Callable[[], None] | None = None
    ) -> Wait[T]:
        """Wait for everything issued so far."""
        if self.launches:
            self._take_launches(followed=False)
        return self.pending.until(self._next - 1, finish, withdraw=withdraw)

    def program(
        self,
        source: bytes,
        *,
        dialect: str,
        name: str,
        entry: str,
        signature: str,
        writes: list[int] | None,
        alias: bool,
        constants: dict[str, object] | None = None,
        line: str = "",
    ) -> tuple[int, Compilation]:
        """Issue a program; returns its id and how far its compilation is."""
        identity = self.life.programs.take()
        self._close_all()
        number = self._take_number(line)
        digest = None if self.sources is None else self.sources.known(source)
        if digest is None:
            message = Program(
                self.number, number, identity, dialect, name, entry, signature, writes, alias, constants or {}
            )
            self.outbox.put(encode(message_array(message)), source, number)
        else:
            self._named[number] = source
            known = KnownProgram(
                self.number,
                number,
                identity,
                dialect,
                name,
                entry,
                signature,
                writes,
                alias,
                constants or {},
                len(source),
                digest,
            )
            self.outbox.put(encode(message_array(known)), None, number)
        return identity, self.pending.compilation(identity, number)

    def reopen(self) -> Wait[None]:
        """Give the device a new, empty process. Everything of its life before is over."""
        self._close_all()
        number = self._take_number("")
        reopened = Failure(number, "DeviceLost", "its device was reopened", {"lost": True})
        self._end_life(reopened)
        # A launch that another thread is packing right now lands in the old list and goes with it.
        self.launches = []
        self.lines = []
        self.unraised = None
        self.pending.fail_from(0, reopened)
        self.outbox.abort_from(0)
        self.outbox.pump()
        self.outbox.put(encode(message_array(Reopen(self.number, number))), None, number)
        self.life = Life(max_buffers=self._limits[0], max_programs=self._limits[1])
        return self.pending.result(number, lambda _: None)

    def joint_number(self, line: str) -> int:
        """The number of a command that is issued on other queues too; `join` follows."""
        self._close_all()
        return self._take_number(line)

    def join(self, joint: Joint, head: bytes, number: int) -> None:
        """Give a message about several queues its place behind all that was issued here: command `number`, or 0."""
        if not number:
            self._close_all()
        self.outbox.put_joint(joint, head, number)

    def raise_unraised(self) -> None:
        """Called by every waiting call before it issues anything: an error that nobody was told of is raised now.

        Raises:
            WsgradError: that error, or what the device was lost by.
        """
        failure = self.unraised
        if failure is not None:
            self.unraised = None
            if not failure.lost:
                self.command(Clear(failure.number))
            raise failure.error()
        if self.life.dead is not None:
            raise self.life.dead.lost_error(f"the device {self.device!r}")

    def flush(self) -> None:
        """Put everything issued so far, frees included, into messages and send what may be sent."""
        self._issue_frees()
        self._close_all()
        if self.outbox:
            self.outbox.pump()

    def _issue_frees(self) -> None:
        if not self.life.freed:
            return
        # Taken before the launches are: a launch precedes the free of its arguments.
        freed = self.life.take_freed()
        if self.launches:
            self._take_launches(followed=bool(freed))
        for key in freed:
            self.life.freeing(key, self.command(Free(key) if key >= 0 else Drop(~key)))

    def _append(self, array: list[object], nbytes: int, line: str) -> int:
        if self.launches:
            self._take_launches(followed=True)
        return self._put(array, nbytes, line)

    def _put(self, array: list[object], nbytes: int, line: str) -> int:
        if self._batch_nbytes + nbytes > _MAX_BATCH_NBYTES:
            self._close_batch()
        self._batch.append(array)
        self._batch_nbytes += nbytes
        return self._take_number(line)

    def _take_number(self, line: str) -> int:
        number = self._next
        self._next = number + 1
        if line:
            self._issued_at.append((number, line))
        return number

    def _transfer(self) -> int:
        self._transfers = (self._transfers + 1) & _U31
        return self._transfers

    def _upload(self, buffer: int, nbytes: int, source: UploadSource, held: int, line: str) -> Stream:
        transfer = self._transfer()
        number = self.command(Upload(transfer, buffer, 0, nbytes), line=line)
        self._close_batch()
        stream = Stream(number, transfer, source, nbytes, held)
        self.outbox.put_stream(stream)
        return stream

    def _close_all(self) -> None:
        if self.launches:
            self._take_launches(followed=False)
        self._close_batch()

    def _close_batch(self) -> None:
        batch = self._batch
        if batch:
            head = encode([Batch.KIND, self.number, self._next - len(batch), batch])
            self.outbox.put(head, None, self._next - 1)
            self._batch = []
            self._batch_nbytes = 0

    def _take_launches(self, *, followed: bool) -> None:
        count = len(self.launches)
        packed = self.launches[:count]
        del self.launches[:count]
        if self.debug:
            self._issued_at.extend(zip(range(self._next, self._next + count), self.lines[:count], strict=False))
            del self.lines[:count]
        if count <= _FEW_LAUNCHES and (followed or self._batch):
            for launch in packed:
                self._put(command_array(self.life.unpacked(launch)), 64 + 3 * len(launch), "")
            return
        self._close_batch()
        words = b"".join(packed)
        if len(words) <= MAX_WORDS_BYTES:
            self._put_launches(words, count)
            return
        start = nbytes = 0
        for end, launch in enumerate(packed):
            if nbytes + len(launch) > MAX_WORDS_BYTES:
                self._put_launches(b"".join(packed[start:end]), end - start)
                start, nbytes = end, 0
            nbytes += len(launch)
        self._put_launches(b"".join(packed[start:]), count - start)

    def _put_launches(self, words: bytes, count: int) -> None:
        first = self._next
        self._next = first + count
        self.outbox.put(encode([Launches.KIND, self.number, first, count]), words, self._next - 1)

    # -- what the server says -----------------------------------------------------------------------------------------

    def on_result(self, number: int, value: object) -> None:
        """The value of a command; number 0 is the opening."""
        if number:
            self.pending.on_result(number, value)
        else:
            self.on_ack(0)

    def on_ack(self, number: int) -> None:
        """All commands up to `number` have run or were dropped."""
        if number >= self._next:
            raise ProtocolError(f"command {number} was acknowledged, but only {self._next - 1} were issued")
        self.outbox.acknowledged(number)
        self.life.acknowledged(number)
        for named in [named for named in self._named if named <= number]:
            del self._named[named]
        while self._issued_at and self._issued_at[0][0] <= number:
            self._issued_at.popleft()
        self.pending.on_ack(number)
        self.signals.acknowledged(number)
        if self.outbox:
            self.outbox.pump()

    def on_credit(self, slots: int) -> None:
        """Room for more chunks of uploads."""
        self.outbox.credit(slots)
        self.outbox.pump()

    def on_missing(self, number: int, offset: int) -> None:
        """The server lacks what a command only named."""
        source = self._named.pop(number, None)
        if source is not None:
            self.outbox.answer(encode(message_array(Source(self.number, number))), source)
        else:
            self.outbox.missing(number, offset)
            self.outbox.pump()

    def on_failed(self, failure: Failure) -> None:
        """A command failed. Callers that wait for it or for a later one get the error, else it is kept for the next."""
        for number, line in self._issued_at:
            if number == failure.number:
                failure = Failure(number, failure.code, f"{failure.message} (issued at {line})", failure.details)
        if failure.lost or not failure.number:
            self._end_life(failure)
        self.outbox.abort_from(failure.number)
        self.signals.failed(failure)
        told = self.pending.fail_compilation(failure.number, failure)
        if not self.pending.fail_from(failure.number, failure) and not told:
            self.unraised = failure
        elif self.life.dead is None:
            self.command(Clear(failure.number))
        self.flush()

    def end(self, failure: Failure) -> bool:
        """The session or the queue is over: everything that waits fails, nothing more is sent.

        Returns whether anybody waited.
        """
        self.over = True
        compiling = self._end_life(failure)
        self.signals.failed(failure)
        return self.pending.fail_from(-1, failure) or compiling

    def _end_life(self, failure: Failure) -> bool:
        if self.life.dead is None:
            self.life.dead = failure
        return self.pending.fail_compilations(failure)
