"""The loop that keeps a step-wise engine full: whoever leaves after a step makes room for the next before the next."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from headrace.batching.dispatch.isolation import is_out_of_memory, should_split
from headrace.batching.dispatch.offload import Raised, WorkerThread
from headrace.batching.dispatch.submission import WaitingRoom
from headrace.batching.pending import Entry, fail, give
from headrace.batching.policy.slots import SlotEntry, Slots
from headrace.batching.step_model import StepCall, StepModel
from headrace.batching.tasks import ends_the_task
from headrace.errors import ProcessError, ProcessTimeoutError, StoppedError, text_of
from headrace.events import BatchSplit, StepDone

logger = logging.getLogger("headrace")


class StepScheduler:
    """Owns every record from the slot it gets until its reply.

    Three kinds of records want a slot: those that had one and were sent back come first, then the groups into which a
    failed step was split, each of them alone, and then those that wait in the lineup.
    """

    def __init__(self, room: WaitingRoom, model: StepModel[Any, Any], max_slots: int) -> None:
        self._model = model
        self._lineup = room.lineup
        self._admission = room.admission
        self._wakeup = room.wakeup
        self._meter = room.meter
        self._options = room.options
        self._slots = Slots(max_slots, self._options.limits.target_batch_cost)
        self._back: deque[SlotEntry] = deque()
        self._groups: deque[list[SlotEntry]] = deque()
        self._alone = False
        self._leaving: set[int] = set()
        self._joining: list[SlotEntry] = []
        self._clock = asyncio.get_running_loop().time
        self._idle_since = self._clock()
        self._draining = self._ended = False
        self._worker: WorkerThread | None = None

    # -- what the waiting room tells -----------------------------------------------------------------------------

    def arrived(self, cost: float) -> None:  # noqa: ARG002  # the dispatcher of batches asks whether it is enough
        """A record has joined the lineup while the loop slept, for the engine had nothing to do."""
        self._wakeup.wake()

    def flush(self) -> None:
        """Nothing to do: no step waits for company."""

    def drain(self) -> None:
        """End once nothing waits and nothing runs."""
        self._draining = True
        self._wakeup.wake()

    def end(self) -> None:
        """Let go of everything: a step that still runs is left behind, and neither counted nor told of."""
        self._ended = True
        if self._worker is not None:
            left = [*self._leaving, *(seat.key for seat in self._slots.clear())]
            if left:  # the engine may serve another batcher yet
                self._worker.run(asyncio.get_running_loop(), lambda *_: [self._model.remove(key) for key in left])
            self._worker.close()

    def discard(self, entry: Entry) -> None:
        """A record that has a slot, or had one, is wanted no more: it leaves before the next step."""
        entry.home = None
        seat = self._slots.find(entry)
        if seat is not None:
            self._leave(seat.key)
        for waiting in (self._back, *self._groups):
            for other in [other for other in waiting if other.entry is entry]:
                waiting.remove(other)
        self._count_in_flight()

    # -- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until drained. Whatever ends this task, nobody is left waiting."""
        cause: BaseException = StoppedError(f"{self._options.name} stopped before this record was finished")
        try:
            while await self._until_work():
                self._fill()
                if self._joining or self._leaving or len(self._slots):
                    await self._step()
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            logger.critical("%s failed, and its records with it", self._options.name, exc_info=exc)
            cause = exc
            raise
        finally:
            self._abandon(cause)

    async def _until_work(self) -> bool:
        """Wait until the engine has something to do; False when drained."""
        while True:
            if self._lineup.size or self._back or self._groups or self._leaving or len(self._slots):
                return True
            if self._draining and not self._admission.waiting:
                return False
            await self._wakeup.sleep()

    def _fill(self) -> None:
        """Give the free slots away, as far as what their records may grow to is within the budget."""
        slots = self._slots
        if slots.full or not (self._lineup.size or self._back or self._groups):
            return  # as before most steps: what is promised need not be added up
        promised = slots.promised()
        while self._back:
            seat = self._back[0]
            if not slots.has_room(promised, seat.start, seat.most, seat.held):
                return
            promised += self._join(self._back.popleft())
        if not len(slots):
            self._alone = bool(self._groups)
            for seat in self._groups.popleft() if self._groups else ():
                self._join(seat)
        while not self._alone and (entry := self._lineup.peek()) is not None:
            record = entry.records[0]
            try:
                start, most = self._model.span(record)
            except BaseException as exc:  # the user's own method: it costs this record, not the loop
                if ends_the_task(exc):
                    raise
                self._meter.taken += 1
                self._meter.failed += fail(self._take_next(), exc)
                continue
            if not slots.has_room(promised, start, most, start):
                return
            (entry,) = self._take_next()
            promised += self._join(SlotEntry(entry, record, start, most))
            self._meter.joined(self._clock(), entry.arrival)

    def _take_next(self) -> list[Entry]:
        entries = self._lineup.take("full_size").entries
        self._admission.let_in()
        return entries

    def _join(self, seat: SlotEntry) -> float:
        """Let a record join the next step; returns what is thereby promised."""
        self._slots.join(seat)
        self._joining.append(seat)
        seat.entry.home = self
        return self._slots.growth.expected(seat.start, seat.most, seat.held)

    def _leave(self, key: int) -> None:
        """Free a slot, and let the engine know before the next step."""
        self._slots.leave(key)
        self._leaving.add(key)

    async def _step(self) -> None:
        joining, self._joining = self._joining, []
        new = {seat.key for seat in joining}
        turn = StepCall(
            leaving=sorted(self._leaving),
            joining=[(seat.key, seat.record if seat.resume is None else seat.resume) for seat in joining],
            staying={seat.key for seat in self._slots if seat.key not in new},
        )
        self._leaving.clear()
        if not len(self._slots):
            await self._let_go(turn)
            return
        number, size, began = self._meter.batches, len(self._slots), self._clock()
        self._count_in_flight()
        self._meter.step_began(began, size, self._slots.held)
        starved = began - self._idle_since
        failure = await self._call(turn)
        now = self._idle_since = self._clock()
        if self._ended:
            return
        self._meter.step_ended(now, now - began)
        completed, failed, cost = self._settle(turn)
        back = 0
        if failure is not None:
            failed += self._fail(failure, number)
        else:
            back = self._send_back()
        self._meter.completed += completed
        self._meter.failed += failed
        self._count_in_flight()
        self._emit(StepDone(number, size, len(new), completed + failed, failed, back, cost, now - began, starved, now))

    async def _let_go(self, turn: StepCall) -> None:
        """A turn in which records only leave: no step is taken."""
        failure = await self._call(turn)
        if failure is not None:
            logger.error("%s: the engine failed to let a record go", self._options.name, exc_info=failure)

    async def _call(self, turn: StepCall) -> BaseException | None:
        """Take the turn in the engine's thread; returns what it raised."""
        loop = asyncio.get_running_loop()
        if self._worker is None:
            self._worker = WorkerThread(f"{self._options.name}-engine")
        running = self._worker.run(loop, lambda *_: turn.take(self._model))
        timeout = self._options.process_timeout_s
        late: ProcessTimeoutError | None = None
        while timeout is not None and not (await asyncio.wait({running}, timeout=timeout))[0]:
            # Nobody waits for ever for an engine that is stuck, neither those in it nor those behind them.
            late = ProcessTimeoutError(
                f"step() has not returned within process_timeout_s={timeout}; its results will be ignored. "
                "Raise the limit or use fewer slots"
            )
            self._meter.failed += self._fail_all(late)
            self._meter.left += self._lineup.size
            fail(self._lineup.clear(), late)
            self._admission.let_in()
        outcome = await running
        return outcome.cause if isinstance(outcome, Raised) else late

    # -- what came of a step -------------------------------------------------------------------------------------

    def _settle(self, turn: StepCall) -> tuple[int, int, float]:
        """Give those that left the engine their replies; returns how many got a result, how many not, and the cost."""
        completed = failed = 0
        cost = 0.0
        for waiting in self._back:
            waiting.resume = turn.resumes.get(waiting.key, waiting.resume)
        for key, exc in turn.refused:
            refused = self._slots.leave(key)
            if refused is not None:
                refused.entry.home = None
                failed += fail([refused.entry], exc)
        for key, result in turn.finished:
            seat = self._slots.leave(key)
            if seat is None:  # cancelled during the step
                continue
            seat.entry.home = None
            good, bad = give([seat.entry], [result])
            completed += good
            failed += bad
            if good:
                self._slots.growth.finished(seat.start, seat.most, seat.held)
                cost += seat.held
        self._slots.update(turn.needs)
        return completed, failed, cost

    def _send_back(self) -> int:
        """Take slots back where the hope was too great: those records begin again, before anyone who has not begun."""
        back = self._slots.send_back()
        for seat in back:
            self._leaving.add(seat.key)
            self._back.appendleft(seat)
        return len(back)

    def _fail(self, cause: BaseException, number: int) -> int:
        """A step has failed, and with it those in the engine, unless some may do better alone."""
        seats = list(self._slots)
        if len(seats) < 2 or not should_split(cause, self._options.on_error):
            return self._fail_all(cause)
        out_of_memory = is_out_of_memory(cause)
        if out_of_memory:
            self._slots.max_slots = len(seats) // 2
        for seat in seats:  # a step that failed half-way leaves nothing to go on with
            self._leave(seat.key)
            seat.resume, seat.held = None, seat.start
        half = len(seats) // 2
        if out_of_memory:
            self._back.extendleft(reversed(seats))
        else:
            self._groups.extendleft([seats[half:], seats[:half]])
        self._emit(BatchSplit(number, len(seats), cause, out_of_memory, self._clock()))
        return 0

    def _fail_all(self, cause: BaseException) -> int:
        """Fail those in the engine."""
        if isinstance(cause, (KeyboardInterrupt, SystemExit, StopIteration, asyncio.CancelledError)):
            cause = ProcessError(f"step() raised {type(cause).__name__}: {text_of(cause)}")
        failed = 0
        for seat in self._slots:
            self._leave(seat.key)
            seat.entry.home = None
            failed += fail([seat.entry], cause)
        return failed

    def _abandon(self, cause: BaseException) -> None:
        """Fail whoever is still there."""
        self._admission.refuse_all(cause)
        self._meter.left += self._lineup.size
        fail(self._lineup.clear(), cause)
        for seat in (*self._slots, *self._back, *(seat for group in self._groups for seat in group)):
            seat.entry.home = None
            fail([seat.entry], cause)
        self._back.clear()
        self._groups.clear()

    def _count_in_flight(self) -> None:
        self._meter.in_flight = len(self._slots) + len(self._back) + sum(map(len, self._groups))

    def _emit(self, event: Any) -> None:
        """Tell the listener, from the event loop itself: if it raises, the loop reports it and no record bears it."""
        if self._options.listener is not None and not self._ended:
            asyncio.get_running_loop().call_soon(self._options.listener, event)
