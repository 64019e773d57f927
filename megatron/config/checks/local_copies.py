"""Rules of --non-persistent-ckpt-type local and --replication."""

from collections.abc import Iterator

from megatron import launcher
from megatron.config.checks.facts import Facts


def rule(f: Facts) -> Iterator[str]:
    """What local copies need, and numbers of ranks that cannot be mirrored."""
    if f["non_persistent_ckpt_type"] != "local":
        return
    for name, flag, value in (
        ("snapshot_interval", "--snapshot-interval N", "the iterations between copies"),
        (
            "non_persistent_local_ckpt_dir",
            "--non-persistent-local-ckpt-dir DIR",
            "a directory on each node",
        ),
        ("save", "--save DIR", "a directory that all ranks share"),
    ):
        if f[name] is None:
            yield (
                f"{flag} is missing: --non-persistent-ckpt-type local needs {value} [flag-missing]"
            )
    yield from _replication(f)


def _replication(f: Facts) -> Iterator[str]:
    if not f["replication"] or not f.ok("replication_factor"):
        return
    launch = launcher.info()
    if f["replication_jump"] is None and launch.world_size != f.world_size:
        return  # a dry run: who knows the ranks of its nodes?
    ranks_of_node = launch.local_world_size or f.world_size
    factor = f["replication_factor"]
    jump = ranks_of_node if f["replication_jump"] is None else f["replication_jump"]
    if factor < 2:
        yield (
            f"{f.say('replication_factor')}: counts the rank itself, so 2 or more have a mirror; "
            "omit --replication for none [value-out-of-range]"
        )
    elif jump > 0 and f.world_size % (jump * factor):
        yield (
            f"--replication: {f.world_size} ranks cannot be divided into groups of {factor} ranks "
            f"that are {jump} apart (--replication-factor, --replication-jump; without the latter "
            "as many as ranks on a node); give numbers whose product divides the number of ranks "
            "[replication-does-not-divide]"
        )
