"""Ids against the packages that define them: tiktoken, tokenizers, transformers, sentencepiece,
megatron-core."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.data.tokenizers import gpt2_bpe
from megatron.data.tokenizers.bpe import GPT2BPETokenizer
from megatron.data.tokenizers.build import Tokenizer, build_tokenizer
from tests.core.data.vocabularies import ADVERSARIAL, gpt2_files, package_file, write_bpe
from tests.load_tool import load_tool
from tests.tools.tokenizers.plain_bpe import PlainBPE

ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz ABC 's 've 'll\n",
    "".join(map(chr, range(256))),
    "0123456789 ,.-+eE\t",
    "深度学习，。あいうカタカナ한국어 a1",
    "😀👍🏽🇩🇪\u200d\ufe0f ☃é\u0301 x",
    " \t\n\r\x0b\x0c\x1c\x85\u00a0\u2003\u3000\u200b a1!",
]


def random_texts(count: int, seed: int) -> list[str]:
    """Texts from one alphabet each, or from any characters at all (surrogates apart, which are no
    text)."""
    draw = random.Random(seed)
    anything = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = []
    for number in range(count):
        size = draw.randint(1, 120)
        if number % 7 == 6:
            texts.append("".join(map(chr, draw.choices(anything, k=size))))
        else:
            texts.append("".join(draw.choices(ALPHABETS[number % 7], k=size)))
    return texts


TEXTS = ADVERSARIAL + random_texts(700, seed=2)


def differing(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]], texts: list[str] = TEXTS
) -> list[str]:
    """The texts that the two encode differently."""
    return [text for text in texts if tokenizer.tokenize(text) != list(encode(text))]


class TestGPT2:
    @pytest.mark.parametrize(
        "engine", [pytest.param("gigatoken", marks=pytest.mark.peers), "tiktoken"]
    )
    @pytest.mark.parametrize("files", ["published", "tiny"])
    def test_engines_equal_the_plain_implementation(
        self, engine: str, files: str, tmp_path: Path
    ) -> None:
        pytest.importorskip(engine)
        paths = gpt2_files() if files == "published" else write_bpe(tmp_path)
        fast = GPT2BPETokenizer(*paths, engine=engine)
        plain = PlainBPE(*paths)
        assert fast.engine == engine
        assert differing(fast, plain.encode) == []

    @pytest.mark.peers
    @pytest.mark.sweep
    def test_every_character_is_cut_alike(self) -> None:
        """All that `has_newer_characters` does not keep from an engine: alone, in a word, behind a
        space, before a digit."""
        characters = [chr(code) for code in range(0x40000) if not 0xD800 <= code < 0xE000]
        old = [char for char in characters if not gpt2_bpe.has_newer_characters(char)]
        around = [f"{char} a{char}b {char}1{char}{char}!{char}\n{char}" for char in old]
        texts = ["".join(around[start : start + 64]) for start in range(0, len(old), 64)]
        plain = PlainBPE(*gpt2_files())
        for engine in ("gigatoken", "tiktoken"):
            pytest.importorskip(engine)
            assert (
                differing(GPT2BPETokenizer(*gpt2_files(), engine=engine), plain.encode, texts) == []
            ), engine

    def test_the_plain_implementation_equals_tiktokens_own_gpt2(self, tmp_path: Path) -> None:
        """tiktoken's public "gpt2" with its own pattern and its own reading of the same two
        files."""
        public = pytest.importorskip("tiktoken_ext.openai_public")
        load = pytest.importorskip("tiktoken.load").data_gym_to_mergeable_bpe_ranks
        vocab, merges = gpt2_files()
        encoding = pytest.importorskip("tiktoken").Encoding(
            "gpt2",
            pat_str=public.r50k_pat_str,
            mergeable_ranks=load(merges, vocab),
            special_tokens={public.ENDOFTEXT: 50256},
        )
        plain = PlainBPE(vocab, merges)
        assert [
            text for text in TEXTS if plain.encode(text) != encoding.encode_ordinary(text)
        ] == []
        assert [plain.decode(plain.encode(text)) for text in TEXTS] == TEXTS

    @pytest.mark.peers
    def test_random_merges(self, tmp_path: Path) -> None:
        """Merges that a training could have made: our choice of engines must never change an id."""
        for library in ("gigatoken", "tiktoken"):
            pytest.importorskip(library)
        draw = random.Random(3)
        unreachable = set()
        for _ in range(60):
            known = ["a", "b", "c", "Ġ"]
            merges = []
            while len(merges) < 12:
                pair = (draw.choice(known), draw.choice(known))
                if "".join(pair) not in known:
                    merges.append(" ".join(pair))
                    known.append("".join(pair))
            paths = write_bpe(tmp_path, merges)
            plain = PlainBPE(*paths)
            texts = ["".join(draw.choices("abc ", k=40)) for _ in range(20)]
            products = gpt2_bpe.products(paths[1], gpt2_bpe.read_merges(paths[1]))
            unreachable.add(len(products) < len(merges))
            for engine in ("gigatoken", "tiktoken"):
                assert (
                    differing(GPT2BPETokenizer(*paths, engine=engine), plain.encode, texts) == []
                ), (engine, merges)
        assert unreachable == {True, False}  # both kinds of merges have come up

    @pytest.mark.peers
    def test_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        vocab, merges = gpt2_files()
        oracle = transformers.GPT2TokenizerFast(vocab=vocab, merges=merges)
        # special there, text here as in Megatron
        texts = [text for text in TEXTS if "<|endoftext|>" not in text]
        plain = GPT2BPETokenizer(vocab, merges)
        assert differing(plain, lambda text: oracle(text).input_ids, texts) == []


@pytest.mark.peers
class TestHuggingFace:
    def test_a_saved_folder(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        vocab, merges = gpt2_files()
        transformers.GPT2TokenizerFast(vocab=vocab, merges=merges).save_pretrained(tmp_path)
        oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
        tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
        assert (
            differing(tokenizer, lambda text: oracle.encode(text, add_special_tokens=False)) == []
        )
        assert (tokenizer.vocab_size, tokenizer.eod) == (len(oracle), oracle.eos_token_id)
        assert tokenizer.detokenize(tokenizer.tokenize("Hello wörld")) == "Hello wörld"

    def test_a_folder_without_tokenizer_json(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        vocab, merges = gpt2_files()
        (tmp_path / "vocab.json").write_bytes(Path(vocab).read_bytes())
        (tmp_path / "merges.txt").write_bytes(Path(merges).read_bytes())
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
        assert tokenizer.vocab_size == 50257
        plain = GPT2BPETokenizer(vocab, merges)
        assert differing(tokenizer, plain.tokenize, ["Hello world", "It's 2026.", "深度 😀"]) == []


@pytest.fixture
def model() -> str:
    """Mistral 7B's first sentencepiece model: 32000 pieces, byte fallback."""
    return package_file("mistral-common", "tokenizer.model.v1")


class TestSentencePiece:
    def test_llama(self, model: str) -> None:
        oracle = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=model)
        llama = build_tokenizer("Llama2Tokenizer", tokenizer_model=model)
        plain = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model)
        assert differing(llama, lambda text: oracle.encode(text, add_bos=True)) == []
        assert differing(plain, oracle.encode) == []
        assert (llama.vocab_size, llama.bos, llama.eod) == (32000, 1, 2)
        assert llama.tokenize("Hello world") == [1, 22557, 1526]
        assert llama.detokenize(llama.tokenize("Hello wörld 😀")) == "Hello wörld 😀"

    @pytest.mark.peers
    def test_megatron_cores_special_pieces(self, model: str) -> None:
        library = pytest.importorskip(
            "megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer"
        )
        ours = build_tokenizer("SentencePieceTokenizer", tokenizer_model=model, vocab_extra_ids=3)
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<s>", "</s>"]
        names += [f"<extra_id_{number}>" for number in range(3)]
        oracle = library.SentencePieceTokenizer(
            model, special_tokens=names, legacy=True, trim_spm_separator_after_special_token=False
        )
        draw = random.Random(4)
        texts = [
            "".join(draw.choices([*names, "a", " b", "word ", " ", "é", "<"], k=12))
            for _ in range(200)
        ]
        assert differing(ours, oracle.text_to_ids, ADVERSARIAL + texts) == []
        assert ours.vocab_size == oracle.vocab_size and ours.eod == oracle.token_to_id("<EOD>")


class TestTikToken:
    @pytest.mark.peers
    def test_megatron_core_on_a_real_vocabulary(self, tmp_path: Path) -> None:
        library = pytest.importorskip("megatron.core.tokenizers.text.libraries.tiktoken_tokenizer")
        pytest.importorskip("tiktoken")
        source = package_file("mistral-common", "tekken_240911.json")
        pieces = json.loads(Path(source).read_text(encoding="utf-8"))["vocab"][:20_000]
        (tmp_path / "v.json").write_text(json.dumps(pieces))
        # special there, text here as in Megatron's older class
        texts = [text for text in TEXTS if "<" not in text]
        for pattern in ("v1", "v2"):
            oracle = library.TikTokenTokenizer(
                str(tmp_path / "v.json"), pattern=pattern, vocab_size=21_000
            )
            tokenizer = build_tokenizer(
                "TikTokenizer",
                tokenizer_model=str(tmp_path / "v.json"),
                tiktoken_pattern=pattern,
                vocab_size=21_000,
            )
            assert differing(tokenizer, oracle.text_to_ids, texts) == []
            assert (tokenizer.eod, tokenizer.bos, tokenizer.pad) == (
                oracle.eod,
                oracle.bos_id,
                oracle.pad_id,
            )


@pytest.mark.peers
def test_a_trained_tokenizer_gives_the_librarys_own_ids(tmp_path: Path) -> None:
    """tools/train_tokenizer.py: every engine of ours against the tokenizers library's own reading
    of what was trained."""
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 3)
    )
    for kind in ("gpt2", "huggingface"):
        words = [
            "--input",
            str(tmp_path / "x.jsonl"),
            "--vocab-size",
            "1000",
            "--output-dir",
            str(tmp_path / kind),
        ]
        assert load_tool("train_tokenizer").main([*words, "--format", kind]) == 0
    paths = [str(tmp_path / "gpt2" / name) for name in ("vocab.json", "merges.txt")]
    known = [text for text in TEXTS if not gpt2_bpe.has_newer_characters(text)]
    of_files = tokenizers.ByteLevelBPETokenizer(*paths)
    of_json = tokenizers.Tokenizer.from_file(str(tmp_path / "huggingface" / "tokenizer.json"))
    for engine in ("gigatoken", "tiktoken"):
        pytest.importorskip(engine)
        mine = GPT2BPETokenizer(*paths, engine=engine)
        assert mine.engine == engine and mine.vocab_size == 1000
        for library in (of_files, of_json):
            texts = [text for text in known if library is of_files or "<|endoftext|>" not in text]
            assert (
                differing(mine, lambda text, library=library: library.encode(text).ids, texts) == []
            )
