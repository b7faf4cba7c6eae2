"""What a client sends of transfers that are under way: chunks of uploads, and aborts. Commands are not its business."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wsgrad.transport import cbor
from wsgrad.transport.messages import message_array

if TYPE_CHECKING:
    from wsgrad.server.queue import Queue
    from wsgrad.transport.messages import Abort, Chunk


def take_chunk(queue: Queue, message: Chunk, bulk: memoryview) -> None:
    """A chunk of an upload has come, in its turn.

    Raises:
        ProtocolError: it is not the one that comes next.
    """
    upload = queue._in.chunk(message, len(bulk))
    queue.session.upload_rate.take(len(bulk))
    queue.session.statistics.uploaded += len(bulk)
    if upload.refused or queue._port is None:
        queue._feed.take_back()
        queue._in.give_credit(1)
        return
    if upload.number:
        in_place = queue._feed.take_back()
        if not queue._cached.chunk(message.transfer, memoryview(bytes(bulk)) if in_place else bulk):
            queue._in.give_credit(1)
        return
    queue._cached.check_chunk(message.transfer)
    queue._feed.add_piece(message.transfer, message.offset, bulk)


def take_abort(queue: Queue, message: Abort) -> None:
    """The client gives up an upload, or wants no more of a download."""
    upload = queue._in.upload
    queue._in.give_up(message.transfer)
    if queue._cached.abort(message.transfer):
        pass
    elif upload is not None and upload.transfer == message.transfer:
        queue._in.upload = None
        if not upload.refused and queue._port is not None:
            queue._feed.add(message)
    elif queue._port is not None and (download := queue._out.abort(message.transfer)) is not None:
        if download.number <= queue._out.sent:
            # It must not wait behind later commands: the node may be waiting for credit for this very transfer.
            queue._port.send(cbor.encode(message_array(message)))
        else:
            queue._feed.add(message)
