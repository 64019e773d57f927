#!/usr/bin/env python
"""Make the example's files out of the quickstart's: a small vocabulary, a short text, and the same
text with bad documents.

    corpus.py DIR       DIR holds what tools/fetch_quickstart_data.py wrote

vocab.json and merges.txt are the first 1,024 entries of GPT-2's, so that nearly all of a small
model is not vocabulary. clean.jsonl is the first scenes of the plays; repeats.jsonl, noise.jsonl
and language.jsonl are the same, each with one document between them that no filter caught;
code.jsonl is the source of Python's own library, another kind of text.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

IDS = 1024
SCENES = 90
# the scene before which a bad document stands: its tokens are all read in iteration 194 of
# spike.args
AT = 86
HUMAN_RIGHTS = (
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"
    "人間は、理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。"
)


def bad_documents() -> dict[str, str]:
    """A stuck key, a picture taken for text, another language."""
    noise = random.Random(0).randbytes(110).decode("utf-8", errors="replace")
    return {"repeats": "§" * 100, "noise": noise, "language": HUMAN_RIGHTS}


def write_vocabulary(folder: Path) -> None:
    """GPT-2's first pieces, bytes and merges, and its end of a document as the last id."""
    pieces = json.loads((folder / "gpt2-vocab.json").read_text(encoding="utf-8"))
    kept = {piece: number for piece, number in pieces.items() if number < IDS - 1}
    (folder / "vocab.json").write_text(
        json.dumps(kept | {"<|endoftext|>": IDS - 1}), encoding="utf-8"
    )
    merges = (folder / "gpt2-merges.txt").read_text(encoding="utf-8").splitlines()
    (folder / "merges.txt").write_text("\n".join(merges[: IDS - 256]) + "\n", encoding="utf-8")


def write_texts(path: Path, texts: Iterable[str]) -> None:
    """One {"text": ...} a line."""
    path.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts),
        encoding="utf-8",
    )


def library() -> list[str]:
    """The modules of Python's library, in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 written, 1 not, 2 a wrong command line."""
    if len(argv) != 1:
        print(__doc__, end="", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    try:
        write_vocabulary(folder)
        scenes = [
            json.loads(line)["text"]
            for line in (folder / "shakespeare.jsonl").open(encoding="utf-8")
        ]
        write_texts(folder / "clean.jsonl", scenes[:SCENES])
        for name, text in bad_documents().items():
            write_texts(folder / f"{name}.jsonl", [*scenes[:AT], text, *scenes[AT:SCENES]])
        write_texts(folder / "code.jsonl", library())
    except OSError as error:
        print(
            f"error: {error}; tools/fetch_quickstart_data.py {folder} fetches what is missing",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
