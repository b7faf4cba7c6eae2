"""Decides what happens to arguments of one launch that share bytes, the same for every device; copies nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from wsgrad.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Span(Protocol):
    """Bytes of some memory."""

    @property
    def memory(self) -> object:
        """Which memory."""

    @property
    def offset(self) -> int:
        """Where in it."""

    @property
    def nbytes(self) -> int:
        """How many bytes."""


def shared_reads(
    name: str, spans: Mapping[int, Span], writes: Collection[int] | None, *, alias: bool
) -> frozenset[int]:
    """The arguments that are only read and share bytes with a written one: read from copies taken before the launch.

    Args:
        name: the program's.
        spans: the buffers among the arguments, by position.
        writes: the positions that are written; None stands for all.
        alias: two written arguments may be the same range.

    Raises:
        LaunchError: two written arguments share bytes otherwise.
    """
    copied = set()
    written = [at for at in spans if writes is None or at in writes]
    for at, span in spans.items():
        for other in written:
            if other == at or not _share(spans[other], span):
                continue
            if at not in written:
                copied.add(at)
            elif not (alias and _range(spans[other]) == _range(span)):
                raise both_written(name, *sorted((at, other)), alias=alias)
    return frozenset(copied)


def both_written(name: str, first: int, second: int, *, alias: bool) -> LaunchError:
    """What is said of two written arguments that share bytes."""
    hint = (
        "give the same range twice" if alias else "or declare the program with alias=True and give the same range twice"
    )
    return LaunchError(
        f"arguments {first} and {second} of {name!r} are both written and share bytes; "
        f"name what is written with writes=, {hint}",
        details={"arguments": [first, second]},
    )


def _share(a: Span, b: Span) -> bool:
    return (
        a.memory is b.memory
        and a.nbytes > 0
        and b.nbytes > 0
        and a.offset < b.offset + b.nbytes
        and b.offset < a.offset + a.nbytes
    )


def _range(span: Span) -> tuple[int, int]:
    return span.offset, span.nbytes
