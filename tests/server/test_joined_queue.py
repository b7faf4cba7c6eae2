"""What a node process says to a machine that joined a hub: nothing that was not asked for gets through to the hub."""

import pytest

from wsgrad.errors import ProtocolError
from wsgrad.graph.items import Device, Launch, Operand, Range, Transfer
from wsgrad.graph.part import part_array
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording
from wsgrad.server.joined import JoinedQueue, Session
from wsgrad.server.outstanding import InvalidReply
from wsgrad.server.port import Loss, Port
from wsgrad.transport import commands as c
from wsgrad.transport import messages as m
from wsgrad.transport.cbor import decode, encode
from wsgrad.transport.tracing import RECORD

QUEUE = 3


class Uplink:
    paused = False

    def __init__(self):
        self.said = []

    def push(self, head, bulk=None):
        self.said.append((m.parse_message(decode(head)), bulk))

    def hold_back(self):
        pass

    def let_go(self):
        pass


class FakePort(Port):
    """Stands for a node process with a ring; keeps what it is sent."""

    full = False
    compiles = True

    def __init__(self, owner):
        super().__init__(owner, owner.number)
        self.sent = []
        self.ring = memoryview(bytearray(1 << 20))

    def next_slot(self):
        return None

    def send_program(self, message, source):
        self.sent.append((message, source))

    def download_slot(self, message, chunk):
        return self.ring[: message.nbytes]

    def _keep(self, slot, bulk, *, owned):
        return bulk

    def _send_slot(self, transfer, offset, slot, bulk):
        self.sent.append((m.Slot(self.number, transfer, offset, slot, len(bulk)), bulk))

    def _send(self, head, bulk):
        self.sent.append((m.parse_message(decode(head)), bulk))

    def _end(self):
        pass


class Rig:
    def __init__(self):
        self.uplink = Uplink()
        self.queue = JoinedQueue(m.Attach(QUEUE, 1, 0, {}), self.uplink, Session(1, lambda task: None), None)
        self.port = self.queue.port = FakePort(self.queue)

    def hub(self, message, bulk=None):
        self.queue.submit(message, encode(m.message_array(message)), bulk)

    def batch(self, first, *commands):
        self.hub(m.Batch(QUEUE, first, [c.command_array(command) for command in commands]))

    def node(self, message, bulk=None):
        raw = encode(m.message_array(message))
        self.queue.reply(self.port, decode(raw), raw, bulk)


@pytest.fixture
def rig():
    """Open, with a read, a timed launch, a download and a program under way: commands 1 to 6."""
    rig = Rig()
    rig.node(m.Result(QUEUE, 0, {}))
    rig.batch(1, c.Alloc(1, 3 << 20), c.Read(1, 0, 16), c.Launch(1, None, None, [], True))
    rig.batch(4, c.Download(9, 1, 0, (2 << 20) + 5))
    rig.hub(m.Program(QUEUE, 5, 1, "c", "p", "p", "p", None, False, {}), memoryview(b"void p(int *x) {}"))
    rig.batch(6, c.Upload(8, 1, 0, 100))
    rig.hub(m.Chunk(QUEUE, 8, 0), memoryview(bytes(100)))
    return rig


def span(**values):
    row = {
        "kind": 1,
        "name": 1,
        "queue": 0,
        "graph": 0,
        "step": 0,
        "number": 2,
        "start": 5,
        "end": 6,
        "nbytes": 0,
    } | values
    return RECORD.pack(
        row["kind"], 0, row["name"], row["queue"], row["graph"], row["step"], 0,
        row["number"], row["start"], row["end"], row["nbytes"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("forged", "bulk"),
    [
        (m.Ack(QUEUE, 7), None),
        (m.Ack(QUEUE + 1, 1), None),
        (m.ReadData(QUEUE, 2, 2), b"too short"),
        (m.ReadData(QUEUE, 1, 1), bytes(16)),
        (m.ReadData(QUEUE, 2, 50), bytes(16)),
        (m.Result(QUEUE, 2, 1.0), None),
        (m.Result(QUEUE, 3, "soon"), None),
        (m.Slot(QUEUE, 9, 0, 4, 1000), None),
        (m.Slot(QUEUE, 9, 1 << 20, 4, 1 << 20), None),
        (m.Slot(QUEUE, 7, 0, 4, 1 << 20), None),
        (m.Chunk(QUEUE, 9, 0), bytes(1 << 20)),
        (m.Credit(QUEUE, 2), None),
        (m.Failed(QUEUE, 7, "DeviceError", "x", {}), None),
        (m.Failed(QUEUE, 0, "DeviceLost", "x", {}), None),
        (m.Compiled(QUEUE, 2, True, ""), None),
        (m.Spans(QUEUE, 1, False), span()),
        (m.Join(1, "x", "x", None, []), None),
        (m.Present("me", False, 0), None),
        (m.Close(QUEUE), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_nobody_asked_for_is_refused_and_the_hub_hears_nothing_of_it(rig, forged, bulk):
    before = list(rig.uplink.said)
    with pytest.raises(InvalidReply):
        rig.node(forged, None if bulk is None else memoryview(bulk))
    assert rig.uplink.said == before


def test_more_chunks_than_there_is_credit_are_refused():
    rig = Rig()
    rig.node(m.Result(QUEUE, 0, {}))
    rig.batch(1, c.Download(9, 1, 0, 8 << 20))
    for index in range(m.SLOTS):
        rig.node(m.Slot(QUEUE, 9, index << 20, 4, 1 << 20))
    with pytest.raises(InvalidReply, match="credit"):
        rig.node(m.Slot(QUEUE, 9, m.SLOTS << 20, 4, 1 << 20))
    rig.hub(m.Credit(QUEUE, 2))
    assert rig.port.sent[-1][0] == m.Credit(QUEUE, 1)
    rig.node(m.Slot(QUEUE, 9, m.SLOTS << 20, 4, 1 << 20))


def test_answers_that_were_asked_for_go_on_as_they_are(rig):
    answers = [
        (m.ReadData(QUEUE, 2, 2), memoryview(bytes(16))),
        (m.Result(QUEUE, 3, 0.5), None),
        (m.Ack(QUEUE, 3), None),
        (m.Compiled(QUEUE, 1, False, "no"), None),
        (m.Credit(QUEUE, 1), None),
        (m.Failed(QUEUE, 4, "DeviceError", "x", {}), None),
        (m.Ack(QUEUE, 6), None),
    ]
    before = len(rig.uplink.said)
    for message, bulk in answers:
        rig.node(message, bulk)
    assert rig.uplink.said[before:] == answers


@pytest.mark.parametrize(
    "wrong",
    [{"kind": 32}, {"queue": 1}, {"number": 7}, {"end": 4}, {"nbytes": 1 << 60}, {"graph": 4, "step": 1}],
    ids=str,
)
def test_spans_that_can_t_be_are_refused(rig, wrong):
    rig.hub(m.Profile(QUEUE, 1, True))
    rig.node(m.Spans(QUEUE, 1, False), memoryview(span()))
    with pytest.raises(InvalidReply):
        rig.node(m.Spans(QUEUE, 1, False), memoryview(span(**wrong)))


def test_a_replay_s_transfers_and_steps_are_known():
    one, two = Device(0, 0), Device(0, 1)
    recording = Recording()
    source, target = recording.buffer(one, 100, memory="x"), recording.buffer(two, 100, memory="y")
    recording.add(Launch(one, 0, "p", (Operand(Range(source, 0, 100)),)))
    recording.add(Transfer(Range(target, 0, 100), Range(source, 0, 100)))
    from wsgrad.graph.parse import device_arrays

    part = device_arrays(part_array(Plan(recording).parts[0]))[0]
    blob = memoryview(encode([part, [[source, 1]]]))
    rig = Rig()
    rig.node(m.Result(QUEUE, 0, {}))
    for at in range(0, len(blob), 40):
        rig.hub(m.Graph(QUEUE, 4, at, len(blob)), blob[at : at + 40])
    rig.hub(m.Replay(QUEUE, 1, 4, 1 << 31, [], []))
    assert (rig.queue.steps(1), rig.queue.may_idle()) == (2, True)
    rig.hub(m.Profile(QUEUE, 1, True))
    rig.node(m.Spans(QUEUE, 1, False), memoryview(span(graph=4, step=2, number=1)))
    with pytest.raises(InvalidReply):
        rig.node(m.Spans(QUEUE, 1, False), memoryview(span(graph=4, step=3, number=1)))
    rig.node(m.Slot(QUEUE, 1 << 31, 0, 4, 100))
    rig.node(m.Ack(QUEUE, 1))
    assert (rig.queue.steps(1), rig.queue.may_idle()) == (0, False)


def test_a_node_that_ends_idle_is_no_command_s_fault_and_a_busy_one_is():
    for busy, number in ((False, 0), (True, 1)):
        rig = Rig()
        rig.node(m.Result(QUEUE, 0, {}))
        if busy:
            rig.batch(1, c.Alloc(1, 4))
        rig.queue.lost(rig.port, Loss("SIGKILL", 1))
        failed = rig.uplink.said[-1][0]
        assert (failed.number, failed.code, failed.details["ended"]) == (number, "DeviceLost", "SIGKILL")
        rig.batch(2, c.Alloc(1, 4))  # on its way meanwhile


@pytest.mark.parametrize(
    ("message", "bulk"),
    [
        (m.Ack(QUEUE, 1), None),
        (m.Credit(QUEUE, 1), None),
        (m.Replay(QUEUE, 7, 5, 1 << 31, [], []), None),
        (m.Graph(QUEUE, 1, 5, 10), b"x"),
        (m.Graph(QUEUE, 1, 0, 1), b"x"),
        (m.Chunk(QUEUE, 1, 0), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_hub_that_breaks_the_protocol_is_refused(rig, message, bulk):
    with pytest.raises(ProtocolError):
        rig.hub(message, None if bulk is None else memoryview(bulk))


def test_a_hub_that_floods_a_queue_is_refused(rig):
    rig.port.full = True
    launches = [m.Launches(QUEUE, number, 1) for number in range(7, 1000)]

    def flood():
        for message in launches:
            rig.hub(message, memoryview(bytes(1 << 16)))

    with pytest.raises(ProtocolError, match="bytes for one queue"):
        flood()
