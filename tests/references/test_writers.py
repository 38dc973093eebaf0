"""The checkpoints that tests write say what they should, read by other people's code."""

import json
import pathlib

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from tests.references import byte_tokenizer, naive, tiny_models
from tests.references.table_model import EOS, TableModel, chain
from tests.references.tiny_gguf import write_gguf


def test_tokenizer_round_trip(tmp_path: pathlib.Path) -> None:
    byte_tokenizer.write_tokenizer(tmp_path, 320)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Où? 日本 🙂\n"
    assert tokenizer.encode(text).ids == byte_tokenizer.byte_ids(text)
    assert tokenizer.decode(byte_tokenizer.byte_ids(text)) == text
    assert tokenizer.encode("a</s>b").ids == [*byte_tokenizer.byte_ids("a"), EOS, *byte_tokenizer.byte_ids("b")]
    halves = [byte_tokenizer.piece_id(b"\xf0\x9f"), byte_tokenizer.piece_id(b"\x99\x82")]
    assert tokenizer.decode(halves) == "🙂"
    assert tokenizer.get_vocab_size() == 320


def test_table_model_follows_its_table(tmp_path: pathlib.Path) -> None:
    a, z = byte_tokenizer.byte_ids("az")
    model = TableModel(table=chain(a, byte_tokenizer.piece_id(b"hello"), z, EOS) | {EOS: {7: 2.0, 9: 3.0}})
    model.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    reference = naive.NaiveModel(config, load_file(tmp_path / "model.safetensors"))
    np.testing.assert_allclose(reference.logits([a, z, EOS, 50]), model.logits()[[a, z, EOS, 50]], atol=1e-5)
    assert model.greedy(a, 4) == [byte_tokenizer.piece_id(b"hello"), z, EOS, 9]
    assert model.text(model.greedy(a, 2)) == "helloz"


def test_a_token_has_one_successor() -> None:
    assert chain(1, 2, 1, 2) == {1: 2, 2: 1}
    with pytest.raises(ValueError, match="token 1 would be followed by 2 and by 3"):
        chain(1, 2, 1, 3)


def test_sharded_checkpoint(tmp_path: pathlib.Path) -> None:
    tiny = tiny_models.BY_NAME["llama-sharded"]
    tiny_models.write_checkpoint(tiny, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 3
    for name, value in tiny_models.make_weights(tiny.name).items():
        np.testing.assert_array_equal(load_file(tmp_path / index[name])[name], value)


def test_gguf_is_read_back(tmp_path: pathlib.Path) -> None:
    tiny = tiny_models.BY_NAME["llama-gqa"]
    kept = write_gguf(tiny, tmp_path / "model.gguf", "F32")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(tensors) == len(kept)
    for name, value in tiny_models.make_weights(tiny.name).items():
        np.testing.assert_array_equal(kept[name], value)
    q = kept["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight"].data[:4], q[[0, 8, 1, 9]])
