"""What the blocking driver needs of what a caller waits for, and of what measures calls; it waits for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

T_co = TypeVar("T_co", covariant=True)


class Waiting(Protocol):
    """What a caller waits for."""

    notify: Callable[[], object] | None

    @property
    def done(self) -> bool: ...


class Waited(Waiting, Protocol[T_co]):
    """What a caller waits for, may give up, and gets a result of."""

    def withdraw(self) -> None: ...
    def result(self) -> T_co: ...


class Calls(Protocol):
    """Measures the calls of users."""

    def calling(self) -> AbstractContextManager[None]: ...
