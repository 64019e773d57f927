"""Pipeline schedules (1F1B, interleaved 1F1B, forward only) as pure functions from sizes to lists
of actions per stage, without tensors or processes; and what the plan measures of these lists."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from megatron.config.plan.stages import check_micro_batches

# of a stage, each of which holds a tensor
SENDS_UNDER_WAY = 4
# A pipeline of more stages is like one of so many, but for what each PERIOD of stages adds:
# gradients run ahead of the last stage by one in 3 stages, or in 5 without overlap.
DEEP = 30
PERIOD = 15


class Action(NamedTuple):
    """What a stage does for one micro-batch in one of its chunks (virtual stages).

    `forward` and `backward` compute; send_activation, receive_activation, send_gradient and
    receive_gradient move the output or input of `chunk` to or from the stage `peer`, or its
    gradient.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    peer: int | None = None


Schedule = list[Action]
# from a virtual stage to the one that takes its result
DIRECTION = {"forward": 1, "backward": -1}
ActionGroups = Sequence[Sequence[Action]]


def _in_groups(group: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of an interleaved schedule's forwards; the last group may
    be smaller."""
    return [
        (i, chunk)
        for start in range(0, micro_batches, group)
        for chunk in range(chunks)
        for i in range(start, min(start + group, micro_batches))
    ]


def warm_up_forwards(
    stage: int, stages: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> int:
    """Forwards (of one chunk each) that a stage does before it alternates forward and backward, as
    in Megatron: until the first micro-batch can be back from the last stage."""
    after = stages - stage - 1
    turns = (chunks - 1) * (group or stages)
    return min(after if chunks == 1 else 2 * after + turns, micro_batches * chunks)


def _kinds(
    stage: int, stages: int, micro_batches: int, chunks: int, group: int | None
) -> list[str]:
    """The kinds of a stage's computations in order: the warm-up, then forward and backward in turn,
    then the remaining backwards."""
    warm_up = warm_up_forwards(stage, stages, micro_batches, chunks, group)
    steady = micro_batches * chunks - warm_up
    return ["forward"] * warm_up + ["forward", "backward"] * steady + ["backward"] * warm_up


def compute_order(
    stage: int,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    group: int | None = None,
    forward_only: bool = False,
) -> Schedule:
    """The forwards and backwards of a stage in order: 1F1B, or with more than one chunk interleaved
    (Narayanan et al. 2021).

    With one stage that is forward and backward of each micro-batch in turn: gradient accumulation.
    Interleaved, `group` micro-batches (default: `stages`) pass a chunk, then the next chunk, and so
    on; backward takes the chunks from the last to the first. Raises ValueError unless the groups
    fit (`check_micro_batches`).
    """
    check_micro_batches(micro_batches, stages, chunks, group)
    size = micro_batches if chunks == 1 else group or stages
    order = _in_groups(size, micro_batches, chunks)
    forwards = [Action("forward", m, chunk) for m, chunk in order]
    if forward_only:
        return forwards
    backwards = [Action("backward", m, chunks - 1 - chunk) for m, chunk in order]
    following = {"forward": iter(forwards), "backward": iter(backwards)}
    kinds = _kinds(stage, stages, micro_batches, chunks, group)
    return [next(following[kind]) for kind in kinds]


def schedule(
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    forward_only: bool = False,
    overlap: bool = True,
    group: int | None = None,
) -> list[Schedule]:
    """All that each stage does, transfers too: `schedule(...)[stage]`.

    Every transfer has a moment in one timetable of the whole pipeline (a backward takes twice as
    long as a forward), and each stage lists its transfers and computations in the order of that
    timetable. So nobody waits in a circle even where a send ends only with its receive, and two
    stages that exchange tensors without tags name them in the same order. Transfers that stand side
    by side may be started together or one after the other.

    With `overlap` a result is sent as soon as it is computed and a receive is posted as early as
    possible, to overlap with the computations that follow: only the computation that takes it has
    to wait for it. Without, a stage that alternates exchanges once per forward and backward of an
    interleaved schedule, and then waiting for each transfer where it stands costs nothing."""
    if chunks > 1 and stages == 1:
        raise ValueError(
            f"{chunks} virtual stages on the only stage of a pipeline: give one, or at least 2 "
            "stages"
        )
    orders = [
        compute_order(stage, stages, micro_batches, chunks, group, forward_only)
        for stage in range(stages)
    ]
    rounds: list[ActionGroups] = [[(action,) for action in order] for order in orders]
    if chunks > 1 and not (overlap or forward_only):
        rounds = [
            _paired(order, warm_up_forwards(stage, stages, micro_batches, chunks, group))
            for stage, order in enumerate(orders)
        ]
    return _with_transfers(rounds, chunks)


def _paired(order: Schedule, warm_up: int) -> ActionGroups:
    """The actions of an order in rounds: one by one, and in pairs where forward and backward
    alternate."""
    end = len(order) - warm_up
    pairs = [tuple(order[i : i + 2]) for i in range(warm_up, end, 2)]
    return [
        *((action,) for action in order[:warm_up]),
        *pairs,
        *((action,) for action in order[end:]),
    ]


def timetable(
    rounds: Sequence[ActionGroups], chunks: int, forward: float = 1, backward: float = 2
) -> list[list[tuple[float, float]]]:
    """(start, end) of each round of each stage, as early as can be: computations take so long,
    transfers no time.

    A round takes all its inputs when it starts, and gives all its results when it ends.
    """
    stages = len(rounds)
    seconds = {"forward": forward, "backward": backward}
    times: list[list[tuple[float, float]]] = [[] for _ in rounds]
    # by (virtual stage, kind, micro-batch): when a computation is done
    done: dict[tuple[int, str, int], float] = {}
    while any(len(times[stage]) < len(rounds[stage]) for stage in range(stages)):
        before = len(done)
        # Each stage goes on until it lacks an input that another has not computed yet. Up and down:
        # forwards pass all stages in one sweep, and backwards, too.
        for stage in (*range(stages), *reversed(range(stages))):
            stage_times = times[stage]
            while len(stage_times) < len(rounds[stage]):
                actions = rounds[stage][len(stage_times)]
                start = stage_times[-1][1] if stage_times else 0
                names = []
                for kind, micro_batch, chunk, _ in actions:
                    virtual = chunk * stages + stage
                    names.append((virtual, kind, micro_batch))
                    source = virtual - DIRECTION[kind]
                    if 0 <= source < stages * chunks:
                        start = max(start, done.get((source, kind, micro_batch), math.inf))
                if start == math.inf:
                    break
                end = start + sum(seconds[action.kind] for action in actions)
                for name in names:
                    done[name] = end
                stage_times.append((start, end))
        assert len(done) > before, "deadlock: no stage can proceed"
    return times


def _with_transfers(rounds: Sequence[ActionGroups], chunks: int) -> list[Schedule]:
    """The rounds, and at the end of each its sends; there, or in the first gap after it, stand the
    receives."""
    stages = len(rounds)
    times = timetable(rounds, chunks)
    starts = [[start for start, _ in stage_times] for stage_times in times]
    # gaps[stage][i]: the transfers that stand before round i
    gaps: list[list[Schedule]] = [[[] for _ in range(len(stage) + 1)] for stage in rounds]
    ends = []
    for stage, stage_times in enumerate(times):
        ends += [(end, stage, i) for i, (_, end) in enumerate(stage_times)]
    # In the order of the timetable, so that both ends of a link list its transfers alike.
    for end, stage, i in sorted(ends):
        for kind, micro_batch, chunk, _ in rounds[stage][i]:
            taker = chunk * stages + stage + DIRECTION[kind]
            if 0 <= taker < stages * chunks:
                taker_chunk, peer = divmod(taker, stages)
                tensor = "activation" if kind == "forward" else "gradient"
                send = Action(f"send_{tensor}", micro_batch, chunk, peer)
                receive = Action(f"receive_{tensor}", micro_batch, taker_chunk, stage)
                gaps[stage][i + 1].append(send)
                gaps[peer][bisect_left(starts[peer], end)].append(receive)
    schedules = []
    for stage_rounds, stage_gaps in zip(rounds, gaps, strict=True):
        actions = list(stage_gaps[0])
        for computations, transfers in zip(stage_rounds, stage_gaps[1:], strict=True):
            actions += [*computations, *transfers]
        schedules.append(actions)
    return schedules


@lru_cache(maxsize=4096)
def activations_alive(
    stage: int, stages: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> int:
    """The most (micro-batch, chunk) pairs whose activations a stage holds at a time."""
    # More micro-batches make the steady state longer, in which none is added.
    few = min(micro_batches, 2 * max(stages, group or 0))
    kinds = _kinds(stage, stages, few, chunks, group)
    return max(accumulate(1 if kind == "forward" else -1 for kind in kinds))


def _small(
    stages: int, micro_batches: int, chunks: int, group: int | None, depth: int
) -> tuple[int, int, int, int | None]:
    """The sizes of a pipeline of `depth` stages with the same steady state, and at most two periods
    of micro-batches (and what the last group has): more only make that state longer."""
    if chunks == 1:
        return depth, min(micro_batches, 2), 1, None
    groups, rest = divmod(micro_batches, group or stages)
    period = depth if group is None or depth < stages else group
    return depth, min(groups, 2) * period + rest, chunks, period


def _by_depth(measure: Callable[[int], float], stages: int, group: int | None) -> float:
    """`measure(stages)`; of a deep pipeline from what PERIOD stages more add. That is not the same
    for each where groups are larger than the pipeline is deep."""
    if stages <= DEEP or group not in (None, stages):
        return measure(stages)
    depth = DEEP + stages % PERIOD
    periods = (stages - depth) // PERIOD
    return measure(depth) + periods * (measure(depth) - measure(depth - PERIOD))


@lru_cache(maxsize=64)
def _waiting(
    stages: int, micro_batches: int, chunks: int, group: int | None, overlap: bool
) -> list[int]:
    """By stage, the most messages that wait while it computes."""
    taker = {"receive_activation": "forward", "receive_gradient": "backward"}
    most = [0] * stages
    lists = schedule(stages, micro_batches, chunks, group=group, overlap=overlap)
    for stage, actions in enumerate(lists):
        waiting = set()
        for kind, micro_batch, chunk, peer in actions:
            if kind in taker:
                waiting.add((taker[kind], micro_batch, chunk))
            elif peer is None:
                waiting.discard((kind, micro_batch, chunk))
                most[stage] = max(most[stage], len(waiting))
    return most


def messages_waiting(
    stage: int,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    group: int | None = None,
    overlap: bool = True,
) -> int:
    """The most hidden states and gradients that a stage holds because they are being sent or wait
    for their computation; at least the one that is taken. (Of a deep pipeline with one group of
    micro-batches the stage in the middle may have one less.)"""
    if stages == 1:
        return 0

    def measure(depth: int) -> int:
        # as far from the nearer end, or far from both
        quarter = depth if depth == stages else depth // 4
        place = min(stage, quarter) if stage < stages // 2 else max(stage - stages, -quarter)
        return _waiting(*_small(stages, micro_batches, chunks, group, depth), overlap)[place]

    return max(1, int(_by_depth(measure, stages, group))) + (SENDS_UNDER_WAY if overlap else 0)


def bubble_fraction(
    stages: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> float:
    """Idle time of a stage as a share of its working time, where a backward takes twice as long as
    a forward."""

    def idle(depth: int) -> float:
        small = _small(stages, micro_batches, chunks, group, depth)
        orders = [compute_order(stage, *small) for stage in range(depth)]
        times = timetable([[(action,) for action in order] for order in orders], chunks)
        return max(stage_times[-1][1] for stage_times in times) - 3 * small[1] * chunks

    return _by_depth(idle, stages, group) / (3 * micro_batches * chunks)
