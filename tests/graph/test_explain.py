"""A plan shown: as a table and as a picture, nothing is left out."""

import random
import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_recording

from wsgrad.graph.items import Access, Copy, Device, Fill, Launch, Operand, Range, Transfer, Var
from wsgrad.graph.plan import Plan
from wsgrad.graph.recording import Recording

SVG = "{http://www.w3.org/2000/svg}"


def sample():
    recording = Recording()
    near, far = Device(0, 0, "gpu <1>"), Device(1, 0, "far")
    x, y = recording.buffer(near, 16, memory="x", name="x&"), recording.buffer(far, 16, memory="y")
    n = Var("n", 1, 4)
    recording.add(Fill(near, Range(x, 8, 8), b"\x01\x02"))
    operand = Operand(Range(x, 0, 16), Access.BOTH)
    recording.add(Launch(near, 0, "pid", (operand, n + 1, 0.5), name="step", grid=(n, 2)))
    recording.add(Copy(near, Range(x, 0, 8), Range(x, 8, 8)))
    recording.add(Transfer(Range(y, 0, 8), Range(x, 0, 8)))
    recording.add(Transfer(Range(y, 8, 8), Range(x, 8, 8)))
    return Plan(recording)


def test_the_table_names_queues_items_waits_and_reasons():
    assert sample().explain().splitlines() == [
        "5 items, 5 steps, 3 queues of 2 devices on 2 servers, 1 signal",
        "queue            step  items  what                                      waits  why",
        "gpu <1> compute  1     #0     fill x&[8:16] with 0102",
        "gpu <1> compute  2     #1     step(rw x&, n+1, 0.5) grid n×2",
        "gpu <1> compute  3     #2     copy x&[8:16] to x&[0:8]",
        "gpu <1> send     4     #3 #4  send x& to far (server 1)                 3      "
        "#3 read after write #2 on x&[0:8]",
        "far receive      5     #3 #4  receive buffer 1 from gpu <1> (server 0)",
    ]


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_every_item_and_every_wait_is_in_table_and_picture(seed):
    plan = Plan(random_recording(random.Random(seed)))
    text = plan.explain()
    root = ET.fromstring(plan.svg())
    titles = [title.text for title in root.iter(f"{SVG}title")]
    steps = plan.schedule.steps
    assert len(titles) == len(list(root.iter(f"{SVG}rect"))) == len(steps)
    for step in steps:
        items = " ".join(f"#{item}" for item in step.items)
        assert any(title.startswith(f"step {step.number}, {items}: ") for title in titles)
        [row] = [line for line in text.splitlines()[2:] if f"  {step.number} " in line and f"  {items} " in line]
        assert plan.schedule.queues[step.queue].label in row
    reasons = [f"on {wait.hazard.kind.value}" for step in steps for wait in step.waits]
    assert sum(line.count(" after ") for line in text.splitlines()) == len(reasons)
    arrows = [line for line in root.iter(f"{SVG}line") if line.get("marker-end")]
    transfers = sum(type(step.action).__name__ == "Receive" for step in steps)
    assert len(arrows) == len(reasons) + transfers


def test_names_can_not_break_the_picture():
    svg = sample().svg()
    root = ET.fromstring(svg)
    assert "gpu <1> send" in [text.text for text in root.iter(f"{SVG}text")]
    assert "<script" not in svg


def test_an_empty_plan_can_be_shown():
    plan = Plan(Recording())
    assert plan.parts == {}
    assert plan.explain().startswith("0 items, 0 steps")
    ET.fromstring(plan.svg())
