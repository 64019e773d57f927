"""Tokenizers by their rules, on files made here and on GPT-2's own; tests/peers compares them with
other packages."""

import hashlib
import importlib.util
import itertools
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.config.checks import tokenizer as check_tokenizer
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.tokenizers import gigatoken, gpt2_bpe
from megatron.data.tokenizers.bpe import GPT2BPETokenizer
from megatron.data.tokenizers.build import (
    NullTokenizer,
    build_tokenizer,
    tokenizer_from,
)
from tests import problems
from tests.core.data.vocabularies import (
    ADVERSARIAL,
    MERGES,
    gpt2_files,
    write_bpe,
    write_sentencepiece,
    write_tiktoken,
)
from tests.problems import numbers, raises
from tests.tools.tokenizers.plain_bpe import PlainBPE


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    return write_bpe(tmp_path)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentencepiece(tmp_path_factory.mktemp("spm"))


class TestFiles:
    @pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n"])
    def test_the_last_merge_counts_whatever_ends_the_file(self, tmp_path: Path, end: str) -> None:
        vocab, merges = write_bpe(tmp_path, end=end)
        assert [" ".join(pair) for pair in gpt2_bpe.read_merges(merges)] == MERGES
        # the product of the last merge
        assert len(GPT2BPETokenizer(vocab, merges).tokenize("\n\n")) == 1

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("vocab.json", b"{", "column 2"),
            ("vocab.json", b"\xff\xfe", "0xff"),
            ("vocab.json", b'["a"]', "piece: id"),
            ("vocab.json", b'{"a": "0"}', "piece: id"),
            ("vocab.json", b'{"<|endoftext|>": 0, "a": 2}', "2 ids"),
            ("vocab.json", b'{"a": 0}', "<|endoftext|>"),
            ("merges.txt", b"#version: 0.2\na b\na b c\n", "line 3: .*'a b c'"),
            ("merges.txt", b"a b\nab\n", "line 2: .*'ab'"),
            ("merges.txt", b"#version: 0.2\n", "merges.*merges.txt"),
            ("merges.txt", b"\xe9 a\n", "UTF-8.*0xe9"),
        ],
    )
    def test_bad_files_are_named(
        self, tmp_path: Path, name: str, content: bytes, says: str
    ) -> None:
        files = write_bpe(tmp_path)
        (tmp_path / name).write_bytes(content)
        said = f"{tmp_path / name}.*{says.replace('|', '[|]')}.*tokenizer-file-malformed"
        with pytest.raises(ValueError, match=said):
            GPT2BPETokenizer(*files)

    def test_an_unknown_piece_is_id_0_and_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        vocab, merges = write_bpe(tmp_path)
        Path(merges).write_text("#version: 0.2\na b\nx y\n")  # xy has no id
        tokenizer = GPT2BPETokenizer(vocab, merges)
        assert PlainBPE(vocab, merges).encode("abxy") == list(tokenizer.encode("abxy"))
        assert tokenizer.tokenize("abxy") == [tokenizer.tokenize("ab")[0], 0]
        said = capsys.readouterr().out
        assert "WARNING" in said and vocab in said and numbers(said)[:2] == [1, 2]

    def test_a_byte_without_an_id_is_id_0(self, tmp_path: Path) -> None:
        vocab, merges = write_bpe(tmp_path)
        ids = json.loads(Path(vocab).read_text())
        ids["another"] = ids.pop("z")
        Path(vocab).write_text(json.dumps(ids))
        tokenizer = GPT2BPETokenizer(vocab, merges)
        assert tokenizer.tokenize("azhe") == PlainBPE(vocab, merges).encode("azhe")
        assert tokenizer.tokenize("z") == [0]


class TestGPT2BPETokenizer:
    def test_sizes_and_special_text(self, tiny: list[str]) -> None:
        tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=tiny[0], merge_file=tiny[1])
        assert (tokenizer.vocab_size, tokenizer.eod) == (256 + len(MERGES) + 1, 256 + len(MERGES))
        ids = tokenizer.tokenize("<|endoftext|>")
        assert tokenizer.eod not in ids and tokenizer.detokenize(ids) == "<|endoftext|>"
        assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"

    def test_the_published_files(self) -> None:
        files = gpt2_files()
        tokenizer = GPT2BPETokenizer(*files)
        assert tuple(tokenizer.identity()["sha256"]) == gpt2_bpe.GPT2_SHA256
        assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
        assert tokenizer.tokenize("Hello world! It's 2026.") == [
            15496,
            995,
            0,
            632,
            338,
            1160,
            2075,
            13,
        ]
        merges = gpt2_bpe.read_merges(files[1])
        assert gpt2_bpe.products(files[1], merges) == [left + right for left, right in merges]
        ids = gigatoken.digest_of_probe(PlainBPE(*files).encode)
        assert ids == gigatoken.digest_of_probe(tokenizer.encode) == gigatoken.GPT2_PROBE

    def test_half_a_surrogate_pair_is_refused(self, tiny: list[str]) -> None:
        for engine in ("tiktoken", None):
            with pytest.raises(ValueError, match=r"character 2 .*U\+D800"):
                GPT2BPETokenizer(*tiny, engine=engine).tokenize("ab\ud800")

    @pytest.mark.parametrize(
        ("merges", "products"),
        [
            (MERGES, [merge.replace(" ", "") for merge in MERGES]),
            (["a b", "ab c", "b c"], ["ab", "abc", "bc"]),
            (["a b", "b c", "a bc"], ["ab", "bc"]),  # abc is never reached: a b comes first
        ],
    )
    def test_products_that_no_text_has_are_left_out(
        self, tmp_path: Path, merges: list[str], products: list[str]
    ) -> None:
        files = write_bpe(tmp_path, merges)
        assert gpt2_bpe.products(files[1], gpt2_bpe.read_merges(files[1])) == products
        tokenizer = GPT2BPETokenizer(*files)
        plain = PlainBPE(*files)
        for text in map("".join, itertools.product("abc ", repeat=5)):
            assert list(tokenizer.encode(text)) == plain.encode(text), text

    @pytest.mark.parametrize(
        ("merges", "number"),
        [
            (["a b", "ab c", "a bc", "b c"], 3),  # bc is used before it is made
            (["a b", "b c", "ab c", "a bc"], 4),  # abc is made twice
            (["ab c", "a b"], 1),
            ([f"{'a' * 2**k} {'a' * 2**k}" for k in range(12)], 11),  # 2048 bytes
        ],
    )
    def test_merges_that_are_no_bpe_are_one_message(
        self, tmp_path: Path, merges: list[str], number: int
    ) -> None:
        tokenizer = GPT2BPETokenizer(*write_bpe(tmp_path, merges))  # training needs no engine
        with problems.raises(ValueError, "tokenizer-file-malformed", "--merge-file", str(number)):
            tokenizer.tokenize("abc")

    @pytest.mark.parametrize("engine", ["tiktoken", None])
    def test_ids_in_any_order(self, tmp_path: Path, engine: str | None) -> None:
        """RoBERTa's ids, for one, do not rise with the merges."""
        vocab, merge = write_bpe(tmp_path, ["a b", "b c", "c d", "ab c"])
        ids = json.loads(Path(vocab).read_text())
        values = list(ids.values())
        random.Random(1).shuffle(values)
        ids = dict(zip(ids, values, strict=True))
        Path(vocab).write_text(json.dumps(ids))
        tokenizer = GPT2BPETokenizer(vocab, merge, engine=engine)
        assert tokenizer.tokenize("abcd") == [ids["ab"], ids["cd"]]
        assert tokenizer.detokenize(tokenizer.tokenize("abcd")) == "abcd"
        plain = PlainBPE(vocab, merge)
        assert [tokenizer.tokenize(text) for text in ADVERSARIAL] == list(
            map(plain.encode, ADVERSARIAL)
        )

    @pytest.mark.parametrize(
        ("missing", "engine"),
        [pytest.param((), "gigatoken", marks=pytest.mark.peers), (("gigatoken",), "tiktoken")],
    )
    def test_the_best_engine_there_is(
        self,
        tiny: list[str],
        monkeypatch: pytest.MonkeyPatch,
        missing: tuple[str, ...],
        engine: str,
    ) -> None:
        pytest.importorskip(engine)
        there = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in missing else there(name)
        )
        tokenizer = GPT2BPETokenizer(*tiny)
        assert tokenizer.engine == engine
        expected = PlainBPE(*tiny)
        assert [tokenizer.tokenize(text) for text in ADVERSARIAL] == [
            expected.encode(text) for text in ADVERSARIAL
        ]

    @pytest.mark.peers
    def test_a_gigatoken_with_other_ids_is_not_used_and_that_is_said(
        self, tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("gigatoken")
        as_json = gigatoken._as_json

        def special(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
            made = json.loads(as_json(vocabulary, merges))
            name = "<|endoftext|>"  # as in the tokenizer.json that is published
            made["added_tokens"] = [
                {
                    "id": vocabulary[name],
                    "content": name,
                    "special": True,
                    "normalized": False,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                }
            ]
            return json.dumps(made)

        monkeypatch.setattr(gigatoken, "_as_json", special)
        tokenizer = GPT2BPETokenizer(*tiny)
        assert tokenizer.engine == "tiktoken"
        assert "WARNING: gigatoken " in capsys.readouterr().out

    @pytest.mark.parametrize("package", ["tiktoken", "regex"])
    def test_without_an_engine_it_says_what_to_install(
        self, tiny: list[str], monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        tokenizer = GPT2BPETokenizer(*tiny)  # training needs no engine
        monkeypatch.setitem(sys.modules, package, None)
        with problems.raises(ValueError, "package-missing", "--tokenizer-type", package):
            tokenizer.tokenize("a\u0378")  # the pattern is left to regex there

    def test_characters_newer_than_the_engines_are_cut_by_regex(self, tiny: list[str]) -> None:
        assert not any(map(gpt2_bpe.has_newer_characters, ["a", "é", "深", "😀", "\ue000", "½"]))
        assert all(map(gpt2_bpe.has_newer_characters, ["a\u0378", "\U0003ffff", "\U00050000"]))
        tokenizer = GPT2BPETokenizer(*tiny)
        tokenizer.__dict__["_engine"] = ("broken", lambda text: 1 / 0)
        for text in ("a\u0378b", "\u0558's \u0c5c1 \ua7ce\U000323b0's"):
            assert tokenizer.tokenize(text) == PlainBPE(*tiny).encode(text)
        with pytest.raises(ZeroDivisionError):
            tokenizer.tokenize("é")

    def test_endless_blanks_are_cut_by_regex(self, tiny: list[str]) -> None:
        tokenizer = GPT2BPETokenizer(*tiny)
        for before in (0, 1, 9_999, 123_456):
            assert gpt2_bpe.has_endless_blank("x" * before + "\t " * 500_000 + "x")
        assert not any(
            map(
                gpt2_bpe.has_endless_blank, ["", " " * 500_000, "ab " * 400_000, "word\n" * 300_000]
            )
        )
        tokenizer.__dict__["_engine"] = ("broken", lambda text: 1 / 0)
        text = "a" + " " * 1_000_001 + "b"
        assert tokenizer.detokenize(tokenizer.encode(text)) == text

    def test_identity_follows_the_content(self, tiny: list[str], tmp_path: Path) -> None:
        before = GPT2BPETokenizer(*tiny).identity()
        assert before["class"] == "GPT2BPETokenizer" and before["files"] == tiny
        assert before["sha256"] == [
            hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in tiny
        ]
        write_bpe(tmp_path, [*MERGES, "x y"])
        assert GPT2BPETokenizer(*tiny).identity()["sha256"] != before["sha256"]


class TestNullTokenizer:
    def test_numbers(self) -> None:
        tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
        assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
        assert tokenizer.tokenize(" 1 2\n 99\t0 ") == [1, 2, 99, 0]
        assert tokenizer.detokenize(np.array([1, 2])) == "1 2"
        assert tokenizer.identity() == {
            "class": "NullTokenizer",
            "vocab_size": 100,
            "files": [],
            "sha256": [],
        }

    @pytest.mark.parametrize("text", ["100", "-1", "1.5", "x", "²", "1e2", "9" * 5000])
    def test_what_is_no_id(self, text: str) -> None:
        with pytest.raises(ValueError, match="NullTokenizer .* 0 to 99$|integer string"):
            NullTokenizer(100).tokenize(f"1 {text}")


class TestByteTokenizer:
    def test_the_ids_are_the_bytes_and_the_end_comes_behind_them(self) -> None:
        tokenizer = build_tokenizer("ByteTokenizer")
        assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
        assert tokenizer.tokenize("a é\n") == [97, 32, 0xC3, 0xA9, 10]
        assert tokenizer.detokenize([97, 0xC3, 0xA9, 256, 0xFF]) == "aé<|endoftext|>\ufffd"
        assert tokenizer.identity() == {"class": "ByteTokenizer", "files": [], "sha256": []}

    def test_the_flags(self) -> None:
        with raises(ValueError, "vocab-size-not-that-of-tokenizer", "--vocab-size", "300", "257"):
            build_tokenizer("ByteTokenizer", vocab_size=300)
        assert build_tokenizer("ByteTokenizer", vocab_size=257).vocab_size == 257


class TestSentencePiece:
    def test_the_model_as_it_is(self, spm: str) -> None:
        tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=spm)
        ids = tokenizer.tokenize("the fox </s> é")
        assert tokenizer.detokenize(ids) == "the fox </s> é"
        assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (1, 2, 2, None)
        assert not {1, 2} & set(ids)

    def test_llama_begins_every_text(self, spm: str) -> None:
        plain = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=spm)
        llama = build_tokenizer("Llama2Tokenizer", tokenizer_model=spm)
        assert llama.tokenize("the fox") == [1, *plain.tokenize("the fox")]
        assert llama.tokenize("") == [1]
        assert (llama.vocab_size, llama.eod) == (plain.vocab_size, 2)

    def test_special_pieces_are_added_behind(self, spm: str) -> None:
        plain = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=spm)
        n = plain.vocab_size
        tokenizer = build_tokenizer(
            "SentencePieceTokenizer", tokenizer_model=spm, vocab_extra_ids=2
        )
        # <CLS> <SEP> <EOD> <MASK> <PAD>, two extra; the model has <s> and </s>
        assert tokenizer.vocab_size == n + 7
        assert (tokenizer.eod, tokenizer.pad, tokenizer.bos, tokenizer.eos) == (n + 2, n + 4, 1, 2)
        text = "the<EOD> fox</s>dog<extra_id_1>"
        expected = [
            *plain.tokenize("the"),
            n + 2,
            *plain.tokenize(" fox"),
            2,
            *plain.tokenize("dog"),
            n + 6,
        ]
        assert tokenizer.tokenize(text) == expected
        assert tokenizer.detokenize(expected) == "the <EOD> fox </s> dog <extra_id_1> "
        assert tokenizer.identity()["vocab_extra_ids"] == 2

    def test_not_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "m.model").write_text("nonsense")
        with raises(ValueError, "tokenizer-file-malformed", "m.model"):
            build_tokenizer("Llama2Tokenizer", tokenizer_model=str(tmp_path / "m.model"))


class TestTikTokenizer:
    @pytest.mark.parametrize("under_vocab", [False, True])
    def test_special_ids_come_first(self, tmp_path: Path, under_vocab: bool) -> None:
        path = write_tiktoken(
            tmp_path / "v.json", [b"he", b"ll", b"hell", b" w", b"unused"], under_vocab=under_vocab
        )
        tokenizer = build_tokenizer(
            "TikTokenizer", tokenizer_model=path, vocab_size=270, tiktoken_num_special_tokens=10
        )
        assert tokenizer.tokenize("hello w") == [10 + 258, 10 + ord("o"), 10 + 259]
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad) == (270, 2, 1, 4)
        assert min(tokenizer.tokenize("</s>")) >= 10
        assert tokenizer.detokenize([1, *tokenizer.tokenize("hé"), 2, 9]) == "<s>hé</s><SPECIAL_9>"

    def test_the_two_cuts_differ(self, tmp_path: Path) -> None:
        path = write_tiktoken(tmp_path / "v.json", [b"aB", b"/\n", b"!/"])
        sizes = dict(tokenizer_model=path, vocab_size=259 + 7, tiktoken_num_special_tokens=7)
        v1, v2 = (
            build_tokenizer("TikTokenizer", tiktoken_pattern=cut, **sizes) for cut in ("v1", "v2")
        )
        assert v1.tokenize("aB") == [7 + 256] and v2.tokenize("aB") == [7 + 97, 7 + 66]
        assert v1.tokenize("12") == v2.tokenize("12") == [7 + 49, 7 + 50]
        assert v1.identity()["pattern"] == "v1" and v2.identity()["pattern"] == "v2"

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ("[", "JSONDecodeError"),
            ("{}", "JSON"),
            ('[{"rank": 0}]', "KeyError"),
            ('[{"rank": 0, "token_bytes": "?"}]', "base64"),
            ('[{"rank": 1, "token_bytes": "AA=="}]', "0, 1, 2"),
            ('[{"rank": 0, "token_bytes": "AA=="}]', "256"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, content: str, says: str) -> None:
        (tmp_path / "v.json").write_text(content)
        with pytest.raises(ValueError, match=f"v.json: .*{says}.*tokenizer-file-malformed"):
            build_tokenizer(
                "TikTokenizer", tokenizer_model=str(tmp_path / "v.json"), vocab_size=2000
            )

    def test_too_few_pieces(self, tmp_path: Path) -> None:
        path = write_tiktoken(tmp_path / "v.json")
        with raises(ValueError, "vocab-size-not-that-of-tokenizer", "256", "130072"):
            build_tokenizer("TikTokenizer", tokenizer_model=path)


class TestHuggingFaceTokenizer:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A tokenizer.json that cuts texts to 4 ids and begins each with <s>, which must both not
        happen here."""
        tokenizers = pytest.importorskip("tokenizers")
        ids = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<u>": 4}
        engine = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "<u>"))
        engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        engine.add_special_tokens(["<s>", "</s>"])
        engine.post_processor = tokenizers.processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 0)]
        )
        engine.enable_truncation(4)
        engine.enable_padding()
        engine.save(str(tmp_path / "tokenizer.json"))
        config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "model_max_length": 4}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    def test_the_text_and_nothing_else(self, folder: Path) -> None:
        for model in (folder, folder / "tokenizer.json"):
            tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(model))
            assert tokenizer.tokenize("a b a b a b c") == [2, 3, 2, 3, 2, 3, 4]
            assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad) == (
                5,
                1,
                0,
                None,
            )
            assert tokenizer.detokenize([2, 1]) == "a </s>"
        assert tokenizer.identity()["files"] == [
            str(folder / "tokenizer.json"),
            str(folder / "tokenizer_config.json"),
        ]

    def test_without_a_config_there_is_no_eod(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").unlink()
        assert build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder)).eod is None

    @pytest.mark.parametrize(
        ("name", "content"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "{")]
    )
    def test_bad_files(self, folder: Path, name: str, content: str) -> None:
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=f"{name}: not a"):
            build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            ({}, ["--tokenizer-type .*flag-missing"]),
            ({"tokenizer_type": "gpt2bpetokenizer"}, ["GPT2BPETokenizer.*tokenizer-unknown"]),
            ({"tokenizer_type": "BertWordPieceCase"}, ["BertWordPieceCase.*tokenizer-unknown"]),
            ({"tokenizer_type": "zzz"}, ["zzz.*tokenizer-unknown"]),
            (
                {"tokenizer_type": "GPT2BPETokenizer"},
                ["--vocab-file .*flag-missing", "--merge-file .*flag-missing"],
            ),
            (
                {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "no.json", "merge_file": "."},
                [
                    "--vocab-file no.json: .*tokenizer-file-missing",
                    "--merge-file .: .*path-is-a-directory",
                ],
            ),
            (
                {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "gpt2"},
                ["gpt2: .*tokenizer-file-missing"],
            ),
            ({"tokenizer_type": "NullTokenizer"}, ["--vocab-size .*flag-missing"]),
            (
                {
                    "tokenizer_type": "TikTokenizer",
                    "tiktoken_num_special_tokens": 0,
                },
                [
                    "--tokenizer-model .*flag-missing",
                    "special-tokens 0: .*value-out-of-range",
                ],
            ),
            (
                {
                    "tokenizer_type": "TikTokenizer",
                    "tokenizer_model": __file__,
                    "tiktoken_special_tokens": ("<s>",),
                },
                ["--tiktoken-special-tokens <s>: .*tiktoken-special-tokens-incomplete"],
            ),
        ],
    )
    def test_every_problem_has_its_line(self, flags: dict, says: list[str]) -> None:
        problems = list(check_tokenizer.problems(TokenizerConfig(**flags)))
        assert len(problems) == len(says)
        for problem, part in zip(problems, says, strict=True):
            assert re.search(part, problem), problem
        with pytest.raises(ValueError) as error:
            tokenizer_from(TokenizerConfig(**flags))
        assert str(error.value) == "\n".join(problems)

    def test_a_vocab_size_that_is_not_the_tokenizers(self, tiny: list[str]) -> None:
        with raises(ValueError, "vocab-size-not-that-of-tokenizer", "--vocab-size", "50304", "271"):
            build_tokenizer(
                "GPT2BPETokenizer", vocab_file=tiny[0], merge_file=tiny[1], vocab_size=50304
            )
        assert build_tokenizer(
            "GPT2BPETokenizer", vocab_file=tiny[0], merge_file=tiny[1], vocab_size=271
        )

    @pytest.mark.parametrize(
        ("tokenizer_type", "package"),
        [
            ("Llama2Tokenizer", "sentencepiece"),
            ("HuggingFaceTokenizer", "tokenizers"),
            ("TikTokenizer", "tiktoken"),
        ],
    )
    def test_a_missing_library_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_type: str, package: str
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        path = write_tiktoken(tmp_path / "v.json")
        with raises(ValueError, "package-missing", "--tokenizer-type", tokenizer_type, package):
            build_tokenizer(
                tokenizer_type,
                tokenizer_model=path,
                **({"vocab_size": 1256} if package == "tiktoken" else {}),
            ).tokenize("a")
