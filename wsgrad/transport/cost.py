"""What a message of commands counts against the limit of its queue until it is acknowledged; both ends count alike."""

from __future__ import annotations

from typing import Final

MESSAGE_NBYTES: Final = 700
COMMAND_NBYTES: Final = 160
"""Keeping a message costs so much beside its bytes, and as much again for each command of a batch (measured)."""


def kept_nbytes(head_nbytes: int, bulk_nbytes: int, commands: int) -> int:
    """What a message counts.

    Args:
        head_nbytes: of its encoded array, which is kept both as it came and decoded.
        bulk_nbytes: of its bulk.
        commands: how many commands it holds if it is a batch, else 0.
    """
    return MESSAGE_NBYTES + COMMAND_NBYTES * commands + 2 * head_nbytes + bulk_nbytes
