"""The table of one race as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from race import OURS, Race
from settings import DEFAULT

RATIO_TITLES = {
    "bare": "x bare",
    "bare-compiled": "x bare comp.",
    "transformers": "x transf.",
    "transformers-compiled": "x transf. comp.",
}


def heading(race: Race) -> str:
    """What was measured."""
    size = race.size
    rounds = len(race.default(OURS).seconds)
    fewer = [(name, len(race.default(name).seconds)) for name in race.contestants]
    fewer_text = ", ".join(f"{name} {count}" for name, count in fewer if count < rounds)
    steps = [one.steps_per_turn for one in race.series if one.contestant in race.contestants]
    turns = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    return (
        f"{size.name} {race.dtype}: {size.family}, {size.layers} layers, hidden {size.hidden}, "
        f"ffn {size.ffn_size}, {size.heads} heads, sequence {size.seq}, vocabulary {size.vocab}, "
        f"{race.parameters / 1e6:.1f}M parameters; {size.micro_batches} x {size.micro_batch} "
        f"samples = {size.tokens} tokens per step; {rounds} {'round' if rounds == 1 else 'rounds'}"
        + f" ({fewer_text})" * bool(fewer_text)
        + f" of {turns} timed {'step' if turns == '1' else 'steps'}"
    )


def rows(race: Race, matmul_rate: float, peak: float | None) -> list[dict[str, str]]:
    """The cells of each contestant by column title. `matmul_rate`: of a large GEMM, `peak`: of the
    device, TFLOP/s."""
    several = len({one.setting for one in race.series}) > 1
    yardsticks = [name for name in race.contestants if name not in (OURS, "ours-compiled")]
    found = []
    for name in race.contestants:
        default = race.default(name)
        best = race.best(name)
        rate = race.flops_per_step / best.median / 1e12
        ceiling = race.ceiling()
        row = {
            "": name,
            "default ms" if several else "step ms": f"{1e3 * default.median:.1f}",
            "best ms": f"{1e3 * best.median:.1f}" if several else "",
            "best setting": best.setting if several else "",
            "tok/s": f"{race.size.tokens / best.median:.0f}",
            "compile s": ""
            if default.compile_seconds is None
            else f"{default.compile_seconds:.1f}",
        }
        for other in yardsticks:
            row[RATIO_TITLES.get(other, f"x {other}")] = _ratio(race.ratio(other, name), several)
        row |= {
            "of ceiling": _percent(sum(ceiling) / min(best.seconds)) if ceiling else "",
            "TFLOP/s": f"{rate:.3f}",
            "of matmul": _percent(rate / matmul_rate),
            "MFU": _percent(rate / peak) if peak else "",
            "peak GB": f"{best.peak_bytes / 1e9:.2f}",
        }
        found.append(row)
    return found


def table(race: Race, matmul_rate: float, peak: float | None) -> list[str]:
    """The rows of one race, and the ceiling's times below."""
    cells = rows(race, matmul_rate, peak)
    titles = [title for title in cells[0] if any(row[title] for row in cells)]
    lines = aligned([titles, *([row[title] for title in titles] for row in cells)])
    ceiling = race.ceiling()
    if ceiling:
        gemms, attention = (1e3 * seconds for seconds in ceiling)
        lines.append(
            f"  ceiling: {gemms + attention:.1f} ms (GEMMs {gemms:.1f} and attention "
            f"{attention:.1f}, in {race.ceiling_dtype})"
        )
    for name in race.contestants:
        tried = [one for one in race.series if one.contestant == name and one.setting != DEFAULT]
        if tried:
            times = ", ".join(f"{one.setting} {1e3 * one.median:.1f}" for one in tried)
            lines.append(f"  {name}, ms: default {1e3 * race.default(name).median:.1f}, {times}")
    return lines


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns, the first column to the left and the others to the right."""
    width = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width[i]) if i else cell.ljust(width[i]) for i, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]


def _ratio(pair: tuple[float, float] | None, several: bool) -> str:
    if pair is None:
        return ""
    return f"{pair[0]:.2f} ({pair[1]:.2f})" if several else f"{pair[0]:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
