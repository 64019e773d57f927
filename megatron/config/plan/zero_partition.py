"""Assignment of whole parameters to the ranks of the sharded optimizer."""

import math
from collections import Counter
from collections.abc import Sequence

from megatron.config.muon import MuonConfig
from megatron.config.plan.buckets import Owners, Partition, Shared
from megatron.config.plan.muon_matrices import stacks

SLACK = 101, 100  # a rank is full with this share of the mean: 1.01


def whole_matrices(config: MuonConfig, params: Sequence[Shared]) -> Partition:
    """Each weight that Muon updates to the rank that has least to compute so far, the most costly
    first; the rest is shared in equal ranges. Before them weights of experts, which are many
    matrices: rank after rank takes as many as make its share.

    Costs are those of matrix products, of which the orthogonalization consists.
    """
    costs = [
        sum(stack.cost for stack in stacks(config, param.matrices, param.shape)) for param in params
    ]
    owners: list[Owners] = [()] * len(params)
    # by whether they are experts: rank 0 of those need not be rank 0 of the others
    loads = {param.experts: [0] * param.shards for param in params}
    experts = [
        number
        for number, param in enumerate(params)
        if costs[number] and param.matrices is not None and param.matrices.stacked
    ]
    total = sum(costs[number] for number in experts)
    done = 0
    for number in experts:
        param = params[number]
        cost = costs[number] // param.local_shape[0]
        owner_of_each = []
        for _ in range(param.local_shape[0]):
            # All matrices side by side on a line as long as their cost, cut into as many equal
            # ranges as there are ranks: a matrix goes where its middle lies.
            owner_of_each.append((2 * done + cost) * param.shards // (2 * total))
            loads[param.experts][owner_of_each[-1]] += cost
            done += cost
        size = math.prod(param.local_shape[1:])
        owners[number] = tuple((n * size, owner) for owner, n in Counter(owner_of_each).items())
    for number in sorted(range(len(params)), key=lambda number: -costs[number]):
        param = params[number]
        if not costs[number] or owners[number]:
            continue
        load = loads[param.experts]
        owner = load.index(min(load))
        load[owner] += costs[number]
        owners[number] = ((math.prod(param.local_shape), owner),)
    costs_by_rank = tuple(tuple(load) for load in loads.values() if any(load))
    return Partition(tuple(range(len(params))), tuple(owners), frozenset(experts), costs_by_rank)


def whole_parameters(
    names: Sequence[str], shapes: Sequence[Sequence[int]], ranks: int
) -> Partition:
    """Walk the parameters, which are named in the model's order, and go to the next rank when one
    has its share.

    The walk has attention first, then both norms, then the MLP, whose gate and up matrices count
    as two parameters. A parameter with which a rank passes 1.01 of the
    mean goes to the next rank, uncounted.
    """
    order = sorted(range(len(names)), key=lambda number: _rank_in_walk(names, number))
    matrix_sizes = [
        [math.prod(shape[1:])] * shape[0] if len(shape) == 3 else [math.prod(shape)]
        for shape in shapes
    ]
    mean = sum(map(sum, matrix_sizes)) // ranks
    owners: list[Owners] = [()] * len(names)
    owner = elements = 0
    for number in order:
        for size in matrix_sizes[number]:
            elements += size
            if elements * SLACK[1] > mean * SLACK[0] and owner < ranks - 1:
                owner = owner + 1
                elements = 0
            owners[number] += ((size, owner),)
    return Partition(tuple(order), tuple(owners))


def _rank_in_walk(names: Sequence[str], number: int) -> tuple[int, int]:
    """Where a parameter comes: the norm before attention right before the one behind it, all others
    as they are."""
    block, separator, _ = names[number].partition("input_layernorm.")
    if not separator:
        return number, 0
    behind = [
        index for index, text in enumerate(names) if text.startswith(block + "pre_mlp_layernorm.")
    ]
    return behind[0], number - behind[0]
