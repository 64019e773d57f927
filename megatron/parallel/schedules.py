"""Pipeline schedules (1F1B, interleaved 1F1B, forward only) as pure functions from sizes to lists
of actions per stage, without tensors or processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from megatron.config.plan.stages import check_micro_batches, warm_up_forwards


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
ActionGroups = Sequence[Sequence[Action]]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021): a stage keeps the activations of at most `stages - stage`
    micro-batches alive.

    With one stage that is forward and backward of each micro-batch in turn: gradient accumulation.
    """
    return _alternate(
        [(i, 0) for i in range(micro_batches)], 1, warm_up_forwards(stage, stages, micro_batches)
    )


def interleaved(
    stage: int, stages: int, micro_batches: int, chunks: int, group: int | None = None
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021): `group` micro-batches (default: `stages`) pass a
    chunk, then the next chunk, and so on.

    Backward takes the chunks from the last to the first. Raises ValueError unless the groups fit
    (`check_micro_batches`).
    """
    check_micro_batches(micro_batches, stages, chunks, group)
    return _alternate(
        _in_groups(group or stages, micro_batches, chunks),
        chunks,
        warm_up_forwards(stage, stages, micro_batches, chunks, group),
    )


def _in_groups(group: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of an interleaved schedule's forwards; the last group may
    be smaller."""
    return [
        (i, chunk)
        for start in range(0, micro_batches, group)
        for chunk in range(chunks)
        for i in range(start, min(start + group, micro_batches))
    ]


def _alternate(order: list[tuple[int, int]], chunks: int, warm_up: int) -> Schedule:
    """`warm_up` forwards, then forward and backward in turn, then the remaining backwards.

    The first backward can start when the first micro-batch has passed the last stage: the stage
    fills that time with forwards. From then on every backward frees what one forward keeps, so no
    more than `warm_up` + 1 forwards are ever alive, however many micro-batches there are.
    """
    forwards = [Action("forward", m, chunk) for m, chunk in order]
    backwards = [Action("backward", m, chunks - 1 - chunk) for m, chunk in order]
    steady = len(order) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [
        *forwards[:warm_up],
        *(action for pair in pairs for action in pair),
        *backwards[steady:],
    ]


def compute_order(
    stage: int,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    forward_only: bool = False,
    group: int | None = None,
) -> Schedule:
    """The forwards and backwards of a stage in order: interleaved with more than one chunk, else
    1F1B."""
    if forward_only:
        check_micro_batches(micro_batches, stages, chunks, group)
        order = (
            _in_groups(group or stages, micro_batches, chunks)
            if chunks > 1
            else [(i, 0) for i in range(micro_batches)]
        )
        return [Action("forward", m, chunk) for m, chunk in order]
    if chunks == 1:
        return one_forward_one_backward(stage, stages, micro_batches)
    return interleaved(stage, stages, micro_batches, chunks, group)


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
        compute_order(stage, stages, micro_batches, chunks, forward_only, group)
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


def neighbour(
    action: Action, stage: int, stages: int, chunks: int, ahead: int
) -> tuple[int, Action] | None:
    """(stage, action) that takes the result of a computation (`ahead` 1) or makes its input (-1);
    None at the ends."""
    virtual = action.chunk * stages + stage + (ahead if action.kind == "forward" else -ahead)
    if not 0 <= virtual < stages * chunks:
        return None
    return virtual % stages, action._replace(chunk=virtual // stages)


def timetable(
    rounds: Sequence[ActionGroups], chunks: int, forward: float = 1, backward: float = 2
) -> list[list[tuple[float, float]]]:
    """(start, end) of each round of each stage, as early as can be: computations take so long,
    transfers no time.

    A round takes all its inputs when it starts, and gives all its results when it ends.
    """
    stages = len(rounds)
    next_round = [0] * len(rounds)
    times: list[list[tuple[float, float]]] = [[] for _ in rounds]
    ready: dict[tuple[int, Action], float] = {}
    while any(next_round[stage] < len(rounds[stage]) for stage in range(stages)):
        before = list(next_round)
        # each stage goes on until it lacks an input that another has not computed yet
        for stage, stage_rounds in enumerate(rounds):
            while next_round[stage] < len(stage_rounds):
                actions = stage_rounds[next_round[stage]]
                inputs = [
                    source
                    for action in actions
                    if (source := neighbour(action, stage, stages, chunks, -1))
                ]
                if not all(source in ready for source in inputs):
                    break
                free = times[stage][-1][1] if times[stage] else 0
                start = max([free, *(ready[source] for source in inputs)])
                end = start + sum(
                    forward if action.kind == "forward" else backward for action in actions
                )
                ready |= {(stage, action): end for action in actions}
                times[stage].append((start, end))
                next_round[stage] += 1
        assert next_round != before, f"deadlock: no stage can proceed: {next_round}"
    return times


def _with_transfers(rounds: Sequence[ActionGroups], chunks: int) -> list[Schedule]:
    """The rounds, and at the end of each its sends; there, or in the first gap after it, stand the
    receives."""
    times = timetable(rounds, chunks)
    starts = [[start for start, _ in stage_times] for stage_times in times]
    # gaps[stage][i]: the transfers that stand before round i
    gaps: list[list[Schedule]] = [[[] for _ in range(len(stage) + 1)] for stage in rounds]
    ends = []
    for stage, stage_times in enumerate(times):
        ends += [(end, stage, i) for i, (_, end) in enumerate(stage_times)]
    # In the order of the timetable, so that both ends of a link list its transfers alike.
    for end, stage, i in sorted(ends):
        for action in rounds[stage][i]:
            if taker := neighbour(action, stage, len(rounds), chunks, 1):
                peer, twin = taker
                tensor = "activation" if action.kind == "forward" else "gradient"
                gaps[stage][i + 1].append(
                    Action(f"send_{tensor}", action.micro_batch, action.chunk, peer)
                )
                gaps[peer][bisect_left(starts[peer], end)].append(
                    Action(f"receive_{tensor}", twin.micro_batch, twin.chunk, stage)
                )
    schedules = []
    for stage_rounds, stage_gaps in zip(rounds, gaps, strict=True):
        actions = list(stage_gaps[0])
        for computations, transfers in zip(stage_rounds, stage_gaps[1:], strict=True):
            actions += [*computations, *transfers]
        schedules.append(actions)
    return schedules
