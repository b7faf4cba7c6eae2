"""Uploads of one queue that the server's cache is asked for: found ones are fed to the node, the client sends the rest.

They keep their place in the queue's order, whoever brings the bytes. Pure bookkeeping between a queue, its node and the
cache: a blob is looked for as soon as its upload has come, it goes to the node when the queue has reached it. Chunks
that the client sends wait here in ordinary memory, four at most as its credit allows, and are written down meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from wsgrad.errors import ProtocolError
from wsgrad.server.submission import Incoming
from wsgrad.transport import cbor
from wsgrad.transport.commands import Upload, command_array
from wsgrad.transport.messages import Abort, Batch, Missing, message_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.server.blobs import BlobCache, Keeping, Reading
    from wsgrad.server.intake import Intake
    from wsgrad.server.outstanding import Outstanding
    from wsgrad.server.port import Port
    from wsgrad.server.statistics import Statistics
    from wsgrad.server.submission import CachedUpload
    from wsgrad.transport.messages import Message

_LOOKED_FOR: Final = 32
"""Blobs of one queue that are looked for, or held open, at a time."""


@dataclass(slots=True, eq=False)
class _State:
    """How far one upload is.

    Attributes:
        reading: the blob; None while others are looked for first.
        incoming: what the client was asked for, if it was.
        keeping: where that is written down.
        pieces: chunks that have come and are not with the node.
        offset: bytes that are with the node.
        started: whether the node has the command.
    """

    upload: CachedUpload
    reading: Reading | None = None
    incoming: Incoming | None = None
    keeping: Keeping | None = None
    pieces: deque[memoryview] = field(default_factory=deque)
    offset: int = 0
    started: bool = False
    aborted: bool = False


class CachedUploads:
    """Owned by a queue."""

    def __init__(
        self,
        queue: int,
        cache: BlobCache,
        intake: Intake,
        statistics: Statistics,
        *,
        tell: Callable[[Message], None],
        give_credit: Callable[[int], None],
        later: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._cache = cache
        self._in = intake
        self._statistics = statistics
        self._tell = tell
        self._give_credit = give_credit
        self._later = later
        self._states: dict[int, _State] = {}
        self._unlooked: deque[_State] = deque()
        self._looking = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._states)

    @property
    def feeding(self) -> bool:
        """Whether the node has a part of one and waits for more."""
        return any(state.started for state in self._states.values())

    def admit(self, upload: CachedUpload) -> None:
        """One has come.

        Raises:
            ProtocolError: its transfer is in use.
        """
        if upload.transfer in self._states:
            raise ProtocolError(f"transfer {upload.transfer} is in use")
        state = self._states[upload.transfer] = _State(upload)
        if upload.nbytes:
            self._unlooked.append(state)
            self._look()

    def check_chunk(self, transfer: int) -> None:
        """Check that a chunk of an ordinary upload may come.

        Raises:
            ProtocolError: it comes before an earlier upload has ended, which may need the same credit.
        """
        for state in self._states.values():
            if not state.aborted:
                number = state.upload.number
                raise ProtocolError(f"a chunk of transfer {transfer} before cached upload {number} has ended")

    def chunk(self, transfer: int, data: memoryview) -> bool:
        """A chunk that the client was asked for has come. Returns whether its upload is still wanted."""
        state = self._states.get(transfer)
        if state is None or state.incoming is None or state.aborted:
            return False
        state.pieces.append(data)
        if state.keeping is not None:
            state.keeping.add(data)
        return True

    def abort(self, transfer: int) -> bool:
        """The client gives one up. Returns whether there is such an upload."""
        state = self._states.get(transfer)
        if state is None:
            return False
        if not state.aborted:
            state.aborted = True
            self._stop(state)
            self._give_credit(len(state.pieces))
            state.pieces.clear()
        return True

    def advance(self, upload: CachedUpload, port: Port, out: Outstanding) -> bool:
        """The queue has reached an upload: give the node what is there. Returns whether it has ended."""
        state = self._states[upload.transfer]
        if not state.started:
            found = not upload.nbytes or (state.reading is not None and state.reading.found)
            if not state.aborted and state.incoming is None and not found:
                return False
            command = Upload(upload.transfer, upload.buffer, upload.offset, upload.nbytes)
            port.send(cbor.encode(message_array(Batch(self._queue, upload.number, [command_array(command)]))))
            out.add(upload.sent)
            state.started = True
            if state.reading is not None:
                state.reading.start()
        if state.aborted:
            port.send(cbor.encode(message_array(Abort(self._queue, upload.transfer))))
        else:
            while port.has_room and state.offset < upload.nbytes:
                fed = bool(state.reading and state.reading.pieces)
                if fed:
                    assert state.reading is not None
                    piece = memoryview(state.reading.take())
                elif state.pieces:
                    piece = state.pieces.popleft()
                else:
                    break
                slot, kept = port.take_chunk(piece)
                port.send_chunk(upload.transfer, state.offset, slot, kept, client=not fed)
                state.offset += len(piece)
            if state.offset < upload.nbytes:
                return False
            if state.incoming is None and upload.nbytes:
                self._statistics.cache_hits += 1
                self._statistics.cache_nbytes += upload.nbytes
        del self._states[upload.transfer]
        if state.reading is not None:
            self._looking -= 1
            self._look()
        return True

    def forget(self) -> None:
        """The node is gone: nothing is fed or written down any more. What the client was asked for still comes."""
        for state in self._states.values():
            self._stop(state)
        self._states.clear()
        self._unlooked.clear()
        self._looking = 0

    def _look(self) -> None:
        while self._unlooked and self._looking < _LOOKED_FOR:
            state = self._unlooked.popleft()
            if not state.aborted:
                self._looking += 1
                upload = state.upload
                state.reading = self._cache.find(upload.digest, upload.nbytes, partial(self._news, state))

    def _news(self, state: _State) -> None:
        assert state.reading is not None
        if state.reading.missing is not None and state.incoming is None:
            self._ask(state, state.reading.missing)
        self._later()

    def _ask(self, state: _State, offset: int) -> None:
        upload = state.upload
        self._statistics.cache_misses += 1
        state.incoming = Incoming(upload.transfer, upload.nbytes, False, offset, upload.number)
        self._in.ask(state.incoming)
        if not offset:
            state.keeping = self._cache.keep(upload.digest, upload.nbytes)
        self._tell(Missing(self._queue, upload.number, offset))

    def _stop(self, state: _State) -> None:
        if state.reading is not None:
            state.reading.stop()
        if state.keeping is not None and (state.incoming is None or state.incoming.offset < state.upload.nbytes):
            state.keeping.stop()
