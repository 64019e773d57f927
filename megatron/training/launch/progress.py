"""For how long a rank has made no progress, and whether it computes. Time is counted in looks of a
thread, so that a machine that sleeps, or a process that is stopped, does not hang."""

import contextlib
import glob
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from megatron.training.launch.hang_limits import HangAction, HangLimits, RankState, RunPhase, decide
from megatron.training.launch.process import START_UP, frames_of, mib_moved, this_process

TICK = 1.0  # seconds between looks
LATEST = 6  # looks, by which a process is judged
# of the time, in which a thread that computes has a core or waits for one; threads that only wake
# up now and then have less, also on a busy machine
COMPUTES_SHARE = 0.2


class Clock:
    """Seconds in which this process could run: `now` is to be called once per TICK, and of a longer
    gap (the machine slept, say) two TICKs count."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._latest = time.monotonic()

    def now(self) -> float:
        """Since an arbitrary time."""
        before, self._latest = self._latest, time.monotonic()
        self._seconds += min(max(0.0, self._latest - before), 2 * TICK)
        return self._seconds


class StackSample(NamedTuple):
    """What the threads of this process do at a look: the stacks of Python, and the seconds that
    each thread, also of its data workers, has had a core or waited for one."""

    stacks: frozenset[tuple[int, tuple[int, ...]]]
    seconds: dict[str, float]


def sample() -> StackSample:
    """That of now, without this thread."""
    watching = threading.get_ident(), f"/task/{threading.get_native_id()}/"
    stacks = frozenset(
        (ident, tuple(caller.f_lasti for caller in frames_of(frame)))
        for ident, frame in sys._current_frames().items()
        if ident != watching[0]
    )
    pids = ["self"]
    for file in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(file) as children:
            pids += children.read().split()
    seconds = {}
    for file in (file for pid in pids for file in glob.glob(f"/proc/{pid}/task/*/schedstat")):
        with contextlib.suppress(OSError, ValueError), open(file) as times:
            has_core, waits_for_core, _ = map(int, times.read().split())
            if watching[1] not in file:
                seconds[file] = (has_core + waits_for_core) / 1e9
    return StackSample(stacks, seconds or {"/proc/self/": time.process_time()})


class RankProgress:
    """Phase and progress of this rank; `look` is to be called once per TICK."""

    def __init__(self, limits: HangLimits):
        self.limits = limits
        # the actions of the pipeline that are done, say
        self.progress: Callable[[], int] = lambda: 0
        # a thread that waits for an accelerator uses the CPU
        self.has_accelerator = True
        self._phase = RunPhase(START_UP, limit=limits.startup)
        self._last = (self._phase, 0, 0)  # phase and progress at the last look
        self._ticks = 0  # since progress
        self._samples: deque[StackSample] = deque(maxlen=LATEST)
        self._main = threading.main_thread().ident or 0  # it has one, since it runs

    def begin(self, phase: RunPhase) -> None:
        """This rank is in `phase` from now on."""
        self._phase = phase

    def _look(self) -> None:
        phase = self._phase
        now = (phase, self.progress(), mib_moved() if phase.announced else 0)
        self._ticks = self._ticks + 1 if now == self._last else 0
        self._last = now
        if not self._ticks:
            self._samples.clear()
        if phase.limit is not None and (self._ticks + LATEST) * TICK > phase.limit:
            self._samples.append(sample())

    def _computes(self) -> bool:
        """Has a thread computed in the latest looks at which there was no progress? With an
        accelerator one of this process has if it is at another place of the code."""
        if self.has_accelerator and len({sample.stacks for sample in self._samples}) > 1:
            return True
        if len(self._samples) < 2:
            return False
        before, now = self._samples[0].seconds, self._samples[-1].seconds
        seconds = [
            now[thread] - before.get(thread, 0.0)
            for thread in now
            if not (self.has_accelerator and thread.startswith("/proc/self/"))
        ]
        return max(seconds, default=0.0) > COMPUTES_SHARE * TICK * (len(self._samples) - 1)

    def _state(self) -> RankState:
        seconds = self._ticks * TICK if self._last[0] == self._phase else 0.0
        return RankState(seconds, self._phase.limit, computes=self._computes())

    def _main_frames(self) -> list[FrameType]:
        """Those of the main thread, outermost first."""
        return frames_of(sys._current_frames()[self._main])


class OwnWatch(RankProgress):
    """In the place of a `rank_monitor.MonitorClient` where a run has one rank: a thread that warns
    about it, once for each phase."""

    def __init__(self, limits: HangLimits):
        super().__init__(limits)
        self._warned: RunPhase | None = None
        threading.Thread(target=self._run, name="hang watch", daemon=True).start()

    def report(self, text: str, code: int = 1) -> None:
        """There is no other rank to notify."""

    def _run(self) -> None:
        while True:
            time.sleep(TICK)
            self._look()
            state = self._state()
            if decide({0: state}, 1).action is HangAction.WARN and self._warned != self._phase:
                self._warned = self._phase
                self._warn(state)

    def _warn(self, state: RankState) -> None:
        from megatron.training.launch import hang

        answer = hang.describe(str(self._phase), self._main_frames())
        text = hang.failure(this_process(), state.seconds, answer).text
        remedy = "it computes" if state.computes else "it waits; Ctrl-C ends it"
        print(f"WARNING: {this_process()} {text}; {remedy}", file=sys.stderr)
        if not state.computes:
            print(answer["stack"].rstrip(), file=sys.stderr, flush=True)
