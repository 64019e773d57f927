"""tools/train_tokenizer.py: files that our tokenizers read, the same on each run, and one message
for what is wrong."""

import gzip
import json
from pathlib import Path

import pytest

from megatron.data.tokenizers import gpt2_bpe
from megatron.data.tokenizers.build import build_tokenizer
from tests.core.data.vocabularies import ADVERSARIAL
from tests.load_tool import load_tool
from tests.problems import assert_reported

TOOL = load_tool("train_tokenizer")
TEXTS = [
    *ADVERSARIAL,
    *(f"the theory of the {number} thinkers, thinking there" for number in range(40)),
]


@pytest.fixture
def text(tmp_path: Path) -> str:
    lines = [json.dumps({"text": text, "more": "xyzxyz"}) for text in TEXTS]
    (tmp_path / "x.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    return str(tmp_path / "x.jsonl")


def train(*words: object) -> int:
    """The tool in this process; its exit code."""
    pytest.importorskip("tokenizers")
    try:
        return TOOL.main([str(word) for word in words])
    except SystemExit as leave:
        return leave.code


def gpt2(folder: Path):
    return build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


def test_our_tokenizer_reads_the_files_and_every_text_comes_back(text, tmp_path, capsys):
    assert (
        train("--input", text, "--vocab-size", 300, "--output-dir", tmp_path / "new" / "tok") == 0
    )
    assert "300 tokens (256 bytes, 43 merges, 1 special)" in capsys.readouterr().out
    folder = tmp_path / "new" / "tok"
    assert sorted(path.name for path in folder.iterdir()) == ["merges.txt", "vocab.json"]
    vocabulary = gpt2_bpe.read_vocabulary(folder / "vocab.json")
    merges = gpt2_bpe.read_merges(folder / "merges.txt")
    products = gpt2_bpe.products("merges.txt", merges)
    assert len(products) == len(merges) == 43
    assert [vocabulary[piece] for piece in products] == sorted(map(vocabulary.get, products))
    assert [vocabulary[byte] for byte in ("!", "~")] == [0, 93] and vocabulary[
        "<|endoftext|>"
    ] == 299
    tokenizer = gpt2(folder)
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 299)
    for sample in TEXTS:
        assert tokenizer.detokenize(tokenizer.tokenize(sample)) == sample
    assert len(tokenizer.tokenize("the theory of thinkers")) < 18


def test_the_merges_are_the_most_frequent_pairs(tmp_path):
    """Sennrich et al. 2016 by hand: the best pair, again and again; of equal ones that of the
    lowest ids."""
    (tmp_path / "x.txt").write_text("ab ab ab abc abc cd")
    assert (
        train(
            "--input",
            tmp_path / "x.txt",
            "--vocab-size",
            260,
            "--output-dir",
            tmp_path,
            "--min-frequency",
            1,
        )
        == 0
    )
    assert gpt2_bpe.read_merges(tmp_path / "merges.txt") == [("a", "b"), ("Ġ", "ab"), ("Ġab", "c")]


def test_input_is_what_preprocessing_reads_and_its_form_makes_no_difference(text, tmp_path):
    lines = Path(text).read_bytes().splitlines(keepends=True)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "0.jsonl").write_bytes(b"".join(lines[:20]))
    (tmp_path / "parts" / "1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[20:])))
    ways = {"whole": [text], "parts": [tmp_path / "parts" / "*"], "again": [text]}
    for name, files in ways.items():
        assert train("--input", *files, "--vocab-size", 290, "--output-dir", tmp_path / name) == 0
    for name in ("vocab.json", "merges.txt"):
        assert len({(tmp_path / way / name).read_bytes() for way in ways}) == 1
    assert (
        train(
            "--input",
            text,
            "--json-keys",
            "more",
            "--vocab-size",
            290,
            "--output-dir",
            tmp_path / "more",
        )
        == 0
    )
    assert gpt2_bpe.read_merges(tmp_path / "more" / "merges.txt") == [
        ("x", "y"),
        ("xy", "z"),
        ("xyz", "xyz"),
    ]


def test_tokenizer_json_is_read_by_the_other_tokenizer_and_gives_the_same_ids(text, tmp_path):
    words = [
        "--input",
        text,
        "--vocab-size",
        310,
        "--special-tokens",
        "<|endoftext|>",
        "<|im_start|>",
    ]
    for kind in ("gpt2", "huggingface"):
        assert train(*words, "--format", kind, "--output-dir", tmp_path / kind) == 0
    one = gpt2(tmp_path / "gpt2")
    other = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "huggingface"))
    assert (other.vocab_size, other.eod) == (one.vocab_size, one.eod) == (310, 308)
    for sample in (sample for sample in TEXTS if "<|endoftext|>" not in sample):
        assert (
            other.tokenize(sample) == one.tokenize(sample)
            and other.detokenize(other.tokenize(sample)) == sample
        )
    assert other.tokenize("<|endoftext|>") == [308]


def test_few_texts_give_fewer_tokens_and_say_so(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("aa aa")
    assert train("--input", tmp_path / "x.txt", "--vocab-size", 1000, "--output-dir", tmp_path) == 0
    assert "--vocab-size 1000" in capsys.readouterr().out and gpt2(tmp_path).vocab_size == 258


def test_nothing_is_replaced_unless_asked_for(text, tmp_path, capsys):
    words = ["--input", text, "--output-dir", tmp_path / "out"]
    assert train(*words, "--vocab-size", 270) == 0
    before = (tmp_path / "out" / "vocab.json").read_bytes()
    assert train(*words, "--vocab-size", 280) == 2 and "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / "vocab.json").read_bytes() == before
    assert (
        train(*words, "--vocab-size", 280, "--overwrite") == 0
        and gpt2(tmp_path / "out").vocab_size == 280
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--input is missing"),
        (["--input", "none.jsonl"], "--input none.jsonl: "),
        (["--vocab-size", "256"], "--vocab-size 256: "),
        (["--vocab-size", "many"], "--vocab-size: 'many'"),
        (
            ["--special-tokens", "<pad>"],
            "--special-tokens <pad>: ",
        ),
        (
            ["--special-tokens", "<|endoftext|>", "<|endoftext|>"],
            "--special-tokens '<|endoftext|>': ",
        ),
        (["--special-tokens", "<|endoftext|>", "a b"], "--special-tokens 'a b'"),
        (["--min-frequency", "0"], "--min-frequency 0"),
        (["--format", "spm"], "--format"),
        (["--output-dir", "x.jsonl"], "--output-dir x.jsonl: "),
        (["--vocabsize", "300"], "--vocabsize"),
    ],
)
def test_a_wrong_command_line_is_one_message_before_anything_is_read(
    text, tmp_path, monkeypatch, capsys, words, said
):
    monkeypatch.chdir(tmp_path)
    given = (
        {"--input": ["x.jsonl"], "--vocab-size": ["300"], "--output-dir": ["out"]} if words else {}
    )
    if words:
        given[words[0]] = words[1:]
    assert train(*(word for flag, values in given.items() for word in (flag, *values))) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (b'{"text": "a"}\nno JSON\n', "bad-record", "x.jsonl, line 2: "),
        (b'{"body": "a"}\n', "bad-record", '"body"'),
        (b'{"text": "\\ud800"}\n', "bad-record", "U+D800"),
        (b'{"text": ""}\n', "input-without-text", "x.jsonl: "),
    ],
)
def test_bad_text_is_named_and_leaves_no_file(tmp_path, capsys, content, code, named):
    (tmp_path / "x.jsonl").write_bytes(content)
    words = ["--input", tmp_path / "x.jsonl", "--vocab-size", 300, "--output-dir", tmp_path / "out"]
    assert train(*words) == 1
    assert_reported(capsys.readouterr().err, code, named)
    assert not (tmp_path / "out").exists()


def test_a_token_that_the_text_gives_cannot_be_special(text, tmp_path, capsys):
    words = ["--input", text, "--vocab-size", 300, "--output-dir", tmp_path / "out"]
    assert train(*words, "--special-tokens", "<|endoftext|>", "th") == 1
    assert_reported(capsys.readouterr().err, "special-token-taken", "--special-tokens th: ")
