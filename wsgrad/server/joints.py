"""Ties the commands of a batch that concern other queues to the session's events and transfers; sends nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from wsgrad.errors import ProtocolError
from wsgrad.server.graphs import GraphRun
from wsgrad.server.submission import Joint, check_lost
from wsgrad.transport.commands import Clear, Receive, Send, Signal, Wait
from wsgrad.transport.messages import Batch

if TYPE_CHECKING:
    from collections import deque

    from wsgrad.server.events import Failure
    from wsgrad.server.intake import Waiting
    from wsgrad.server.journal import Journal
    from wsgrad.server.session import Session
    from wsgrad.server.submission import Checked, Incoming


def tie(checked: Checked, session: Session, journal: Journal) -> None:
    """Find the events and transfers that a checked batch names, and note in the journal what settles them.

    Raises:
        ProtocolError: one is used in a way that it can't be.
    """
    for number, command in checked.marks:
        match command:
            case Signal():
                journal.add(number, session.events.signal(command.event))
            case Clear():
                journal.add(number, command.error)
            case Send():
                journal.add(number, session.flow_from(command))
    for item in checked.sends:
        if isinstance(item, Joint):
            match item.command:
                case Wait():
                    item.event = session.events.wait(item.command.event)
                case Send():
                    item.flow = session.transfers.flow(item.command.route, item.command.transfer)
                case Receive():
                    item.flow = session.flow_to(item.command)


def drop(batch: Batch, session: Session, failure: Failure) -> Incoming | None:
    """The commands of a batch will not run: those whom they concern learn why. Returns the batch's upload.

    Raises:
        ProtocolError: a command is malformed, or names what it can't.
    """
    commands, upload = check_lost(batch)
    for command in commands:
        match command:
            case Signal():
                session.events.signal(command.event).settle(failure)
            case Send():
                session.flow_from(command).source_failed(failure)
            case Receive():
                session.flow_to(command).target_failed(failure)
    return upload


def drop_waiting(waiting: deque[Waiting], session: Session, failure: Failure) -> None:
    """The same for what was not looked into when its queue ended; a fault in it must not keep the rest from ending."""
    while waiting:
        message = waiting.popleft().message
        with suppress(ProtocolError):
            if isinstance(message, Batch):
                drop(message, session, failure)
            elif isinstance(message, GraphRun):
                message.drop(failure)
