"""The blocking driver over real sockets against a scripted server end: who leads, what is sent, how it all ends."""

import errno
import socket
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from wsgrad.client.arrays import sink_of
from wsgrad.client.core import Session
from wsgrad.errors import ConnectionLost, ProtocolError, Unauthorized
from wsgrad.transport import blocking_daemon
from wsgrad.transport.blocking_driver import BlockingDriver
from wsgrad.transport.cbor import encode
from wsgrad.transport.commands import Alloc
from wsgrad.transport.connection import Connection, Received
from wsgrad.transport.messages import (
    BULK_KINDS,
    Ack,
    Batch,
    Bye,
    Hello,
    Launches,
    Open,
    Ping,
    Pong,
    ReadData,
    Refused,
    Welcome,
    message_array,
    parse_message,
)

if TYPE_CHECKING:
    from wsgrad.transport.frames import Closed

KEY = bytes(16)


class Peer:
    """The server's end of each connection, spoken by the test itself."""

    def __init__(self, *, grace: float = 60.0) -> None:
        self.grace = grace
        self.dialled = threading.Semaphore(0)
        self.ends: list[socket.socket] = []
        self.refusal: BaseException | None = None
        self.seen = 0

    def dial(self, timeout):
        if self.refusal is not None:
            raise self.refusal
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.settimeout(10)
        self.ends.append(ours)
        self.dialled.release()
        return theirs, b""

    def accept(self, *, welcome=True):
        assert self.dialled.acquire(timeout=10)
        self.sock = self.ends[-1]
        self.connection = Connection(client=False, bulk_kinds=BULK_KINDS)
        self.events: list[Received | Closed] = []
        hello = self.hear()
        assert isinstance(hello, Hello)
        if welcome:
            self.say(Welcome(1, KEY, self.seen, {"devices": [], "limits": {"resume_grace": self.grace}}))
        return hello

    def say(self, message, bulk=None):
        for part in self.connection.encode(encode(message_array(message)), bulk):
            self.sock.sendall(part)

    def hear_event(self):
        while not self.events:
            data = self.sock.recv(1 << 16)
            self.events += self.connection.feed(data) if data else self.connection.eof()
        event = self.events.pop(0)
        if isinstance(event, Received) and event.head[0] >= 16:
            self.seen += 1
        return event

    def hear(self):
        event = self.hear_event()
        assert isinstance(event, Received), event
        self.bulk = event.bulk
        return parse_message(event.head)

    def close(self):
        for end in self.ends:
            end.close()


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.close()


def in_thread(function):
    """Run it, and return a function that waits for its result or error."""
    outcome = []

    def work():
        try:
            outcome.append((function(), None))
        except BaseException as exc:
            outcome.append((None, exc))

    thread = threading.Thread(target=work)
    thread.start()

    def join():
        thread.join(20)
        assert not thread.is_alive()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return join


@pytest.fixture
def driver(peer):
    driver = BlockingDriver(Session(agent="test"), peer.dial, peer="peer")
    opened = in_thread(lambda: driver.open(10))
    peer.accept()
    opened()
    yield driver
    driver.close(0.01)


@pytest.fixture
def queue(driver, peer):
    queue = driver.call(lambda: driver.session.open_queue("n/cpu/0"))
    driver.flush(lambda: None)
    assert peer.hear() == Open(0, "n/cpu/0", {})
    return queue


def read(queue, count=4):
    target = np.zeros(count, np.uint8)
    return queue.read(0, count, sink_of(target), lambda _: bytes(target))


def test_a_call_waits_for_its_answer(driver, peer, queue):
    reading = in_thread(lambda: driver.run(lambda: read(queue)))
    assert isinstance(peer.hear(), Batch)
    peer.say(ReadData(0, 1, 1), b"abcd")
    assert reading() == b"abcd"


def test_what_was_issued_is_sent_soon_without_anybody_waiting(driver, peer, queue):
    driver.call(lambda: queue.command(Alloc(0, 4)))
    assert peer.hear().commands == [[1, 0, 4]]
    for n in range(5):
        queue.launches.append(bytes(8))
        if driver.session.asleep:
            driver.session.wake()
        message = peer.hear()
        assert isinstance(message, Launches)
        assert message.first == 2 + n


def test_threads_get_their_own_answers_in_whatever_order(driver, peer, queue):
    readings = []
    for _ in range(6):
        readings.append(in_thread(lambda: driver.run(lambda: read(queue))))
        peer.hear()
    for number in (1, 2, 3, 4, 5, 6):
        peer.say(ReadData(0, number, number), bytes([number] * 4))
    assert sorted(reading() for reading in readings) == [bytes([n] * 4) for n in range(1, 7)]


def test_when_the_thread_that_leads_gives_up_another_leads(driver, peer, queue):
    first = in_thread(lambda: driver.run(lambda: read(queue), 0.2))
    peer.hear()
    second = in_thread(lambda: driver.run(lambda: read(queue)))
    peer.hear()
    with pytest.raises(TimeoutError):
        first()
    peer.say(ReadData(0, 1, 1), b"late")
    peer.say(ReadData(0, 2, 2), b"good")
    assert second() == b"good"


def test_a_socket_that_takes_little_at_a_time_gets_whole_frames(driver, peer, queue):
    data = np.random.default_rng(0).integers(0, 256, 60_000, np.uint8).tobytes()
    peer.ends[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def issue():
        for start in range(0, len(data), 30_000):
            queue.write(0, memoryview(data)[start : start + 30_000])

    for _ in range(20):
        driver.call(issue)
    waiting = in_thread(lambda: driver.run(queue.synchronize))
    heard = b""
    while len(heard) < 20 * len(data):
        message = peer.hear()
        if isinstance(message, Ping):  # it may take so long that the driver asks whether its peer is still there
            peer.say(Pong(message.token))
        else:
            heard += b"".join(command[3] for command in message.commands)
    assert heard == data * 20
    peer.say(Ack(0, 40))
    waiting()


def test_heartbeats_are_answered_and_sent_and_a_silent_server_is_left(peer, monkeypatch):
    monkeypatch.setattr(blocking_daemon, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(blocking_daemon, "PING_SECONDS", 0.1)
    monkeypatch.setattr(blocking_daemon, "DEAD_SECONDS", 0.4)
    driver = BlockingDriver(Session(agent="test"), peer.dial, peer="peer")
    opened = in_thread(lambda: driver.open(10))
    peer.accept()
    opened()
    peer.say(Ping(77))
    assert peer.hear() == Pong(77)
    for _ in range(2):
        ping = peer.hear()
        assert isinstance(ping, Ping)
        peer.say(Pong(ping.token))
    hello = peer.accept()  # this time it was answered too late
    assert hello.key == KEY
    driver.close(0.01)


def test_a_broken_rule_is_answered_with_its_close_code_and_said_to_every_caller(driver, peer, queue):
    readings = [in_thread(lambda: driver.run(lambda: read(queue))) for _ in range(2)]
    peer.hear()
    peer.hear()
    peer.say(ReadData(0, 1, 1), b"too much")
    for reading in readings:
        with pytest.raises(ProtocolError, match="answered with 8"):
            reading()
    closed = peer.hear_event()
    assert closed.code == 1002
    assert "answered with 8" in closed.reason
    with pytest.raises(ProtocolError, match="answered with 8"):
        driver.run(lambda: driver.session.check() or read(queue))


def test_a_refused_session_is_said_by_its_name(peer):
    driver = BlockingDriver(Session(agent="test"), peer.dial, peer="peer")
    opened = in_thread(lambda: driver.open(10))
    peer.accept(welcome=False)
    peer.say(Refused("Unauthorized", "the token was revoked"))
    with pytest.raises(Unauthorized, match="revoked"):
        opened()


def test_a_session_is_resumed_with_its_key_and_counts(driver, peer, queue):
    reading = in_thread(lambda: driver.run(lambda: read(queue)))
    peer.hear()
    peer.say(Ack(0, 0))
    peer.sock.close()
    hello = peer.accept()
    assert hello.key == KEY
    assert hello.received in (0, 1)
    peer.say(ReadData(0, 1, 1), b"here")
    assert reading() == b"here"


def test_a_new_connection_is_tried_until_the_grace_time_is_over():
    peer = Peer(grace=0.3)
    driver = BlockingDriver(Session(agent="test"), peer.dial, peer="peer")
    opened = in_thread(lambda: driver.open(10))
    peer.accept()
    opened()
    peer.refusal = OSError(errno.ENETUNREACH, "network is unreachable")
    start = time.monotonic()
    peer.sock.close()
    with pytest.raises(ConnectionLost, match=r"no new one within 0\.3 s"):
        driver.run(lambda: driver.session.when(lambda: False))
    assert 0.25 < time.monotonic() - start < 5
    driver.close()
    peer.close()


@pytest.mark.parametrize(
    ("refusal", "error", "text"),
    [
        (ConnectionRefusedError(), ConnectionLost, "nothing listens there"),
        (Unauthorized("wrong token"), Unauthorized, "wrong token"),
    ],
    ids=["nobody there", "not let in"],
)
def test_what_is_hopeless_is_not_waited_for(driver, peer, refusal, error, text):
    peer.refusal = refusal
    waiting = in_thread(lambda: driver.run(lambda: driver.session.when(lambda: False)))
    peer.sock.close()
    with pytest.raises(error, match=text):
        waiting()


def test_an_unknown_session_is_lost_at_once(driver, peer):
    waiting = in_thread(lambda: driver.run(lambda: driver.session.when(lambda: False)))
    peer.sock.close()
    peer.accept(welcome=False)
    peer.say(Refused("ConnectionLost", "there is no such session"))
    with pytest.raises(ConnectionLost, match="no such session"):
        waiting()


@pytest.mark.parametrize("code", [1000, 1002, 1008, 4000])
def test_a_server_that_closes_on_purpose_has_ended_the_session(driver, peer, code):
    waiting = in_thread(lambda: driver.run(lambda: driver.session.when(lambda: False)))
    peer.sock.sendall(peer.connection.close(code, "because"))
    with pytest.raises(ConnectionLost, match=rf"\({code}\): because"):
        waiting()


def test_closing_says_bye_and_waits_for_the_servers_answer(driver, peer, queue):
    driver.call(lambda: queue.command(Alloc(0, 4)))
    closing = in_thread(lambda: driver.close(10))
    assert isinstance(peer.hear(), Batch)
    assert peer.hear() == Bye()
    peer.sock.sendall(peer.connection.close(1000, ""))
    closing()
    assert peer.hear_event().code in (1000, 1006)
    with pytest.raises(ConnectionLost, match="closed"):
        driver.run(lambda: driver.session.check() or queue.synchronize())
    driver.close()


def test_an_abandoned_driver_says_bye(driver, peer):
    driver.abandon()
    assert peer.hear() == Bye()


def test_a_server_that_does_not_answer_good_bye_is_not_waited_for_long(driver, peer):
    start = time.monotonic()
    driver.close(0.1)
    assert time.monotonic() - start < 1.5
