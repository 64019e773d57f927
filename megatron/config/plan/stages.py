"""Assigns layers to pipeline stages, and says which numbers of micro-batches they take."""

from __future__ import annotations

from megatron.config.parallel import (
    CHUNKS,
    EMBEDDING,
    FIRST,
    GROUP,
    LAST,
    LAYOUT,
    LOSS,
    PATTERN,
    PER_CHUNK,
    ParallelConfig,
    Split,
)


def split(layers: int, p: ParallelConfig) -> Split:
    """The layers of each stage's chunks, as the flags but --pipeline-model-parallel-layout say.
    Raises ValueError with flags, values and remedy where there is no such split."""
    stages = p.pipeline_model_parallel_size
    ends = (p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers)
    counted = (p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split)
    chunks = chunks_per_stage(
        layers,
        stages,
        p.num_layers_per_virtual_pipeline_stage,
        p.num_virtual_stages_per_pipeline_rank,
        uneven=ends != (None, None),
        counted=sum(counted),
    )
    if any(counted):
        from megatron.config.plan.pipeline_layout import split_with_ends

        return split_with_ends(layers, stages, chunks, *counted)
    return split_layers(layers, stages, chunks, *ends)


def only_one_split(p: ParallelConfig, bordered: bool) -> None:
    """Raise ValueError where two of the flags that split the layers over stages exclude each
    other, as in Megatron."""
    flags = {
        PATTERN: bordered,
        LAYOUT: p.pipeline_model_parallel_layout is not None,
        PER_CHUNK: p.num_layers_per_virtual_pipeline_stage is not None,
        FIRST: p.decoder_first_pipeline_num_layers is not None,
        LAST: p.decoder_last_pipeline_num_layers is not None,
        EMBEDDING: p.account_for_embedding_in_pipeline_split,
        LOSS: p.account_for_loss_in_pipeline_split,
        CHUNKS: bordered and p.num_virtual_stages_per_pipeline_rank is not None,
    }
    typed = [flag for flag, is_given in flags.items() if is_given]
    ends = (FIRST, LAST)
    against_all = ((PATTERN, typed), (LAYOUT, typed), (EMBEDDING, ends), (LOSS, ends))
    for name, excluded in against_all:
        against = [flag for flag in typed if flag in excluded and flag != name]
        if name in typed and against:
            raise ValueError(
                f"{name} and {' and '.join(against)}: each says which layers a stage has; give "
                "only one of them [flags-exclude-each-other]"
            )


def chunks_per_stage(
    num_layers: int,
    stages: int,
    layers_per_chunk: int | None = None,
    chunks: int | None = None,
    uneven: bool = False,
    counted: int = 0,
) -> int:
    """Virtual stages on each rank: 1, `chunks` as typed, or as many as hold `layers_per_chunk`
    layers each.

    `uneven`: is the size of the first or the last stage given? `counted`: embedding and loss, where
    they count as layers. Raises ValueError with the flags,
    values and remedy.
    """
    if layers_per_chunk is not None and chunks is not None:
        raise ValueError(
            f"{PER_CHUNK} {layers_per_chunk} and {CHUNKS} {chunks}: each sets the number of "
            "virtual stages; omit one of them [flags-exclude-each-other]"
        )
    if layers_per_chunk is None and chunks is None:
        return 1
    typed = f"{CHUNKS} {chunks}" if layers_per_chunk is None else f"{PER_CHUNK} {layers_per_chunk}"
    if min(n for n in (layers_per_chunk, chunks) if n is not None) < 1:
        raise ValueError(f"{typed}: must be at least 1 [value-out-of-range]")
    if layers_per_chunk is not None:
        if uneven:
            raise ValueError(
                f"{typed}: all stages would have as many layers, but {FIRST} or {LAST} is given; "
                f"use {CHUNKS} instead [flags-exclude-each-other]"
            )
        slots = num_layers + counted
        if slots % (stages * layers_per_chunk):
            fits = [n for n in range(1, slots // stages + 1) if slots % (stages * n) == 0]
            remedy = (
                f"{PER_CHUNK} {' or '.join(map(str, fits))}"
                if fits
                else f"{CHUNKS} (stages may differ by a layer)"
            )
            raise ValueError(
                f"{typed}: --num-layers {num_layers}"
                + f" + {counted}" * (counted > 0)
                + " is not a multiple of "
                f"--pipeline-model-parallel-size {stages} x {layers_per_chunk} = "
                f"{stages * layers_per_chunk}; give {remedy} [layers-not-divisible-by-stages]"
            )
        chunks = slots // (stages * layers_per_chunk)
    assert chunks is not None, "one of the two is given"
    if chunks > 1 and stages == 1:
        raise ValueError(
            f"{typed}: virtual stages need a pipeline, and --pipeline-model-parallel-size is 1; "
            "omit it, or use at least 2 stages [pipeline-flag-without-pipeline]"
        )
    return chunks


def split_layers(
    num_layers: int, stages: int, chunks: int = 1, first: int | None = None, last: int | None = None
) -> Split:
    """The global layer numbers of each stage's chunks: `split_layers(...)[stage][chunk]`, all
    layers once, in order.

    Chunk c of stage s is the virtual stage c * stages + s (Narayanan et al. 2021). Layers are
    shared as evenly as can be; what does not divide goes to the last virtual stages, one each,
    so that neither two of them nor two stages differ by more than a layer.
    `first` and `last` are the layers of the first and the last stage, in equal chunks; the others
    share the rest. Raises ValueError with the flags, values and remedy.
    """
    fixed = {
        stage: (flag, n)
        for stage, flag, n in ((0, FIRST, first), (stages - 1, LAST, last))
        if n is not None
    }
    for flag, n in fixed.values():
        if stages == 1:
            raise ValueError(
                f"{flag} {n}: there is only one stage; remove it, or give "
                "--pipeline-model-parallel-size [pipeline-flag-without-pipeline]"
            )
        if n < 1 or n % chunks:
            raise ValueError(
                f"{flag} {n}: must be at least 1"
                + f" and a multiple of {CHUNKS} {chunks}" * (chunks > 1)
                + " [stage-layers-do-not-fit]"
            )
    free = stages - len(fixed)
    num_free = num_layers - sum(n for _, n in fixed.values())
    slots = free * chunks
    if num_free < slots or (num_free and not slots):
        flags = "".join(f", {flag} {n}" for flag, n in fixed.values())
        layout = f"--pipeline-model-parallel-size {stages}" + f" x {chunks} virtual stages" * (
            chunks > 1
        )
        layers = f"{num_free} of them for the other {free}" if fixed else f"too few for {slots}"
        remedy = "use sizes that add up" if fixed else "use fewer stages, or more layers"
        raise ValueError(
            f"--num-layers {num_layers} with {layout}{flags}: {layers} stages, and each (virtual) "
            f"stage needs at least one; {remedy} [layers-too-few-for-stages]"
        )
    small, larger = divmod(num_free, slots) if slots else (0, 0)
    split: list[list[range]] = [[] for _ in range(stages)]
    start = number = 0
    for _ in range(chunks):
        for stage in range(stages):
            if stage in fixed:
                size = fixed[stage][1] // chunks
            else:
                size = small + (number >= slots - larger)
                number += 1
            split[stage].append(range(start, start + size))
            start += size
    assert start == num_layers
    return tuple(map(tuple, split))


def check_micro_batches(
    micro_batches: int, stages: int, chunks: int = 1, group: int | None = None
) -> None:
    """Interleaving sends micro-batches through a chunk in groups of `group` (default: `stages`):
    raises ValueError if that does not fit.

    As in Megatron a group has as many as there are stages, at least, and so has the last one.
    """
    if chunks > 1 and group is not None:
        if not stages <= group <= micro_batches:
            raise ValueError(
                f"{GROUP} {group}: must be from --pipeline-model-parallel-size {stages} to the "
                f"{micro_batches} micro-batches of a step [micro-batch-group-does-not-fit]"
            )
        if 0 < micro_batches % group < stages:
            fits = [
                n for n in range(stages, micro_batches + 1) if not 0 < micro_batches % n < stages
            ]
            raise ValueError(
                f"{GROUP} {group}: of {micro_batches} micro-batches the last "
                f"{micro_batches % group} are fewer than --pipeline-model-parallel-size {stages}; "
                f"use {', '.join(map(str, fits[:8]))} [micro-batch-group-does-not-fit]"
            )
    elif chunks > 1 and micro_batches % stages:
        above = -(-micro_batches // stages) * stages
        raise ValueError(
            f"{micro_batches} micro-batches are not a multiple of --pipeline-model-parallel-size "
            f"{stages}, as {chunks} virtual stages per rank need: choose --global-batch-size for "
            f"{above} (or {above - stages or 2 * stages}) of them, or remove {PER_CHUNK} / "
            f"{CHUNKS} [micro-batches-not-divisible-by-stages]"
        )
