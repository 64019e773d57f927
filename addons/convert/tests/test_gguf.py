"""tools/convert_checkpoint.py gguf-import and gguf-export: logits of a round trip, and llama.cpp's
tokens and probabilities for the file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.addons.convert import hf_tokenizer
from megatron.data.tokenizers.build import build_tokenizer
from megatron.inference.load_model import open_trained_model
from tests.core.data.vocabularies import MERGES, write_bpe
from tests.problems import assert_reported

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.peers
TEXT = "the theta in the tin, 12 aa"


def folder_of(family: str, folder: Path, dtype=torch.float32, **changes):
    """A small model of this family with a byte-level BPE, as a Hugging Face folder."""
    folder.mkdir()
    ours = build_tokenizer(
        tokenizer_type="GPT2BPETokenizer",
        **dict(
            zip(
                ("vocab_file", "merge_file"),
                write_bpe(folder, [*MERGES, "1 2", "12 3", "123 4", "! '"]),
                strict=True,
            )
        ),
    )
    for name, content in hf_tokenizer.files(ours, 64).items():
        (folder / name).write_bytes(content)
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=ours.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=ours.eod,
        eos_token_id=ours.eod,
        **{"head_dim": 16, **changes},
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape) * (0.3 if p.dim() > 1 else 1.0)
    model.to(dtype).save_pretrained(folder)
    return model.float(), ours


def llama_cpp(file: Path, **words) -> dict:
    """What llama.cpp answers to a completion, greedily."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 64, 1, False, 0
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    answer: dict = server.handle_completions({"temperature": 0, **words})
    return answer


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {
        "tie_word_embeddings": True,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, convert, tmp_path):
    """Logits and ids of the model that comes back are the first one's."""
    theirs, tokenizer = folder_of(family, tmp_path / "hf", **FAMILIES[family])
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")
    convert("gguf-export", tmp_path / "ours", tmp_path / "m.gguf")
    out = convert("gguf-import", tmp_path / "m.gguf", tmp_path / "back", "--no-verify")
    assert "dequantized" not in out
    back = open_trained_model(str(tmp_path / "back"), device="cpu")
    ids = tokenizer.tokenize(TEXT)
    assert back.tokenizer.tokenize(TEXT) == ids
    with torch.no_grad():
        ours = back.model(torch.tensor([ids]))
        right = theirs(torch.tensor([ids])).logits
    torch.testing.assert_close(ours, right, rtol=0, atol=2e-5)


@pytest.mark.campaign
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_continues_alike(family, convert, tmp_path):
    """Tokens and their log-probabilities are transformers'."""
    biases = {"attention_bias": True} if family == "llama" else {}
    theirs, tokenizer = folder_of(family, tmp_path / "hf", **FAMILIES[family], **biases)
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")
    convert("gguf-export", tmp_path / "ours", tmp_path / "m.gguf")
    odd = [
        index
        for index in range(tokenizer.vocab_size)
        if not tokenizer.detokenize([index]).isascii()
    ]
    answer = llama_cpp(
        tmp_path / "m.gguf",
        prompt=TEXT,
        max_tokens=8,
        logprobs=1,
        logit_bias=[[index, -1e9] for index in [*odd, tokenizer.eod]],  # half a letter is no text
    )
    ids = tokenizer.tokenize(TEXT)
    for token in answer["choices"][0]["logprobs"]["content"]:
        with torch.no_grad():
            row = theirs(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        allowed = row.clone()
        allowed[[*odd, tokenizer.eod]] = -math.inf
        assert token["id"] == int(allowed.argmax())
        assert math.isclose(token["logprob"], float(row[token["id"]]), abs_tol=5e-3)
        ids.append(token["id"])
    assert len(ids) == len(tokenizer.tokenize(TEXT)) + 8


def test_quantized_tensors_are_dequantized(convert, tmp_path):
    """Q8_0 and bf16: the values are those of the gguf package's own formulas."""
    folder_of("qwen2", tmp_path / "hf", torch.bfloat16)
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")
    convert("gguf-export", tmp_path / "ours", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen2")
    values = {}
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(
                field.name, field.contents(), kinds[0], kinds[-2] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        q8 = gguf.GGMLQuantizationType.Q8_0
        if tensor.name.endswith("ffn_up.weight"):
            packed = gguf.quantize(value, q8)
            writer.add_tensor(tensor.name, packed, raw_dtype=q8)
            values[tensor.name] = torch.tensor(gguf.dequantize(packed, q8))
        else:
            writer.add_tensor(tensor.name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = convert("gguf-import", tmp_path / "q.gguf", tmp_path / "back", "--no-verify")
    assert "2 of Q8_0" in out
    back = open_trained_model(str(tmp_path / "back"), device="cpu").model
    for number, layer in back.decoder.layers.items():
        ours = layer.mlp.linear_fc1.weight.detach()[1]
        assert torch.equal(ours, values[f"blk.{int(number)}.ffn_up.weight"])


def test_what_is_refused(convert, tmp_path, monkeypatch):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    errors = convert("gguf-import", tmp_path / "bad.gguf", tmp_path / "x", fails=True)
    assert_reported(errors, "not-converted", "bad.gguf")
    folder_of("llama", tmp_path / "biases", attention_bias=True)
    convert("hf-import", tmp_path / "biases", tmp_path / "biased", "--no-verify")
    convert("gguf-export", tmp_path / "biased", tmp_path / "b.gguf")
    errors = convert("gguf-import", tmp_path / "b.gguf", tmp_path / "x", fails=True)
    assert_reported(errors, "not-converted", "b.gguf")
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    folder_of("llama", tmp_path / "hf", rope_parameters=scaled)
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")
    errors = convert("gguf-export", tmp_path / "ours", tmp_path / "m.gguf", fails=True)
    assert_reported(errors, "not-converted")
    assert not (tmp_path / "m.gguf").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from megatron.addons.convert import program

    assert program._needs("gguf")[0].endswith("pip install gguf [package-missing]")


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_is_cut_as_before(cut, convert, tmp_path):
    """Ids of a text with numbers: those of the library `tokenizers` before and after."""
    from tokenizers import Tokenizer

    from megatron.addons.convert import gguf_files

    folder_of("llama", tmp_path / "hf")
    file = tmp_path / "hf" / "tokenizer.json"
    table = json.loads(file.read_text())
    table["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": gguf_files._CUTS[cut]}
    file.write_text(json.dumps(table))
    texts = ("the 1234567 tin!'s", "I'll SHE'LL  two\n\n x=12345")
    right = [Tokenizer.from_file(str(file)).encode(text).ids for text in texts]
    convert("hf-import", tmp_path / "hf", tmp_path / "ours", "--no-verify")
    convert("gguf-export", tmp_path / "ours", tmp_path / "m.gguf")
    pre = gguf.GGUFReader(tmp_path / "m.gguf").get_field("tokenizer.ggml.pre")
    assert pre.contents() == cut
    convert("gguf-import", tmp_path / "m.gguf", tmp_path / "back", "--no-verify")
    back = open_trained_model(str(tmp_path / "back"), device="cpu").tokenizer
    assert [back.tokenize(text) for text in texts] == right
