"""The one thread of a blocking session that works while no caller waits; it issues nothing of its own.

It sends after 1 ms what was issued, looks at the socket about every second, or at once where another session needs what
comes, keeps the heartbeats, connects again after a drop within the grace time, and says bye for a server object that
was dropped without being closed.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import TYPE_CHECKING

from wsgrad.errors import ConnectionLost, Unauthorized, WsgradError
from wsgrad.transport.timing import (
    DEAD_SECONDS,
    DIAL_SECONDS,
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    PING_SECONDS,
    REFUSED_SECONDS,
)
from wsgrad.transport.wakeup import Poll, Wakeup

if TYPE_CHECKING:
    from wsgrad.transport.blocking_driver import BlockingDriver

_TICK_SECONDS = 1.0
_FLUSH_SECONDS = 0.001
# After something was issued it looks this often, each after 1 ms, before callers must wake it again. A look takes the
# interpreter from whoever computes: with 20 tinygrad programs were up to a tenth slower, launches no quicker.
_AWAKE_ROUNDS = 2
_EXIT_SECONDS = 1.0


class Daemon:
    """Owned by the driver, whose lock it holds except while it waits."""

    def __init__(self, driver: BlockingDriver) -> None:
        self._driver = driver
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None
        self._quiet = _AWAKE_ROUNDS
        self._next_tick = 0.0

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="wsgrad", daemon=True)
        self._thread.start()
        _running.add(self)
        global _registered
        if not _registered:
            _registered = True
            atexit.register(_at_exit)

    def wake(self) -> None:
        """There is something to do. Takes no lock and may be called from anywhere."""
        self._driver.session.asleep = False
        self._wakeup.set()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end, once the driver is closed; returns whether it has ended."""
        thread = self._thread
        self._wakeup.set()
        if thread is threading.current_thread():
            return False
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
        self.close()
        return True

    def close(self) -> None:
        """Give the descriptors back."""
        self._wakeup.close()

    def abandon(self) -> None:
        """The process ends: say bye, and give it a moment."""
        self._driver.abandon()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)

    def _run(self) -> None:
        driver, session = self._driver, self._driver.session
        poll = Poll()
        poll.watch(self._wakeup.fileno())
        with driver._lock:
            while not (driver.closed or driver.closing or session.over):
                if driver.abandoned:
                    self._say_bye()
                elif driver.channel is None:
                    self._reconnect()
                else:
                    self._look()
                    self._sleep(poll)
        if driver.abandoned:  # nobody is left to join this thread
            self.close()
            driver.release()

    def _look(self) -> None:
        driver, session = self._driver, self._driver.session
        if self._quiet < _AWAKE_ROUNDS and session.dirty:
            session.flush()
            self._quiet = 0
        now = time.monotonic()
        due = now >= self._next_tick
        stuck = driver.channel is not None and driver.channel.stuck
        if not driver.leader and (due or session.blocked or session.attentive or stuck):
            driver.receive()
        if due:
            self._next_tick = now + _TICK_SECONDS
            self._tick(now)
        driver.send()
        self._quiet += 1

    def _tick(self, now: float) -> None:
        """About once a second: heartbeats, what the server may forget, and frees."""
        driver, channel = self._driver, self._driver.channel
        if channel is None:
            return
        silence = now - channel.last_received
        if silence > DEAD_SECONDS:
            driver.drop(f"nothing was received for {silence:.0f} s")
            return
        if silence > PING_SECONDS and not channel.pinged and driver.session.attached:
            channel.ping()
        driver.session.tell_seen()
        driver.session.flush()

    def _sleep(self, poll: Poll) -> None:
        driver, session, channel = self._driver, self._driver.session, self._driver.channel
        if channel is None:
            return
        asleep = self._quiet >= _AWAKE_ROUNDS
        if asleep:
            session.asleep = True
            # A launch that came just before saw that it need not wake us.
            if session.dirty:
                asleep = session.asleep = False
                self._quiet = 0
        seconds = max(0.0, self._next_tick - time.monotonic()) if asleep else _FLUSH_SECONDS
        fd = -1
        if not driver.leader and (session.blocked or session.attentive or channel.stuck):
            fd = channel.fileno()
            poll.watch(fd, writing=channel.stuck)
        ready = driver.unlocked(poll.wait, seconds)
        if fd >= 0:
            poll.forget(fd)
        session.asleep = False
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
            if asleep and not session.posted:
                # What was just issued waits a moment for company.
                driver.unlocked(time.sleep, _FLUSH_SECONDS)
            self._quiet = 0

    def _reconnect(self) -> None:
        """Connect once more, or end the session where that is hopeless."""
        driver, session = self._driver, self._driver.session
        lost_at = driver.lost_at
        over_at = lost_at + session.grace_seconds
        pause = FIRST_RETRY_SECONDS
        lost = f"the connection to {driver.peer} is lost: {driver.reason}"
        while not (driver.closed or driver.closing or driver.abandoned or session.over):
            left = over_at - time.monotonic()
            if left <= 0:
                driver.end(ConnectionLost(f"{lost}; no new one within {session.grace_seconds:g} s"))
                return
            try:
                sock, leftover = driver.unlocked(driver.dial, min(left, DIAL_SECONDS))
            except ConnectionRefusedError:
                if time.monotonic() - lost_at >= REFUSED_SECONDS:
                    driver.end(ConnectionLost(f"{lost}; nothing listens there now"))
                    return
            except Unauthorized as exc:
                driver.end(exc)
                return
            except (OSError, WsgradError):
                pass
            else:
                if driver.closed or session.over:
                    sock.close()
                    return
                driver.attach(sock, leftover)
                self._await_welcome()
                if driver.channel is not None:
                    driver.wake_followers()
                    return
                driver.lost_at = lost_at  # it did not come far: the grace time runs on
                if session.over:
                    return
            driver.unlocked(time.sleep, pause)
            pause = min(pause * 2, LAST_RETRY_SECONDS)

    def _await_welcome(self) -> None:
        """Work off a new connection until it is welcomed or gone."""
        driver = self._driver
        give_up = time.monotonic() + DIAL_SECONDS
        while (channel := driver.channel) is not None and not driver.session.attached:
            left = give_up - time.monotonic()
            if left <= 0 or driver.closing:
                driver.drop("the server did not welcome the session back")
                return
            poll = Poll()
            poll.watch(self._wakeup.fileno())
            poll.watch(channel.fileno(), writing=channel.stuck)
            if self._wakeup.fileno() in driver.unlocked(poll.wait, left):
                self._wakeup.clear()
            driver.receive()
            driver.send()

    def _say_bye(self) -> None:
        """The server object is gone: end the session without waiting for anything."""
        driver, session = self._driver, self._driver.session
        if driver.channel is not None and session.attached:
            session.flush()
            session.bye()
            driver.send()
        driver.closed = True
        driver.end(ConnectionLost("the session is closed: its server object is gone"))


_running: weakref.WeakSet[Daemon] = weakref.WeakSet()
_registered = False


def _at_exit() -> None:
    for daemon in list(_running):
        daemon.abandon()
