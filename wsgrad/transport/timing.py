"""The times and codes by which drivers judge a connection: silent, over, worth another try; it waits for nothing."""

from __future__ import annotations

from typing import Final

PING_SECONDS: Final = 5.0
"""After so much silence of the peer a heartbeat is sent."""
DEAD_SECONDS: Final = 15.0
"""After so much silence the connection is over."""
CLOSE_SECONDS: Final = 2.0
"""How long the peer has to answer a close."""
DIAL_SECONDS: Final = 10.0
"""How long one try to connect again may take."""
FIRST_RETRY_SECONDS: Final = 0.02
"""The pause after the first try to connect again that failed; each later one is twice as long."""
LAST_RETRY_SECONDS: Final = 1.0
"""The longest pause between tries."""
REFUSED_SECONDS: Final = 0.25
"""How long a server that refuses connections may be a proxy that is just starting again; then nothing listens there."""
PASSING_CODES: Final = frozenset({1001, 1006, 1011, 1012, 1013})
"""Close codes after which a session may still be there; after any other the server has ended it."""
