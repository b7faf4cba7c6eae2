"""The limits that sessions and their queues are held to; `Config` sets them, this says what they mean to the heart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from wsgrad.devices.native import MAX_BUFFERS, MAX_PROGRAMS
from wsgrad.transport.messages import CHUNK_BYTES, SLOTS

if TYPE_CHECKING:
    from wsgrad.server.config import Config

MAX_QUEUES: Final = 64
"""Open devices of one session."""
MAX_RETAINED: Final = 8 << 20
"""Bytes of answers that are kept until a client has seen them; reads beyond that hold their queue."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are bytes, times are seconds; 0 stands for no limit of `idle_seconds` and of `upload_rate`, a second's."""

    max_sessions: int = 64
    max_session_memory: int = 1 << 32
    max_buffers: int = 60_000
    max_programs: int = 4096
    max_graphs: int = 1024
    max_graphs_nbytes: int = 64 << 20
    max_queue_nbytes: int = 32 << 20
    max_queue_commands: int = 1 << 20
    upload_rate: int = 0
    max_program_nbytes: int = 1 << 20
    compile_seconds: float = 5.0
    launch_seconds: float = 30.0
    idle_seconds: float = 86_400.0
    resume_grace: float = 60.0
    node_grace: float = 15.0
    hello_seconds: float = 10.0

    @classmethod
    def of(cls, config: Config) -> Limits:
        """The limits that a server was started with."""
        return cls(
            max_sessions=config.max_sessions,
            max_session_memory=config.max_session_memory,
            max_buffers=min(config.max_buffers, MAX_BUFFERS),
            max_programs=min(config.max_programs, MAX_PROGRAMS),
            max_graphs=config.max_graphs,
            max_graphs_nbytes=config.max_graphs_size,
            max_queue_nbytes=config.max_queue_size,
            max_queue_commands=config.max_queue_commands,
            upload_rate=config.upload_rate,
            max_program_nbytes=config.max_program_size,
            compile_seconds=config.compile_seconds,
            launch_seconds=config.launch_seconds,
            idle_seconds=config.idle_seconds,
            resume_grace=config.resume_grace,
            node_grace=config.node_grace,
            hello_seconds=config.handshake_seconds,
        )

    def describe(self) -> dict[str, object]:
        """What a client is told in its welcome."""
        return {
            "max_session_memory": self.max_session_memory,
            "max_buffers": self.max_buffers,
            "max_programs": self.max_programs,
            "max_program_size": self.max_program_nbytes,
            "max_graphs": self.max_graphs,
            "max_graphs_size": self.max_graphs_nbytes,
            "max_queue_size": self.max_queue_nbytes,
            "max_queue_commands": self.max_queue_commands,
            "upload_rate": self.upload_rate,
            "max_queues": MAX_QUEUES,
            "chunk_bytes": CHUNK_BYTES,
            "slots": SLOTS,
            "compile_seconds": self.compile_seconds,
            "launch_seconds": self.launch_seconds,
            "idle_seconds": self.idle_seconds,
            "resume_grace": self.resume_grace,
        }


def all_limits(config: Config) -> dict[str, object]:
    """Every limit of a server, those of its sessions and those of its port, for `/status.json`."""
    return {
        "max_sessions": config.max_sessions,
        "max_connections_per_address": config.max_connections_per_address,
        "handshake_seconds": config.handshake_seconds,
        "max_message_size": config.max_message_size,
        "cache_size": config.cache_size,
        **Limits.of(config).describe(),
    }
