"""Plays the lists of all stages of a pipeline over links that behave as NCCL's may; knows no torch
and no process.

No tags: on each directed link the first send meets the first receive. A send ends only with its
receive (rendezvous). Transfers of one stage that wait in one queue take their turns.
"""

from collections import defaultdict, deque
from itertools import groupby
from typing import NamedTuple

from megatron.config.plan.schedules import Action, Schedule

RULES = ("blocking", "batches", "pairs")


class Deadlock(AssertionError):
    """Every stage waits for ever."""


class NotMade(AssertionError):
    """A tensor is sent before it is made."""


class Played(NamedTuple):
    """What was seen: time of the last end; per stage, most forwards without their backward and most
    unused inputs."""

    seconds: float
    alive: list[int]
    waiting_inputs: list[int]


class Unit:
    """Transfers that one stage starts together: over when all are."""

    def __init__(self, stage: int, steps: list[Action], queue: "deque[Unit]", issued: float):
        self.stage = stage
        self.steps = steps
        self.queue = queue
        self.issued = issued
        self.missing = len(steps)
        self.end = issued


def is_transfer(step: Action) -> bool:
    return step.peer is not None


class Pipeline:
    """The stages at work.

    rule: "blocking", each transfer is waited for where it stands, one by one; "batches", transfers
    side by side in a list start together, the batches of a stage one after the other, and a
    computation waits for the batch that holds its input; "pairs", the transfers between two stages
    one after the other, activations apart from gradients, and a computation waits for its input
    alone.
    """

    def __init__(
        self,
        lists: list[Schedule],
        chunks: int,
        rule: str,
        forward: float,
        backward: float,
        latency: float,
    ):
        self.lists = lists
        self.chunks = chunks
        self.rule = rule
        self.latency = latency
        self.cost = {"forward": forward, "backward": backward}
        stages = len(lists)
        self.programs = [self.grouped(steps) for steps in lists]
        self.at = [0] * stages
        self.clock = [0.0] * stages
        self.queues: dict[tuple, deque[Unit]] = defaultdict(deque)
        self.posted: dict[tuple, deque[tuple[float, Action, Unit]]] = defaultdict(deque)
        self.arrived: dict[tuple, float] = {}
        self.blocked_on: list[Unit | None] = [None] * stages
        self.alive = [set() for _ in lists]
        self.most_alive = [0] * stages
        self.unused = [0] * stages
        self.most_unused = [0] * stages
        self.awake = deque(range(stages))
        self.last = 0.0

    def grouped(self, steps: Schedule) -> list[list[Action]]:
        """A stage's list in parts that start together."""
        if self.rule != "batches":
            return [[step] for step in steps]
        groups = ((moves, list(group)) for moves, group in groupby(steps, is_transfer))
        return [
            part
            for moves, group in groups
            for part in ([group] if moves else [[step] for step in group])
        ]

    def play(self) -> Played:
        """AssertionError if all wait for ever, two ends mean different tensors, or an input or
        output is lacking."""
        while self.awake:
            self.advance(self.awake.popleft())
        stuck = {s: self.programs[s][i] for s, i in enumerate(self.at) if i < len(self.programs[s])}
        if stuck:
            raise Deadlock(stuck)
        left = [unit.steps for queue in self.queues.values() for unit in queue]
        assert not left and not self.arrived, f"never met: {left}, never used: {list(self.arrived)}"
        return Played(max([self.last, *self.clock]), self.most_alive, self.most_unused)

    def advance(self, stage: int) -> None:
        """Let a stage do what it can."""
        program = self.programs[stage]
        while self.at[stage] < len(program):
            if unit := self.blocked_on[stage]:
                if unit.missing:
                    return
                self.clock[stage], self.blocked_on[stage] = unit.end, None
            part = program[self.at[stage]]
            if is_transfer(part[0]):
                self.issue(stage, part)
            elif not self.compute(stage, part[0]):
                return
            self.at[stage] += 1
        if (unit := self.blocked_on[stage]) and not unit.missing:
            self.blocked_on[stage] = None

    def compute(self, stage: int, step: Action) -> bool:
        """Is its input there? Then the step is done."""
        virtual = step.chunk * len(self.lists) + stage
        forward = step.kind == "forward"
        mine = (step.micro_batch, step.chunk)
        if virtual > 0 if forward else virtual < len(self.lists) * self.chunks - 1:
            key = (stage, "activation" if forward else "gradient", *mine)
            if key not in self.arrived:
                return False
            self.clock[stage] = max(self.clock[stage], self.arrived.pop(key))
            self.unused[stage] -= 1
        if forward:
            assert mine not in self.alive[stage], f"{step} twice"
            self.alive[stage].add(mine)
            self.most_alive[stage] = max(self.most_alive[stage], len(self.alive[stage]))
        else:
            self.alive[stage].remove(mine)
        self.clock[stage] += self.cost[step.kind]
        return True

    def issue(self, stage: int, steps: list[Action]) -> None:
        """Start transfers: they join the queue, and begin when they are its head."""
        pairs = (
            (stage, steps[0].peer, steps[0].kind.split("_")[1])
            if self.rule == "pairs"
            else (stage,)
        )
        unit = Unit(stage, steps, self.queues[pairs], self.clock[stage])
        if self.rule == "blocking":
            self.blocked_on[stage] = unit
        unit.queue.append(unit)
        if unit.queue[0] is unit:
            self.begin(unit, unit.issued)

    def begin(self, unit: Unit, now: float) -> None:
        """Every transfer of the head of a queue is posted; the first of each end of a link meet."""
        for step in unit.steps:
            verb, what = step.kind.split("_")
            ends = (unit.stage, step.peer) if verb == "send" else (step.peer, unit.stage)
            link = (*ends, what) if self.rule == "pairs" else ends
            others = self.posted["receive" if verb == "send" else "send", *link]
            if not others:
                self.posted[verb, *link].append((now, step, unit))
                continue
            then, other, its_unit = others.popleft()
            sent, sender, taken, taker = (
                (step, unit, other, its_unit) if verb == "send" else (other, its_unit, step, unit)
            )
            self.check(sent, sender.stage, taken, taker.stage)
            for part in (unit, its_unit):
                part.missing -= 1
                part.end = max(part.end, now + self.latency, then + self.latency)
            self.finish(its_unit)
        self.finish(unit)

    def check(self, sent: Action, source: int, taken: Action, target: int) -> None:
        """Do both ends mean one tensor, and has the sender made it?"""
        ahead = 1 if sent.kind == "send_activation" else -1
        virtual = sent.chunk * len(self.lists) + source + ahead
        want = Action(
            sent.kind.replace("send", "receive"),
            sent.micro_batch,
            virtual // len(self.lists),
            source,
        )
        assert virtual % len(self.lists) == target and taken == want, (
            f"{source} sends {sent}, {target} takes {taken}"
        )
        maker = Action("forward" if ahead == 1 else "backward", sent.micro_batch, sent.chunk)
        if self.lists[source].index(maker) > self.lists[source].index(sent):
            raise NotMade(f"{source} sends {sent}")

    def finish(self, unit: Unit) -> None:
        """Once all its transfers are over, the unit's inputs may be used and the next one
        begins."""
        if unit.missing or not unit.queue or unit.queue[0] is not unit:
            return
        unit.queue.popleft()
        self.last = max(self.last, unit.end)
        for step in unit.steps:
            if step.kind.startswith("receive"):
                self.arrived[unit.stage, step.kind.split("_")[1], step.micro_batch, step.chunk] = (
                    unit.end
                )
                self.unused[unit.stage] += 1
                self.most_unused[unit.stage] = max(
                    self.most_unused[unit.stage], self.unused[unit.stage]
                )
        self.awake.append(unit.stage)
        if unit.queue:
            self.begin(unit.queue[0], max(unit.queue[0].issued, unit.end))


def play(
    lists: list[Schedule],
    chunks: int = 1,
    rule: str = "blocking",
    forward: float = 1,
    backward: float = 2,
    latency: float = 0,
) -> Played:
    """Play the lists; `forward`, `backward` and `latency` are the seconds of a computation and of a
    transfer."""
    return Pipeline(lists, chunks, rule, forward, backward, latency).play()
