"""Guesses how long a program's launches take by those before; it measures nothing itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Pace:
    """What is known of how long one program's launches take.

    Attributes:
        seconds: a launch of `groups` workgroups; None before the first was measured.
    """

    seconds: float | None = None
    groups: int = 1

    def expect(self, groups: int) -> float:
        """How long a launch of so many workgroups should take, rather too long than too short."""
        assert self.seconds is not None
        return self.seconds if groups <= self.groups else self.seconds * groups / self.groups
