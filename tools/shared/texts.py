"""The texts of a program's input files, record by record."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.data.preprocess.encode import records
from megatron.data.preprocess.readers import FileReader, InputPosition
from megatron.data.preprocess.resumable_writer import BadRecords


class Texts(NamedTuple):
    """Texts of a line or row, their length in UTF-8, and the bytes of the files read so far."""

    texts: list[str]
    utf8_bytes: int
    read: int


def read_texts(
    files: Sequence[str], keys: Sequence[str], txt_lines: bool, max_bad_records: int
) -> Iterator[Texts]:
    """The records of the files in order, without empty texts. Raises ValueError (file, line, what
    is wrong) for one bad record too many; the others are reported on stderr and skipped."""
    bad = BadRecords(max_bad_records)
    line = 0
    name = ""
    for block in FileReader(files, keys, txt_lines).blocks(InputPosition(), lambda file: None):
        line = line if block.name == name else 0
        name = block.name
        for texts_at, _ in records(block, keys):
            line += 1
            try:
                texts = [text for some in texts_at() or () for text in some if text]
                size = sum(map(_utf8_bytes, texts))
            except ValueError as error:
                bad.add(name, line, str(error))
                continue
            yield Texts(texts, size, block.read)


def _utf8_bytes(text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of the text is U+{ord(text[error.start]):04X}, half of a "
            "surrogate pair; write the whole character, or drop it "
            "[text-not-unicode]"
        ) from None
