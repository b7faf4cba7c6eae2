"""What callers wait for on one queue, and how it is settled: acknowledgements, results, reads, downloads, compilations.

Sans-IO and without order of its own: the queue numbers commands and says what has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from wsgrad.client.waits import Failure, Wait
from wsgrad.errors import CompileError, ProtocolError
from wsgrad.transport.messages import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from wsgrad.client.arrays import Sink

T = TypeVar("T")


class Incoming(Wait[T]):
    """A read under way, and the wait for it."""

    __slots__ = ("nbytes", "number", "received", "sink")

    def __init__(
        self,
        nbytes: int,
        sink: Sink,
        finish: Callable[[object], T],
        withdraw: Callable[[], None],
    ) -> None:
        super().__init__(finish, withdraw=withdraw)
        self.number = 0
        self.nbytes = nbytes
        self.sink = sink
        self.received = 0


@dataclass(slots=True, eq=False)
class Compilation:
    """How far the server is with one program, which a command brought; `message` holds errors or warnings."""

    number: int
    done: bool = False
    failure: Failure | None = None
    message: str = ""


class Pending:
    """Owned by a queue.

    Attributes:
        acknowledged: all commands up to this number have run or were dropped; -1 before the device has opened.
    """

    def __init__(self) -> None:
        self.acknowledged = -1
        self._acks: list[tuple[int, Wait[Any]]] = []
        self._results: dict[int, Wait[Any]] = {}
        self._reads: dict[int, Incoming[Any]] = {}
        self._downloads: dict[int, Incoming[Any]] = {}
        self._compilations: dict[int, Compilation] = {}
        self._compiling: list[tuple[list[Compilation], Wait[Any]]] = []

    # -- waits --

    def until(
        self,
        number: int,
        finish: Callable[[object], T] | None = None,
        *,
        withdraw: Callable[[], None] | None = None,
    ) -> Wait[T]:
        """A wait for the acknowledgement of command `number`."""
        wait: Wait[T] = Wait(finish, withdraw=withdraw)
        if number <= self.acknowledged:
            wait.settle()
        else:
            self._acks.append((number, wait))
        return wait

    def result(self, number: int, finish: Callable[[object], T]) -> Wait[T]:
        """A wait for the value of command `number`."""

        def withdraw() -> None:
            self._results.pop(number, None)

        wait: Wait[T] = Wait(finish, withdraw=withdraw)
        self._results[number] = wait
        return wait

    def read(self, incoming: Incoming[Any]) -> None:
        """Expect the answer to a small read."""
        self._reads[incoming.number] = incoming

    def forget_read(self, number: int) -> None:
        """Nobody waits for this read any more."""
        self._reads.pop(number, None)

    def download(self, transfer: int, incoming: Incoming[Any]) -> None:
        """Expect the chunks of a download."""
        self._downloads[transfer] = incoming

    def forget_download(self, transfer: int) -> bool:
        """Nobody waits for this download any more; returns whether it was still under way."""
        return self._downloads.pop(transfer, None) is not None

    def compilation(self, program: int, number: int) -> Compilation:
        """Expect how compiling a program ends that command `number` brings."""
        compilation = self._compilations[program] = Compilation(number)
        return compilation

    def compiled(self, compilations: list[Compilation]) -> Wait[None]:
        """A wait for these, of one program; fails where none of them compiles, or the device is lost.

        One that does not compile where another does is of a launch with arguments that don't fit, which fails itself.
        """

        def finish(_: object) -> None:
            failures = [compilation.failure for compilation in compilations if compilation.failure is not None]
            if failures and (len(failures) == len(compilations) or any(failure.lost for failure in failures)):
                raise next((failure for failure in failures if failure.lost), failures[0]).error()

        wait: Wait[None] = Wait(finish)
        self._compiling.append((compilations, wait))
        self._settle_compiling()
        return wait

    # -- what the server says --

    def read_destination(self, number: int, nbytes: int) -> memoryview | None:
        """Where the answer to the read of command `number` goes; None where nobody waits for it any more."""
        incoming = self._reads.get(number)
        if incoming is None:
            return None
        if nbytes != incoming.nbytes:
            raise ProtocolError(f"a read of {incoming.nbytes} bytes was answered with {nbytes}")
        return incoming.sink.destination(nbytes)

    def chunk_destination(self, transfer: int, offset: int, nbytes: int) -> memoryview | None:
        """Where a chunk of a download goes; None where nobody waits for it any more."""
        incoming = self._downloads.get(transfer)
        if incoming is None:
            return None
        expected = min(CHUNK_BYTES, incoming.nbytes - incoming.received)
        if offset != incoming.received or nbytes != expected:
            raise ProtocolError(
                f"a chunk of {nbytes} bytes at offset {offset} came where {expected} bytes at offset "
                f"{incoming.received} of {incoming.nbytes} were due"
            )
        return incoming.sink.destination(nbytes)

    def on_read_data(self, number: int, data: memoryview | bytes) -> None:
        """The answer to a small read, received where `read_destination` said or elsewhere."""
        incoming = self._reads.pop(number, None)
        if incoming is not None:
            if len(data) != incoming.nbytes:
                raise ProtocolError(f"a read of {incoming.nbytes} bytes was answered with {len(data)}")
            incoming.sink.accept(data)
            incoming.settle()

    def on_chunk(self, transfer: int, data: memoryview) -> None:
        """A chunk of a download, received where `chunk_destination` said."""
        incoming = self._downloads.get(transfer)
        if incoming is None:
            return
        incoming.sink.accept(data)
        incoming.received += len(data)
        if incoming.received == incoming.nbytes:
            del self._downloads[transfer]
            incoming.settle()

    def on_result(self, number: int, value: object) -> None:
        """The value of a command."""
        wait = self._results.pop(number, None)
        if wait is not None:
            wait.settle(value)

    def on_ack(self, number: int) -> None:
        """All commands up to `number` have run or were dropped."""
        if number > self.acknowledged:
            self.acknowledged = number
        if self._acks:
            due = [wait for last, wait in self._acks if last <= number]
            self._acks = [entry for entry in self._acks if entry[0] > number]
            for wait in due:
                wait.settle()

    def on_compiled(self, program: int, ok: bool, message: str) -> None:
        """How compiling a program ended."""
        compilation = self._compilations.pop(program, None)
        if compilation is not None:
            compilation.done = True
            compilation.message = message
            if not ok:
                compilation.failure = Failure(0, CompileError.__name__, message)
            self._settle_compiling()

    def fail_from(self, number: int, failure: Failure) -> bool:
        """Fail all waits for command `number` and later ones; returns whether there were any."""
        waits = [wait for last, wait in self._acks if last >= number]
        self._acks = [entry for entry in self._acks if entry[0] < number]
        waits += [self._results.pop(last) for last in list(self._results) if last >= number]
        for table in (self._reads, self._downloads):
            waits += [table.pop(key) for key, incoming in list(table.items()) if incoming.number >= number]
        waits = [wait for wait in waits if not wait.done]
        for wait in waits:
            wait.fail(failure.error())
        return bool(waits)

    def fail_compilation(self, number: int, failure: Failure) -> bool:
        """A command was refused; a program that it brought is compiled by nobody. Returns whether anybody waited."""
        for program, compilation in self._compilations.items():
            if compilation.number == number:
                waited = any(compilation in compilations and not wait.done for compilations, wait in self._compiling)
                compilation.done = True
                compilation.failure = failure
                del self._compilations[program]
                self._settle_compiling()
                return waited
        return False

    def fail_compilations(self, failure: Failure) -> bool:
        """No program that is still compiling will be heard of again. Returns whether anybody waited for one."""
        waited = any(not wait.done for _, wait in self._compiling)
        for compilation in self._compilations.values():
            compilation.done = True
            compilation.failure = failure
        self._compilations.clear()
        self._settle_compiling()
        return waited

    def _settle_compiling(self) -> None:
        waiting = []
        for compilations, wait in self._compiling:
            if all(compilation.done for compilation in compilations):
                wait.settle()
            elif not wait.done:
                waiting.append((compilations, wait))
        self._compiling = waiting
