"""The loop that keeps a step-wise engine full: finished records free their slots before the next step."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import deque

from headrace.batching.dispatch.isolation import should_split
from headrace.batching.dispatch.loop import DispatchContext, DispatchLoop
from headrace.batching.dispatch.offload import CallTimer, WorkerThread
from headrace.batching.foreign_calls import Raised, attempt, must_propagate
from headrace.batching.pending import QueueEntry, fail, resolve
from headrace.batching.policy.growth import Growth
from headrace.batching.policy.slots import SlotEntry, Slots
from headrace.batching.step_model import AnyStepModel, SharingStepModel, StepCall, group_of
from headrace.device_errors import is_out_of_memory
from headrace.errors import ProcessError, ProcessTimeoutError, text_of
from headrace.events import BatchSplit, StepDone

logger = logging.getLogger("headrace")


class StepScheduler(DispatchLoop):
    """Owns every record from its slot assignment until its result.

    Free slots go to evicted records first, then to the groups of a split failed step, one group at a time, and then to
    records from the waiting queue.
    """

    def __init__(
        self, context: DispatchContext, model: AnyStepModel, max_slots: int, growth: Growth | None = None
    ) -> None:
        super().__init__(context)
        self._model = model
        self._slots = Slots(max_slots, self._options.limits.target_batch_cost, growth)
        self._fitting: float = math.inf
        """The most records in the engine since it ran out of memory."""
        self._evicted: deque[SlotEntry] = deque()
        self._groups: deque[list[SlotEntry]] = deque()
        self._alone = False
        self._no_room: tuple[QueueEntry, float, float] | None = None
        """The next record if it had no room since the last one left, with its shared cost and the cost of all then."""
        self._leaving: set[int] = set()
        self._joining: list[SlotEntry] = []
        self._idle_since = self._clock()
        self._worker: WorkerThread | None = None

    # -- called by the submission side -------------------------------------------------------------------------

    def arrived(self, cost: float) -> None:  # noqa: ARG002  # the dispatcher of batches asks whether it is enough
        self._wakeup.wake()

    def set_max_slots(self, count: int) -> None:
        """Change the most records in the engine, as far as they fit into its memory."""
        self._slots.max_slots = min(count, self._fitting)

    def flush(self) -> None:
        """Nothing to do: steps never wait for more records."""

    def end(self) -> None:
        self._ended = True
        if self._worker is not None:
            left = [*self._leaving, *(slot.key for slot in self._slots.clear())]
            if left:  # another batcher may still use the engine
                self._worker.run(asyncio.get_running_loop(), lambda *_: [self._model.remove(key) for key in left])
            self._worker.close()

    def discard(self, entry: QueueEntry) -> None:
        """Remove a cancelled record that has or had a slot; it leaves before the next step."""
        entry.holder = None
        slot = self._slots.find(entry)
        if slot is not None:
            self._leave(slot.key)
        for waiting in (self._evicted, *self._groups):
            for other in [other for other in waiting if other.entry is entry]:
                waiting.remove(other)
        self._count_in_flight()

    # -- the loop ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while await self._until_work():
            self._fill()
            if self._joining or self._leaving or len(self._slots):
                await self._step()

    async def _until_work(self) -> bool:
        """Wait until the engine has work; False when drained."""
        while True:
            if self._queue.size or self._evicted or self._groups or self._leaving or len(self._slots):
                return True
            if self._draining and not self._admission.waiting:
                return False
            await self._wakeup.sleep()

    def _fill(self) -> None:
        """Assign free slots, as far as the expected growth of their records fits the budget."""
        slots = self._slots
        if slots.full or not (self._queue.size or self._evicted or self._groups) or self._still_no_room():
            return
        peak = functools.cache(slots.peak)  # once, and only if they may not all fit
        while self._evicted:
            slot = self._evicted[0]
            slot.shared = self._overlap(slot.record if slot.resume is None else slot.resume)
            if not slots.takes(peak, slot):
                self._no_room = slot.entry, slot.shared, slots.held
                return
            self._join(self._evicted.popleft())
        if not len(slots):
            self._alone = bool(self._groups)
            for slot in self._groups.popleft() if self._groups else ():
                self._join(slot)
        while not self._alone and (entry := self._queue.peek()) is not None:
            found = attempt(self._slot_for, entry)
            if isinstance(found, Raised):  # by the model: it fails this record, not the loop
                if must_propagate(found.cause):
                    raise found.cause
                self._meter.taken += 1
                self._meter.failed += fail(self._take_next(), found.cause)
                continue
            if not slots.takes(peak, found):
                self._no_room = entry, found.shared, slots.held
                return
            (found.entry,) = self._take_next()
            self._join(found)
            self._meter.joined(self._clock(), found.entry.arrival)

    def _slot_for(self, entry: QueueEntry) -> SlotEntry:
        record = entry.records[0]
        slot = SlotEntry(entry, record, *self._model.span(record), group=group_of(self._model, record))
        slot.shared = self._overlap(record)
        return slot

    def _still_no_room(self) -> bool:
        """Whether no room can have appeared for the next one: no record has left, and no more is shared."""
        if self._no_room is None or not len(self._slots):
            return False
        entry, shared, held = self._no_room
        if self._evicted:
            slot = self._evicted[0]
            following, record = slot.entry, slot.record if slot.resume is None else slot.resume
        else:
            following, record = entry, entry.records[0]
            if self._queue.peek() is not entry:
                return False
        return following is entry and self._slots.held >= held and self._overlap(record) <= shared

    def _take_next(self) -> list[QueueEntry]:
        entries = self._queue.take("full_size").entries
        self._admission.admit_waiting()
        return entries

    def _join(self, slot: SlotEntry) -> None:
        self._slots.join(slot)
        self._joining.append(slot)
        slot.entry.holder = self

    def _overlap(self, record: object) -> float:
        return self._model.overlap(record) if isinstance(self._model, SharingStepModel) else 0.0

    def _leave(self, key: int) -> None:
        self._slots.leave(key)
        self._leaving.add(key)
        self._no_room = None

    async def _step(self) -> None:
        joining, self._joining = self._joining, []
        new = {slot.key for slot in joining}
        step_call = StepCall(
            leaving=sorted(self._leaving),
            joining=[(slot.key, slot.record if slot.resume is None else slot.resume) for slot in joining],
            staying={slot.key for slot in self._slots if slot.key not in new},
        )
        self._leaving.clear()
        if not len(self._slots):
            if (failure := await self._call(step_call, CallTimer())) is not None:
                logger.error("%s: the engine failed to remove a record", self._options.name, exc_info=failure)
            return
        number, size, began = self._meter.batches, len(self._slots), self._clock()
        self._count_in_flight()
        held = self._slots.held
        self._meter.step_began(began, size, held, held)
        starved = began - self._idle_since
        timer = CallTimer()
        failure = await self._call(step_call, timer)
        now = self._idle_since = self._clock()
        if self._ended:
            return
        self._meter.step_ended(now, now - began)
        completed, failed, cost = self._settle(step_call)
        evicted = 0
        if failure is not None:
            failed += self._fail(failure, number)
        else:
            evicted = self._evict()
        self._meter.completed += completed
        self._meter.failed += failed
        self._count_in_flight()
        left, took = completed + failed, now - began
        facts = number, size, len(new), left, failed, evicted, cost, took, starved, now, timer.handed_s(took)
        self._emit(StepDone, *facts)

    async def _call(self, step_call: StepCall, timer: CallTimer) -> BaseException | None:
        """Run the call on the engine's thread; returns what it raised."""
        loop = asyncio.get_running_loop()
        if self._worker is None:
            self._worker = WorkerThread(f"{self._options.name}-engine")
        running = self._worker.run(loop, lambda *_: timer.time(lambda: step_call.run(self._model)))
        timeout = self._options.process_timeout_s
        late: ProcessTimeoutError | None = None
        while timeout is not None and not (await asyncio.wait({running}, timeout=timeout))[0]:
            # The engine is stuck: fail the records in it and those in the queue.
            late = ProcessTimeoutError(
                f"step() did not return within process_timeout_s={timeout}; its results are ignored. "
                "Raise the limit or use fewer slots"
            )
            self._meter.failed += self._fail_all(late)
            self._fail_waiting(late)
            self._admission.admit_waiting()
        outcome = await running
        return outcome.cause if isinstance(outcome, Raised) else late

    # -- results of a step ---------------------------------------------------------------------------------

    def _settle(self, step_call: StepCall) -> tuple[int, int, float]:
        """Resolve the records that left the engine; returns how many succeeded, how many failed, and the cost."""
        completed = failed = 0
        cost = 0.0
        if step_call.refused or step_call.finished:
            self._no_room = None
        for waiting in self._evicted:
            waiting.resume = step_call.resumes.get(waiting.key, waiting.resume)
        for key, exc in step_call.refused:
            refused = self._slots.leave(key)
            if refused is not None:
                refused.entry.holder = None
                failed += fail([refused.entry], exc)
        for key, result in step_call.finished:
            slot = self._slots.leave(key)
            if slot is None:  # cancelled during the step
                continue
            slot.entry.holder = None
            good, bad = resolve([slot.entry], [result])
            completed += good
            failed += bad
            if good:
                self._slots.growth.finished(slot.start, slot.most, slot.held, slot.group)
                cost += slot.held
        self._slots.update(step_call.needs, step_call.shared)
        return completed, failed, cost

    def _evict(self) -> int:
        evicted = self._slots.evict()
        for slot in evicted:
            self._leaving.add(slot.key)
            self._evicted.appendleft(slot)
            self._no_room = None
        return len(evicted)

    def _fail(self, cause: BaseException, number: int) -> int:
        """Fail all records of a failed step, or split them to run again; returns how many failed."""
        slots = list(self._slots)
        if len(slots) < 2 or not should_split(cause, self._options.on_error):
            return self._fail_all(cause)
        out_of_memory = is_out_of_memory(cause)
        if out_of_memory:
            self._slots.max_slots = self._fitting = len(slots) // 2
        for slot in slots:  # the state after a failed step is unknown: restart
            self._leave(slot.key)
            slot.resume, slot.held, slot.shared = None, slot.start, 0.0
        half = len(slots) // 2
        if out_of_memory:
            self._evicted.extendleft(reversed(slots))
        else:
            self._groups.extendleft([slots[half:], slots[:half]])
        self._emit(BatchSplit, number, len(slots), cause, out_of_memory, self._clock())
        return 0

    def _fail_all(self, cause: BaseException) -> int:
        if isinstance(cause, (KeyboardInterrupt, SystemExit, StopIteration, asyncio.CancelledError)):
            cause = ProcessError(f"step() raised {type(cause).__name__}: {text_of(cause)}")
        failed = 0
        for slot in self._slots:
            self._leave(slot.key)
            slot.entry.holder = None
            failed += fail([slot.entry], cause)
        return failed

    def _abandon(self, cause: BaseException) -> None:
        self.refuse(cause)
        for slot in (*self._slots, *self._evicted, *(slot for group in self._groups for slot in group)):
            slot.entry.holder = None
            fail([slot.entry], cause)
        self._evicted.clear()
        self._groups.clear()

    def _count_in_flight(self) -> None:
        self._meter.in_flight = len(self._slots) + len(self._evicted) + sum(map(len, self._groups))
