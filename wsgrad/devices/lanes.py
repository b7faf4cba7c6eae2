"""Runs a replay's launches while its transfers go on: what may begin when, and the thread that launches run in.

All but the launches themselves happens with the lock of the queue held, so only they run beside something else. They
read and write only what no transfer under way does: the waits between the lanes of a part say so. What becomes of an
error is the executor's.
"""

from __future__ import annotations

import _thread
from collections import deque
from typing import TYPE_CHECKING

from wsgrad.devices.transfers import Download, Transfers, Upload
from wsgrad.errors import WsgradError, error_from_wire
from wsgrad.graph.native import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wsgrad.devices.replay import Halt
    from wsgrad.graph.part import PartStep
    from wsgrad.transport.messages import Chunk, Fail, Replay

    Take = Callable[[int], tuple[Chunk, memoryview] | None]


class Worker:
    """A thread of a node process that does one thing at a time.

    Attributes:
        lock: the queue's.
        after: called with the lock held when something is done.
    """

    def __init__(
        self, lock: _thread.RLock, *, failed: Callable[[], object], prepare: Callable[[], object] = lambda: None
    ) -> None:
        """Make one.

        Args:
            lock: whoever holds it may use the queue.
            failed: called in the thread if it can't go on.
            prepare: called in it first, for what a confined process can't do any more.
        """
        self.lock = lock
        self.after: Callable[[], object] = lambda: None
        self._failed = failed
        self._prepare = prepare
        self._given = _thread.allocate_lock()
        self._given.acquire()
        self._ready = _thread.allocate_lock()
        self._ready.acquire()
        self._work: Callable[[], Callable[[], object]] | None = None

    def start(self) -> None:
        """Start the thread, which a confined process can't do any more; returns when it waits for work."""
        _thread.start_new_thread(self._run, ())
        self._ready.acquire()

    def stop(self) -> None:
        """Let it end; only needed where the process goes on."""
        self._work = None
        self._given.release()

    def give(self, work: Callable[[], Callable[[], object]]) -> None:
        """Do something in the thread, then, with the lock held, what it returned."""
        self._work = work
        self._given.release()

    def _run(self) -> None:
        try:
            self._prepare()
            self._ready.release()
            while True:
                self._given.acquire()
                if self._work is None:
                    return
                done = self._work()
                with self.lock:
                    done()
                    self.after()
        except BaseException:
            self._failed()
            raise


class Lanes:
    """One replay.

    Attributes:
        busy: whether launches run in the other thread.
        failure: why it can't go on.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        entries: Sequence[tuple[int, Run | PartStep]],
        transfers: Sequence[tuple[PartStep, Halt]],
        lane_of: dict[int, int],
        brief: Callable[[int], bool],
        progress: Callable[[int], None],
        run: Callable[[int, Run | PartStep], None],
    ) -> None:
        """Make one.

        Args:
            worker: runs the launches.
            entries: of the compute lane in their order, with the position of each one's first step.
            transfers: all of them by their numbers.
            lane_of: which lane each step is in.
            brief: whether what begins at a position is so short that it is run at once.
            progress: told the position of what runs next.
            run: runs an entry; raises what went wrong.
        """
        self.busy = False
        self.failure: Exception | None = None
        self._worker = worker
        self._entries = deque(entries)
        self._transfers = tuple(deque(one for one in transfers if one[1].sends is sends) for sends in (True, False))
        self._lane_of = lane_of
        self._brief = brief
        self._progress = progress
        self._run = run
        self._over = [0, 0, 0]
        self._moving: list[PartStep | None] = [None, None]
        self._moves: Transfers
        self._take: Take
        self._number = self._first = 0

    def join(self, work: Replay, moves: Transfers, take: Take) -> None:
        """Let it begin.

        Args:
            work: the command.
            moves: of the queue.
            take: the next chunk that came for a transfer.
        """
        self._moves, self._take = moves, take
        # Until the replay is over, what is done is what was done before it.
        self._number, self._first = work.number - 1, work.transfer

    def go_on(self, failed: Fail | None) -> bool:
        """Go on with launches and transfers, as far as any can; whether that was the end.

        Args:
            failed: what the server knows to have failed elsewhere.

        Raises:
            Exception: why it can't go on; nothing of it runs any more.
        """
        if failed is not None and self.failure is None:
            self.failure = error_from_wire(failed.code, failed.message, failed.details)
        while self.failure is None:
            try:
                over = list(self._over)
                if not (self._launch() | self._receive() | self._send()) and over == self._over:
                    return not (self.busy or self._entries or any(self._transfers) or any(self._moving))
            except (WsgradError, MemoryError) as error:
                self.failure = error
        if not self.busy:
            raise self.failure
        return False

    def _receive(self) -> bool:
        moves = self._moves
        if moves.upload is None and (halt := self._next(sends=False)) is not None:
            transfer = self._first + halt.place
            moves.upload = Upload(self._number, transfer, halt.at, halt.nbytes, step=halt.position)
        moved = False
        while moves.upload is not None and (kept := self._take(moves.upload.transfer)) is not None:
            moves.chunk(*kept)
            moved = True
        return moved

    def _send(self) -> bool:
        moves = self._moves
        if moves.download is None and (halt := self._next(sends=True)) is not None:
            transfer = self._first + halt.place
            moves.download = Download(self._number, transfer, *halt.at, halt.nbytes, step=halt.position)
        return moves.download is not None and moves.pump()

    def _launch(self) -> bool:
        """Whether anything ran or began to."""
        if self.busy or not self._entries:
            return False
        position, entry = self._entries[0]
        if not self._may(entry.steps[0] if isinstance(entry, Run) else entry):
            return False
        self._progress(position)
        if self._brief(position):
            self._compute()()
        else:
            self.busy = True
            self._worker.give(self._compute)
        return True

    def _next(self, *, sends: bool) -> Halt | None:
        """The next transfer of one direction that may begin; the one before it is over."""
        which = 0 if sends else 1
        waiting = self._transfers[which]
        moved = self._moving[which]
        if moved is not None:
            self._ended(moved.number)
            self._moving[which] = None
        while waiting and self._may(waiting[0][0]):
            step, halt = waiting.popleft()
            if halt.nbytes:
                self._moving[which] = step
                return halt
            self._ended(step.number)
        return None

    def _compute(self) -> Callable[[], object]:
        position, entry = self._entries[0]
        error: Exception | None = None
        try:
            self._run(position, entry)
        except Exception as exc:
            error = exc

        def done() -> None:
            self.busy = False
            self._entries.popleft()
            if error is not None:
                self.failure = self.failure or error
                return
            self._ended((entry.steps[-1] if isinstance(entry, Run) else entry).number)

        return done

    def _may(self, step: PartStep) -> bool:
        return all(self._over[self._lane_of[wait]] >= wait for wait in step.waits)

    def _ended(self, number: int) -> None:
        self._over[self._lane_of[number]] = number
