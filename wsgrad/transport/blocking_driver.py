"""Drives a client's session over a plain socket for any number of threads; the session's meaning is not its business.

Whichever thread waits first leads: it polls the socket, without the lock, and works off what comes, for all. Others
wait for it, and one of them takes over when it leaves. A thread that only issues sends by itself what the socket takes
at once. What happens while nobody waits, and after a drop, is the business of `blocking_daemon`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

from wsgrad.errors import ConnectionLost, ProtocolError, WsgradError
from wsgrad.transport.blocking_daemon import Daemon
from wsgrad.transport.channel import Channel, Served
from wsgrad.transport.interrupts import Shield, raise_shield
from wsgrad.transport.timing import CLOSE_SECONDS, PASSING_CODES
from wsgrad.transport.wakeup import Poll, Wakeup

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from wsgrad.transport.frames import Closed
    from wsgrad.transport.waiting import Calls, Waited, Waiting

T = TypeVar("T")


class Driven(Served, Protocol):
    """The session, as far as it is driven. All but `wake` is called with the driver's lock held."""

    asleep: bool
    wake: Callable[[], None]

    @property
    def trace(self) -> Calls | None: ...
    @property
    def dirty(self) -> bool: ...
    @property
    def blocked(self) -> bool: ...
    @property
    def posted(self) -> bool: ...
    @property
    def attentive(self) -> bool: ...
    @property
    def over(self) -> bool: ...
    @property
    def grace_seconds(self) -> float: ...
    def detached(self) -> None: ...
    def end(self, error: WsgradError) -> None: ...
    def bye(self) -> None: ...
    def flush(self) -> None: ...
    def tell_seen(self) -> None: ...


class BlockingDriver:
    """One session's driver. Public methods may be called from any thread; the others with the lock held.

    Attributes:
        session: what is driven.
        peer: the server's address, for messages.
        dial: opens a connection within so many seconds.
        channel: the present connection, or None.
        reason: why there is none.
        lost_at: `time.monotonic()` of when it was lost.
        closing: `close` has begun.
        closed: nothing happens any more.
        abandoned: nobody can call any more.
        leader: the thread that polls the socket, or 0.
    """

    def __init__(self, session: Driven, dial: Callable[[float], tuple[socket.socket, bytes]], *, peer: str) -> None:
        self.session = session
        self.peer = peer
        self.dial = dial
        self.channel: Channel | None = None
        self.reason = ""
        self.lost_at = 0.0
        self.closing = False
        self.closed = False
        self.abandoned = False
        self.leader = 0
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        self._followers: list[threading.Lock] = []
        self._wakeup = Wakeup()
        self._wakeup_fd = self._wakeup.fileno()
        self._poll = Poll()
        self._polls_writing = False
        self._daemon = Daemon(self)
        session.wake = self._daemon.wake
        _drivers.add(self)

    # -- for callers --------------------------------------------------------------------------------------------------

    def open(self, timeout: float) -> None:
        """Connect and be welcomed.

        Raises:
            ConnectionRefusedError: nothing listens there.
            TimeoutError: it took longer than `timeout` seconds.
            WsgradError: the server refused.
        """
        deadline = time.monotonic() + timeout
        try:
            sock, leftover = self.dial(timeout)
            shield = raise_shield()
            try:
                with self._lock:
                    self.attach(sock, leftover)
                    self._until(_Welcomed(self), deadline, shield)
                    if self.session.refused is not None:
                        raise self.session.refused
                    if self.channel is None:
                        raise ConnectionLost(f"the connection to {self.peer} is lost: {self.reason}")
                    if not self.session.attached:
                        raise TimeoutError(f"{self.peer} did not welcome the session within {timeout:g} s")
            finally:
                if shield is not None:
                    shield.lower()
        except BaseException:
            self._shut(ConnectionLost("the session was never opened"))
            raise
        self._daemon.start()

    def call(self, issue: Callable[[], T]) -> T:
        """Issue something that nobody waits for; it is sent within about 1 ms."""
        trace = self.session.trace
        if trace is None:
            return self._call(issue)
        with trace.calling():
            return self._call(issue)

    def _call(self, issue: Callable[[], T]) -> T:
        shield = raise_shield()
        try:
            with self._entered(), self._lock:
                try:
                    return issue()
                finally:
                    if self.session.asleep:
                        self._daemon.wake()
        finally:
            if shield is not None:
                shield.lower()

    def run(self, start: Callable[[], Waited[T]], timeout: float | None = None) -> T:
        """Issue something and wait for it.

        Raises:
            TimeoutError: it took longer; it was withdrawn, and the session lives.
        """
        trace = self.session.trace
        if trace is None:
            return self._run(start, timeout)
        with trace.calling():
            return self._run(start, timeout)

    def _run(self, start: Callable[[], Waited[T]], timeout: float | None) -> T:
        deadline = None if timeout is None else time.monotonic() + timeout
        if deadline is not None and math.isnan(deadline):
            raise ValueError("timeout= is nan; give seconds, or None to wait without end")
        shield = raise_shield()
        try:
            with self._entered(waiting=True), self._lock:
                waited = start()
                self.session.flush()
                self.send()
                try:
                    self._until(waited, deadline, shield)
                finally:
                    expired = not waited.done
                    if expired:
                        waited.withdraw()
                        self.send()
                if expired:
                    raise TimeoutError(f"not done within {timeout:g} s; the wait was withdrawn, the session lives")
        finally:
            if shield is not None:
                shield.lower()
        return waited.result()

    def flush(self, flush: Callable[[], None]) -> None:
        """Send what `flush` makes, and take note of what the server has said meanwhile."""

        def issue() -> None:
            flush()
            self.send()
            if not self.leader:
                self.receive()
                self.send()

        self.call(issue)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the session: say bye, give the server a moment to answer, close. Idempotent."""
        shield = raise_shield()
        try:
            with self._entered(waiting=True), self._lock:
                if not self.closing and not self.closed and self.channel is not None and self.session.attached:
                    self.closing = True
                    self.session.flush()
                    self.session.bye()
                    self.send()
                    self._until(_Gone(self), time.monotonic() + timeout, shield)
        finally:
            try:
                self._shut(ConnectionLost("the session is closed: close() was called"))
            finally:
                if shield is not None:
                    shield.lower()

    def release(self) -> None:
        """Give back what is left once the daemon thread has ended after `abandon`."""
        self._wakeup.close()

    def abandon(self) -> None:
        """The last reference to the server object went: the daemon thread ends the session. Takes no lock."""
        self.abandoned = True
        self._daemon.wake()

    def _entered(self, *, waiting: bool = False) -> _Entered:
        # A signal handler or a __del__ that calls us while this very thread is inside would wait for itself: for the
        # lock, or for the leader that it interrupts.
        me = threading.get_ident()
        if me in self._inside or (waiting and self.leader == me):
            raise RuntimeError("wsgrad was called from a signal handler or finalizer that interrupted a wsgrad call")
        return _Entered(self._inside, me)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def unlocked(self, function: Callable[..., T], *arguments: object) -> T:
        """Do something that takes long without the lock."""
        me = threading.get_ident()
        entered = me in self._inside
        self._lock.release()
        self._inside.discard(me)
        try:
            return function(*arguments)
        finally:
            if entered:
                self._inside.add(me)
            self._lock.acquire()

    def _until(self, waiting: Waiting, deadline: float | None, shield: Shield | None) -> None:
        """Return when it is done or the deadline has passed. The lock is held at the start and at the end."""
        while not waiting.done:
            if shield is not None and shield.caught:
                self.unlocked(shield.deliver)
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            if self.leader or self.channel is None:
                self._follow(waiting, left, shield)
            else:
                self._lead(waiting, deadline, shield)

    def _lead(self, waiting: Waiting, deadline: float | None, shield: Shield | None) -> None:
        self.leader = threading.get_ident()
        wakeup, channel = self._wakeup, self.channel
        assert channel is not None
        poll = self._poll
        if shield is not None:
            shield.wake = wakeup.set
        try:
            while not waiting.done and self.channel is channel and (shield is None or not shield.caught):
                timeout = None if deadline is None else deadline - time.monotonic()
                if timeout is not None and timeout <= 0:
                    return
                if channel.stuck is not self._polls_writing:
                    self._polls_writing = channel.stuck
                    poll.watch(channel.fileno(), writing=channel.stuck)
                # Others can settle it only while the lock is free; what this thread settles itself it need not be told.
                waiting.notify = wakeup.set
                ready = self.unlocked(poll.wait, timeout)
                waiting.notify = None
                if self._wakeup_fd in ready:
                    wakeup.clear()
                if self.channel is channel:
                    self.receive()
                    if channel.loaded or channel.stuck:
                        self.send()
        finally:
            waiting.notify = None
            if shield is not None:
                shield.wake = None
            self.leader = 0
            if self._followers:
                _release(self._followers[0])  # it leads now
            elif self.session.attentive:
                self._daemon.wake()

    def _follow(self, waiting: Waiting, timeout: float | None, shield: Shield | None) -> None:
        waiter = threading.Lock()
        waiter.acquire()
        waiting.notify = lambda: _release(waiter)
        if shield is not None:
            shield.wake = waiting.notify
        self._followers.append(waiter)
        try:
            if shield is None or not shield.caught:
                self.unlocked(
                    lambda: waiter.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
                )
        finally:
            self._followers.remove(waiter)
            waiting.notify = None
            if shield is not None:
                shield.wake = None

    # -- the connection -----------------------------------------------------------------------------------------------

    def attach(self, sock: socket.socket, leftover: bytes) -> None:
        """A new connection is there: say hello over it."""
        channel = self.channel = Channel(sock, self.session)
        # For whoever leads: to make one for each wait would cost as much as polling.
        self._poll = Poll()
        self._poll.watch(self._wakeup_fd)
        self._poll.watch(channel.fileno())
        self._polls_writing = False
        self._guarded(lambda: channel.feed(leftover))
        self.send()

    def drop(self, reason: str) -> None:
        """The connection is gone; the session may go on over another one."""
        if self.channel is None:
            return
        self.channel.close()
        self.channel = None
        self.reason = reason
        self.lost_at = time.monotonic()
        self.session.detached()
        if self.leader:
            self._wakeup.set()
        self.wake_followers()
        self._daemon.wake()

    def end(self, error: WsgradError) -> None:
        """The session is over: whatever waits gets this error."""
        self.session.end(error)
        self.drop(str(error))
        self._daemon.wake()

    def send(self) -> None:
        """Send what the socket takes; the rest is sent by whoever polls it."""
        channel = self.channel
        if channel is not None:
            self._guarded(channel.send)
            if channel.stuck and self.leader and self.leader != threading.get_ident():
                self._wakeup.set()

    def receive(self) -> None:
        """Work off what has come."""
        channel = self.channel
        if channel is not None:
            self._guarded(channel.receive)

    def wake_followers(self) -> None:
        """There is a connection again, or there is none any more."""
        for waiter in self._followers:
            _release(waiter)

    def _guarded(self, work: Callable[[], Closed | None]) -> None:
        """Do I/O; what it can't survive closes the connection, so that nothing half sent or half received goes on."""
        try:
            closed = work()
        except ProtocolError as exc:
            if self.channel is not None:
                self.channel.last_words(exc.close_code, str(exc))
            self.end(exc)
        except OSError as exc:
            self.drop(f"the connection broke: {exc.strerror or exc}")
        except BaseException:
            self.drop("a call was interrupted while it sent or received")
            raise
        else:
            if self.session.refused is not None:
                self.end(self.session.refused)
            elif closed is not None:
                self._closed_by_peer(closed)

    def _closed_by_peer(self, closed: Closed) -> None:
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send()  # the answer to its close frame
        said = f"the server closed the connection ({closed.code}): {closed.reason or 'no reason given'}"
        if self.closing or closed.code in PASSING_CODES:
            self.drop(closed.reason if closed.code == 1006 else said)
        else:
            self.end(ConnectionLost(f"the connection to {self.peer} is lost: {said}"))

    def _shut(self, error: WsgradError) -> None:
        with self._lock:
            self.closed = True
            self.end(error)
        if self._daemon.join(CLOSE_SECONDS):
            self._wakeup.close()

    def _forked(self) -> None:
        """In a forked child: the connection belongs to the parent, whose threads are not here."""
        self._lock = threading.Lock()
        self.leader = 0
        self._inside = set()
        self._followers = []
        self.closed = True
        self._daemon.close()
        self._wakeup.close()
        if self.channel is not None:
            # Only this process's descriptor goes: to shut the connection down would cut the parent's.
            os.close(self.channel.detach())
            self.channel = None
        self.session.end(
            WsgradError(
                f"this server object belongs to process {os.getppid()}, which forked this one; "
                "call wsgrad.connect() again in the child process"
            )
        )


class _Entered:
    """Notes that a thread is inside; noted before it takes the lock, and until after it has given it back."""

    __slots__ = ("_inside", "_me")

    def __init__(self, inside: set[int], me: int) -> None:
        self._inside = inside
        self._me = me

    def __enter__(self) -> None:
        self._inside.add(self._me)

    def __exit__(self, *exc: object) -> None:
        self._inside.discard(self._me)


class _Welcomed:
    """Done when the server has welcomed or refused the session, or when there is no connection any more."""

    notify: Callable[[], object] | None = None

    def __init__(self, driver: BlockingDriver) -> None:
        self._driver = driver

    @property
    def done(self) -> bool:
        return self._driver.session.attached or self._driver.channel is None


class _Gone:
    """Done when there is no connection any more."""

    notify: Callable[[], object] | None = None

    def __init__(self, driver: BlockingDriver) -> None:
        self._driver = driver

    @property
    def done(self) -> bool:
        return self._driver.channel is None


def _release(waiter: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it was woken already
        waiter.release()


_drivers: weakref.WeakSet[BlockingDriver] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in list(_drivers):
        driver._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
