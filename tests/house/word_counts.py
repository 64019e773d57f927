"""Counts words that the glossary of CONTRIBUTING.md replaces, in code and documents.

`python tests/house/word_counts.py [ROOT ...]` prints one row per word and two columns per root: its
occurrences in `megatron/`, `tools/`, `examples/` and the entry scripts ("code"), and in `README.md`
and `docs/` ("docs"). Lines are counted as text, comments and docstrings included; a word that also
has a right use (`file products.cpp`, "left out" of a quotation) is counted as well, so that small
numbers are read, not taken for faults."""

import re
import sys
from pathlib import Path

WORDS = {
    "beside": r"\bbesides?\b",
    "anew": r"\banew\b",
    "lies, lie on": r"\blies\b|\blie (?:on|in|at|beside|next)\b",
    "go on, goes on": r"\bgo(?:es|ing)? on\b",
    "products (GEMMs)": r"\bproducts\b|\bmatrix product\b",
    "left out": r"\bleft out\b",
    "wish": r"\bwish(?:es|ed)?\b",
    "tell, told": r"\b(?:tells?|told|telling)\b",
    "first values": r"\bfirst values?\b|\bfirst weights\b",
    "8 bits": r"\b(?:8|eight) bits\b|\b8-bit\b",
    "number format": r"\bnumber formats?\b|\bformat of the weights\b|\bweights' (?:own )?format\b",
    "'a' for per": r"\b(?:one|each|bytes|tokens|lines?|object|times|MB|GB|ms|samples) an? "
    r"(?:iteration|line|step|token|character|rank|file|layer|head|second|minute|column|tensor)\b",
    "leave away": r"\b(?:leave|leaves|left|leaving)\b[^.\n]{0,25}\baway\b",
    "by hand": r"\bby hand\b",
    "words (says, messages)": r"(?<!\bword )\b(?:in|own|other|these|same|without a) words?\b",
    "knows no": r"\b[Kk]nows? (?:no|nothing|neither|only)\b",
    "facts/ citations": r"\bfacts/|\bT(?:[1-9]|1\d|20)\b(?![-.\w])",
    "whole": r"\bwhole\b",
    "gone": r"\bgone\b",
    "mend": r"\bmend(?:s|ed|ing)?\b",
    "made-up": r"\bmade[- ]up\b",
    "trip to memory": r"\btrips? to memory\b",
    "runs of rows": r"\bruns of rows\b",
    "obstacle": r"obstacle",
    "at once (for together)": r"\b(?:said|all|problems) at once\b",
    "aside": r"\baside\b",
    "forger": r"\bforgers?\b",
}
CODE = (
    "megatron/**/*.py",
    "megatron/**/*.cpp",
    "megatron/**/*.h",
    "tools/**/*.py",
    "examples/**/*",
    "*.py",
)
DOCS = ("README.md", "docs/*.md")


def count(root: Path, patterns: tuple[str, ...]) -> dict[str, int]:
    """Occurrences of each entry of WORDS in the files below `root` that match one of `patterns`."""
    files = {path for pattern in patterns for path in root.glob(pattern)}
    suffixes = {".py", ".cpp", ".h", ".md", ".sh", ".txt"}
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted(files)
        if path.is_file() and path.suffix in suffixes
    )
    return {word: len(re.findall(regex, text)) for word, regex in WORDS.items()}


def main() -> None:
    roots = [Path(argument) for argument in sys.argv[1:]] or [Path(__file__).parents[2]]
    counts = [count(root, patterns) for root in roots for patterns in (CODE, DOCS)]
    print(f"{'':32s}" + "".join(f"{root.resolve().name[-16:]:>18s}" for root in roots))
    print(f"{'':32s}" + f"{'code':>9s}{'docs':>9s}" * len(roots))
    for word in WORDS:
        print(f"{word:32s}" + "".join(f"{column[word]:9d}" for column in counts))
    print(f"{'sum':32s}" + "".join(f"{sum(column.values()):9d}" for column in counts))


if __name__ == "__main__":
    main()
