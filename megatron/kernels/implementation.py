"""The implementations of an operation as rows of a list: what each takes, and which one runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Spec(Protocol):
    """What is to be computed: all that the choice of an implementation depends on."""

    @property
    def features(self) -> Mapping[str, str]:
        """What it has beyond the plain operation, and the words of each for messages."""


S = TypeVar("S", bound=Spec)
F = TypeVar("F")


def always(spec: object) -> None:
    """Nothing is against it."""


@dataclass(frozen=True)
class Implementation(Generic[S, F]):
    """One way to compute an operation.

    name: that by which it is requested. title: that in the table of kernels. takes: the features
    that it has; a spec with another one is refused. unavailable: why it cannot compute a spec of
    these (library, device, dtype, sizes). slower: why it is not the best although it can. why: why
    it is, where it is.
    """

    name: str
    title: str
    forward: F
    takes: frozenset[str] = frozenset()
    unavailable: Callable[[S], str | None] = always
    slower: Callable[[S], str | None] = always
    why: Callable[[S], str] = lambda spec: "fastest here"

    def supports(self, spec: S) -> str | None:
        """None, or why it cannot compute this."""
        return lacking(spec, self.takes) or self.unavailable(spec)


def lacking(spec: Spec, takes: frozenset[str]) -> str | None:
    """The features of `spec` that are not among these, as a reason; None if there are none."""
    names = [words for name, words in spec.features.items() if name not in takes]
    return f"does not support {' and '.join(names)}" if names else None


@dataclass(frozen=True)
class Choice(Generic[S, F]):
    """The implementation that runs, and why."""

    implementation: Implementation[S, F]
    why: str


def choose(
    implementations: Sequence[Implementation[S, F]], spec: S, requested: str = "auto"
) -> Choice[S, F]:
    """The requested one, or the first that supports the spec and is not slower than a later one (if
    all are, the first that supports it). Raises ValueError where none does."""
    able = None
    for candidate in implementations:
        if requested not in ("auto", candidate.name):
            continue
        why_not = candidate.supports(spec)
        if requested != "auto":
            if why_not:
                raise ValueError(f"implementation {requested!r}: {why_not}; use 'auto'")
            return Choice(candidate, "requested")
        if why_not is None:
            if candidate.slower(spec) is None:
                return Choice(candidate, candidate.why(spec))
            able = able or candidate
    if able is not None:
        return Choice(able, able.why(spec))
    if requested == "auto":
        why = "; ".join(f"{row.title}: {row.supports(spec)}" for row in implementations)
        raise ValueError(f"no implementation can compute this ({why})")
    names = ("auto", *(row.name for row in implementations))
    raise ValueError(f"implementation {requested!r} is unknown: use one of {names}")


def reasons(
    implementations: Sequence[Implementation[S, Any]], spec: S, chosen: Implementation[S, Any]
) -> Iterator[tuple[str, str]]:
    """Of each implementation but the chosen one: its title, and why it is not."""
    for candidate in implementations:
        if candidate is not chosen:
            why_not = candidate.supports(spec) or candidate.slower(spec)
            yield candidate.title, why_not or "not selected"
