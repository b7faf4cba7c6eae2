"""Drives a client's session in a trio program: connects, runs the connection, connects again, flushes after 1 ms.

One background task owns the connection; callers issue and wait in their own tasks. Nothing here knows what is issued.

Ctrl-C must not raise between two steps that belong together, so whatever changes a session or a connection runs with
trio's KeyboardInterrupt protection: trio then raises it in the program's main task, where that one waits next.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, TypeVar

import trio

from wsgrad.errors import ConnectionLost, ProtocolError, Unauthorized, WsgradError
from wsgrad.transport import express
from wsgrad.transport.connection import Connection
from wsgrad.transport.handshake_trio import open_websocket
from wsgrad.transport.messages import BULK_KINDS, SUBPROTOCOL
from wsgrad.transport.timing import (
    CLOSE_SECONDS,
    DIAL_SECONDS,
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    PASSING_CODES,
    REFUSED_SECONDS,
)
from wsgrad.transport.tls import check_fingerprint, client_ssl_context, why_no_tls
from wsgrad.transport.trio_driver import TrioConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.client.core import Session
    from wsgrad.client.target import Target
    from wsgrad.client.waits import Wait
    from wsgrad.transport.connection import Received
    from wsgrad.transport.frames import Closed

T = TypeVar("T")

_TICK_SECONDS = 1.0
_FLUSH_SECONDS = 0.001
_AWAKE_ROUNDS = 20


class AsyncDriver:
    """One session's driver. `run` is its lifetime."""

    def __init__(self, session: Session, target: Target, *, route: str) -> None:
        self.session = session
        self.opened = trio.Event()
        """Set once the first connection was welcomed, or failed: then `session` is over or `error` says why."""
        self.error: Exception | None = None
        self._target = target
        self._route = route
        self._connection: TrioConnection | None = None
        self._closing = False
        self._lost_at: float | None = None
        """When the last connection that was welcomed ended; None while there is one."""
        self._pause = FIRST_RETRY_SECONDS
        self._gone = trio.Event()
        # Where the caller's scope is cancelled, the connection must live on until good-bye is said.
        self._life = trio.CancelScope(shield=True)
        self._work = trio.Event()
        session.wake = self._wake

    # -- for callers --------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    def call(self, issue: Callable[[], T]) -> T:
        """Issue something that nobody waits for; it is sent within about 1 ms."""
        trace = self.session.trace
        if trace is None:
            return self._call(issue)
        with trace.calling():
            return self._call(issue)

    def _call(self, issue: Callable[[], T]) -> T:
        try:
            return issue()
        finally:
            if self.session.asleep:
                self._wake()

    @trio.lowlevel.enable_ki_protection
    async def wait(self, start: Callable[[], Wait[T]]) -> T:
        """Issue something and wait for it. Cancelled before it has issued anything, or withdrawn."""
        trace = self.session.trace
        if trace is None:
            return await self._wait(start)
        with trace.calling():
            return await self._wait(start)

    async def _wait(self, start: Callable[[], Wait[T]]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        wait = start()
        self.session.flush()
        self.send()
        if wait.done:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return wait.result()
        event = trio.Event()
        wait.notify = event.set
        try:
            await event.wait()
        finally:
            wait.notify = None
            if not wait.done:
                wait.withdraw()
                self.send()
        return wait.result()

    @trio.lowlevel.enable_ki_protection
    def send(self) -> None:
        """Send what the link holds, as far as the socket takes it."""
        if self._connection is not None and self.session.attached:
            self._connection.wake()

    @trio.lowlevel.enable_ki_protection
    async def close(self) -> None:
        """Say bye, wait a moment for the server's answer, end `run`. Idempotent; closes even when cancelled."""
        try:
            if not self._closing:
                self._closing = True
                if self._connection is not None and self.session.attached:
                    self.session.flush()
                    self.session.bye()
                    self.send()
                    with trio.move_on_after(CLOSE_SECONDS, shield=True):
                        await self._gone.wait()
        finally:  # Ctrl-C ends that wait, shielded or not
            self.session.end(ConnectionLost("the session is closed: its `async with` has ended"))
            self._life.cancel()

    def _wake(self) -> None:
        self.session.asleep = False
        self._work.set()

    # -- the background task ------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Connect, and stay connected, until the session is over or `close` is called, whatever else is cancelled."""
        try:
            with self._life:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._flush_after_a_while)
                    nursery.start_soon(self._tick)
                    await self._stay_connected()
                    nursery.cancel_scope.cancel()
        finally:
            self._gone.set()
            self.opened.set()

    async def _stay_connected(self) -> None:
        session = self.session
        try:
            connection, hello = await self._dial()
        except (OSError, WsgradError) as exc:
            self.error = exc
            session.end(exc if isinstance(exc, WsgradError) else ConnectionLost(str(exc)))
            return
        while True:
            reason = await self._serve(connection, hello)
            if session.over or self._closing:
                return
            again = await self._dial_again(reason)
            if again is None:
                return
            connection, hello = again

    async def _serve(self, driven: TrioConnection, hello: bytes) -> str:
        """Run one connection to its end; returns why it ended, if the session is not over with it."""
        session = self.session

        def handle(received: Received) -> None:
            session.handle(received)
            if session.refused is not None:
                session.end(session.refused)
                driven.close(1000, "")
            elif driven.link is None and session.attached:
                driven.link = session.link
                self._lost_at = None
                self.opened.set()

        self._connection = driven
        driven.send(hello)
        closed: Closed | None = None
        try:
            closed = await driven.run(handle)
        except ProtocolError as exc:
            session.end(exc)
        finally:
            self._connection = None
            session.detached()
        if closed is None or session.over or self._closing:
            return ""
        if closed.code in PASSING_CODES:
            return closed.reason or "it ended"
        reason = f"the server closed the connection ({closed.code}): {closed.reason or 'no reason given'}"
        session.end(ConnectionLost(f"the connection to {self._target.endpoint.url} is lost: {reason}"))
        return ""

    async def _dial_again(self, reason: str) -> tuple[TrioConnection, bytes] | None:
        """Connect within the grace time, or end the session where that is hopeless."""
        session = self.session
        lost = f"the connection to {self._target.endpoint.url} is lost: {reason}"
        welcomed = self._lost_at is None
        if self._lost_at is None:
            self._lost_at, self._pause = trio.current_time(), FIRST_RETRY_SECONDS
        with trio.move_on_at(self._lost_at + session.grace_seconds):
            if not welcomed:
                await self._sleep()
            while not self._closing:
                try:
                    return await self._dial()
                except ConnectionRefusedError:
                    if trio.current_time() - self._lost_at >= REFUSED_SECONDS:
                        session.end(ConnectionLost(f"{lost}; nothing listens there now"))
                        return None
                    await self._sleep()
                except Unauthorized as exc:
                    session.end(exc)
                    return None
                except (OSError, WsgradError):
                    await self._sleep()
            return None
        session.end(ConnectionLost(f"{lost}; no new one within {session.grace_seconds:g} s"))
        return None

    async def _sleep(self) -> None:
        """Pause between tries, longer each time."""
        pause, self._pause = self._pause, min(self._pause * 2, LAST_RETRY_SECONDS)
        await trio.sleep(pause)

    async def _dial(self) -> tuple[TrioConnection, bytes]:
        with trio.move_on_after(DIAL_SECONDS):
            return await self._open()
        raise TimeoutError(f"no connection to {self._target.endpoint.url} within {DIAL_SECONDS:g} s")

    async def _open(self) -> tuple[TrioConnection, bytes]:
        endpoint, token = self._target.endpoint, self._target.token
        try:
            tcp = await trio.open_tcp_stream(endpoint.host, endpoint.port)
        except OSError as exc:
            if _all_refused(exc):
                raise ConnectionRefusedError(f"no server at {endpoint.url}: the connection was refused") from exc
            raise ConnectionLost(f"no connection to {endpoint.url}: {exc}") from exc
        stream: trio.abc.Stream = tcp
        try:
            tcp.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
            if endpoint.tls:
                stream = await self._encrypt(tcp)
            leftover = await open_websocket(
                stream,
                host=endpoint.authority,
                path=endpoint.target(self._route),
                headers=[] if token is None else [("Authorization", f"Bearer {token}")],
                subprotocols=[SUBPROTOCOL],
            )
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        connection = Connection(
            client=True,
            bulk_kinds=BULK_KINDS,
            destination=self.session.destination,
            shortcut=express.received,
        )
        hello = self.session.hello()
        self.session.release = connection.release
        return TrioConnection(stream, connection, leftover=leftover, peer=endpoint.url), hello

    async def _encrypt(self, tcp: trio.SocketStream) -> trio.abc.Stream:
        endpoint = self._target.endpoint
        context = client_ssl_context(fingerprint=endpoint.sha256, cafile=self._target.cafile)
        stream = trio.SSLStream(tcp, context, server_hostname=endpoint.host, https_compatible=True)
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError as exc:
            cause = exc.__cause__
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise Unauthorized(
                    f"the certificate of {endpoint.url} is not trusted: {cause.verify_message}; give its fingerprint "
                    "(#sha256=…, as the server prints it) or cafile="
                ) from exc
            raise ConnectionLost(f"no encrypted connection to {endpoint.url}: {why_no_tls(cause or exc)}") from exc
        if endpoint.sha256 is not None:
            check_fingerprint(stream.getpeercert(binary_form=True), endpoint.sha256)
        return stream

    @trio.lowlevel.enable_ki_protection
    async def _flush_after_a_while(self) -> None:
        session, quiet = self.session, _AWAKE_ROUNDS
        while True:
            if quiet >= _AWAKE_ROUNDS:
                session.asleep = True
                self._work = trio.Event()
                await self._work.wait()
                session.asleep = False
                quiet = 0
            if not session.posted:
                await trio.sleep(_FLUSH_SECONDS)
            quiet += 1
            if session.dirty and not session.over:
                session.flush()
                self.send()
                quiet = 0

    @trio.lowlevel.enable_ki_protection
    async def _tick(self) -> None:
        while True:
            await trio.sleep(_TICK_SECONDS)
            if self.session.attached:
                self.session.tell_seen()
                self.session.flush()
                self.send()


def _all_refused(exc: BaseException) -> bool:
    """Whether every address of a host refused the connection."""
    if isinstance(exc, BaseExceptionGroup):
        return all(_all_refused(inner) for inner in exc.exceptions)
    if isinstance(exc, ConnectionRefusedError):
        return True
    return exc.__cause__ is not None and _all_refused(exc.__cause__)
