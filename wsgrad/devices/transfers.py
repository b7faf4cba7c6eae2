"""The upload and the download that a queue is in the middle of: moves their bytes; when one begins, others decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wsgrad.devices.trace import now
from wsgrad.errors import ProtocolError
from wsgrad.transport.messages import Chunk, Credit
from wsgrad.transport.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.devices.base import Outlet, Reply, Runtime
    from wsgrad.devices.trace import DeviceTrace


@dataclass(slots=True)
class Upload:
    """Bytes that come as chunks, in order."""

    number: int
    transfer: int
    target: tuple[int, int] | None
    """Where they go; None if they are thrown away behind an error."""
    nbytes: int
    received: int = 0
    step: int = 0
    """Which step of a graph it is, counted from 1."""


@dataclass(slots=True)
class Download:
    """Bytes that go as chunks, in order."""

    number: int
    transfer: int
    memory: int
    offset: int
    nbytes: int
    sent: int = 0
    step: int = 0


class Transfers:
    """Of one queue.

    Attributes:
        upload: the one that is not whole yet.
        download: the one whose last chunk has not gone yet.
        beside: measures them instead of the runtime's own trace while launches run in another thread.
    """

    def __init__(
        self, queue: int, runtime: Runtime, *, reply: Reply, outlet: Outlet, ended: Callable[[int], None]
    ) -> None:
        """Make one.

        Args:
            queue: the number that stands in every message.
            reply: takes the credit.
            outlet: takes the chunks of downloads.
            ended: told the number of each command that is over.
        """
        self.upload: Upload | None = None
        self.download: Download | None = None
        self.beside: DeviceTrace | None = None
        self._queue = queue
        self._runtime = runtime
        self._reply = reply
        self._outlet = outlet
        self._ended = ended

    def chunk(self, work: Chunk, data: memoryview) -> None:
        """Take a chunk of an upload.

        Raises:
            ProtocolError: it is not the next one.
        """
        upload = self.upload
        if upload is None or upload.transfer != work.transfer:
            # Chunks of a dropped upload may still be on their way.
            self._reply(Credit(self._queue, 1), None)
            return
        if work.offset != upload.received or upload.received + data.nbytes > upload.nbytes:
            raise ProtocolError(
                f"a chunk of {data.nbytes} bytes at {work.offset} does not continue upload {work.transfer}, "
                f"which has {upload.received} of {upload.nbytes} bytes"
            )
        if upload.target is not None:
            memory, offset = upload.target
            started = now()
            self._runtime.write(memory, offset + work.offset, data)
            self._note(SpanKind.UPLOAD, started, upload, data.nbytes)
        upload.received += data.nbytes
        self._reply(Credit(self._queue, 1), None)
        if upload.received == upload.nbytes:
            self._end_upload(upload)

    def abort_upload(self, transfer: int) -> None:
        """No more of an upload will come: the command counts as run."""
        if self.upload is not None and self.upload.transfer == transfer:
            self._end_upload(self.upload)

    def pump(self) -> bool:
        """Send what the credit allows of the download; whether it is over."""
        download = self.download
        assert download is not None
        while download.sent < download.nbytes:
            place = self._outlet.place()
            if place is None:
                return False
            nbytes = min(place.nbytes, download.nbytes - download.sent)
            started = now()
            self._runtime.read_into(download.memory, download.offset + download.sent, place[:nbytes])
            self._note(SpanKind.DOWNLOAD, started, download, nbytes)
            self._outlet.send(download.transfer, download.sent, nbytes)
            download.sent += nbytes
        self.end_download()
        return True

    def end_download(self) -> None:
        """Send no more of the download: the command counts as run."""
        assert self.download is not None
        number, self.download = self.download.number, None
        self._ended(number)

    def _end_upload(self, upload: Upload) -> None:
        self.upload = None
        self._ended(upload.number)

    def _note(self, kind: SpanKind, started: int, moved: Upload | Download, nbytes: int) -> None:
        trace = self.beside or self._runtime.trace
        if trace is not None:
            if self.beside is not None:
                trace.step = moved.step
            trace.add(kind, started, number=moved.number, nbytes=nbytes)
