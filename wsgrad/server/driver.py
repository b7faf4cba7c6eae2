"""A queue's node process for a device with a driver: it is started anew and compiles programs itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wsgrad.devices import elf
from wsgrad.server.local import LocalPort
from wsgrad.transport import cbor
from wsgrad.transport.messages import message_array

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    import trio

    from wsgrad.server.limits import Limits
    from wsgrad.server.port import Owner
    from wsgrad.server.zygote import NodeProcess, Zygote
    from wsgrad.transport.messages import Program


class DriverPort(LocalPort):
    """Like a cpu device's, but for the process and the programs."""

    def __init__(
        self,
        owner: Owner,
        zygote: Zygote,
        limits: Limits,
        *,
        kind: str,
        place: str,
        index: int,
        session: int,
        start: Callable[[Callable[[], Awaitable[None]]], None],
        room: trio.Semaphore,
    ) -> None:
        """Make one.

        Args:
            place: the device's place among those of its driver.
            index: its place among this server's.
        """
        self._kind = kind
        self._place = place
        super().__init__(owner, zygote, limits, index=index, session=session, threads=1, start=start, room=room)

    @property
    def compiles(self) -> bool:
        return True

    def send_program(self, message: Program, source: memoryview) -> None:
        # A packet does not hold the longest sources.
        self._write([cbor.encode(message_array(message))], elf.memfd(bytes(source)))

    async def _spawn(self, control: socket.socket, ring_fd: int) -> NodeProcess:
        return await self._zygote.spawn_driver(control, ring_fd, self._kind, self._place)
