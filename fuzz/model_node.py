"""A node that answers as one should, without memory or programs; what it says goes through `reply`, which may lie."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wsgrad.graph.parse import parse_device_part
from wsgrad.transport import cbor
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

_READS = bytes(range(256)) * (m.INLINE_BYTES // 256)


@dataclass
class ModelQueue:
    """One queue.

    Attributes:
        reply: sends a message with its bulk to the server.
        chunk: sends a chunk of a download.
        fails: asked before each command whether it fails.
    """

    queue: int
    reply: Callable[[m.Message, bytes | None], None]
    chunk: Callable[[m.Chunk, bytes], None]
    fails: Callable[[], bool]
    done: int = 0
    error: int | None = None
    credit: int = m.SLOTS
    upload: tuple[int, int, int] | None = None
    download: list[int] | None = None
    _todo: deque[tuple[m.Message, int]] = field(default_factory=deque)
    _commands: deque[tuple[int, c.Command]] = field(default_factory=deque)
    _early: dict[int, int] = field(default_factory=dict)
    _graphs: dict[int, bytes] = field(default_factory=dict)

    def take(self, message: m.Message, bulk: bytes | None) -> None:
        """What the server has sent."""
        match message:
            case m.Credit():
                self.credit += message.slots
                assert self.credit <= m.SLOTS
            case m.Abort() if self.download is not None and self.download[0] == message.transfer:
                self.download[2] = self.download[3]
            case m.Profile():
                if not message.on:
                    self.reply(m.Spans(self.queue, message.trace, True), b"")
            case m.Graph():
                if bulk is not None and message.offset == 0:
                    self._graphs[message.graph] = bulk if len(bulk) == message.total else b""
            case m.Unrecord():
                pass
            case m.Program():
                assert bulk is not None
                self._todo.append((message, len(bulk)))
            case _:
                self._todo.append((message, 0 if bulk is None else len(bulk)))
        self.pump()

    def pump(self) -> None:
        """Go on as far as chunks and credit allow."""
        before = self.done
        while self._step():
            pass
        if self.done > before:
            self.reply(m.Ack(self.queue, self.done), None)

    def _step(self) -> bool:
        if self.download is not None:
            return self._send_download()
        if self.upload is not None:
            return self._receive_upload()
        if self._commands:
            self._command(*self._commands.popleft())
            return True
        if not self._todo:
            return False
        message, nbytes = self._todo.popleft()
        match message:
            case m.Batch():
                self._commands.extend(enumerate(map(c.parse_command, message.commands), message.first))
            case m.Launches():
                assert nbytes % 4 == 0
                self._run(message.first, message.first + message.count - 1)
            case m.Program():
                self.reply(m.Compiled(self.queue, message.program, True, ""), None)
                self.done = message.number
            case m.Load():
                self.done = max(self.done, message.number)
            case m.Fail():
                if self.error is None:
                    self.error = message.number
                    self.reply(
                        m.Failed(self.queue, message.number, message.code, message.message, message.details), None
                    )
                self.done = message.number
            case m.Replay():
                self._run(message.number, message.number, refused=self._transfers(message.graph))
            case m.Chunk() | m.Slot():
                self.reply(m.Credit(self.queue, 1), None)  # of an upload that has ended
            case m.Abort():
                pass
            case _:
                raise AssertionError(f"{message!r}, which no node is sent")
        return True

    def _transfers(self, graph: int) -> bool:
        encoded = self._graphs.get(graph, b"")
        if not encoded:
            return True
        array = cbor.decode(encoded)
        assert isinstance(array, list)
        part, _, _ = parse_device_part(array[0])
        return any(part.lanes[1:])

    def _run(self, first: int, last: int, *, refused: bool = False) -> None:
        if self.error is None and (refused or self.fails()):
            self._fail(first)
        self.done = last

    def _fail(self, number: int) -> None:
        self.error = number
        self.reply(m.Failed(self.queue, number, "LaunchError", "as asked", {"operation": "launch"}), None)

    def _command(self, number: int, command: c.Command) -> None:
        if self.error is not None:
            if isinstance(command, c.Clear) and command.error == self.error:
                self.error = None
            if isinstance(command, c.Upload) and command.nbytes:
                self.upload = (command.transfer, command.nbytes, number)
                return
        elif not isinstance(command, c.Clear | c.Free | c.Drop | c.Alloc | c.View) and self.fails():
            self._fail(number)
            if isinstance(command, c.Upload) and command.nbytes:
                self.upload = (command.transfer, command.nbytes, number)
                return
        else:
            match command:
                case c.Read():
                    self.done = number
                    self.reply(m.ReadData(self.queue, number, number), _READS[: command.nbytes])
                case c.Launch() if command.timed:
                    self.reply(m.Result(self.queue, number, 0.5), None)
                case c.Upload() if command.nbytes:
                    self.upload = (command.transfer, command.nbytes, number)
                    return
                case c.Download() if command.nbytes:
                    self.download = [command.transfer, number, 0, command.nbytes]
                    return
        self.done = number

    def _send_download(self) -> bool:
        assert self.download is not None
        transfer, number, offset, nbytes = self.download
        if offset >= nbytes:
            self.download = None
            self.done = number
            return True
        if not self.credit:
            return False
        self.credit -= 1
        size = min(m.CHUNK_BYTES, nbytes - offset)
        self.download[2] += size
        self.chunk(m.Chunk(self.queue, transfer, offset), bytes(size))
        return True

    def _receive_upload(self) -> bool:
        assert self.upload is not None
        transfer, left, number = self.upload
        for index, (message, nbytes) in enumerate(self._todo):
            size = message.nbytes if isinstance(message, m.Slot) else nbytes
            if isinstance(message, m.Chunk | m.Slot):
                del self._todo[index]
                self.reply(m.Credit(self.queue, 1), None)
                if message.transfer == transfer:
                    left -= size
            elif isinstance(message, m.Abort) and message.transfer == transfer:
                del self._todo[index]
                left = 0
            elif isinstance(message, m.Fail) and message.number == number:
                left = 0
            else:
                break
            assert left >= 0
            self.upload = (transfer, left, number)
            if not left:
                self.upload = None
                self.done = number
            return True
        return False
