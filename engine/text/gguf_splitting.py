"""How byte-level BPE cuts text into words, by the names that GGUF files give it (`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizer.json; where one is not published, what llama.cpp cuts by. Refuses
unknown names: with a wrong pattern a model reads other tokens than it was trained on, and nothing says so. Not here,
although llama.cpp knows them: text encoders (jina-*, roberta-bpe, modern-bert, granite-embed-*, whitespace), pieces
instead of bytes (gemma4, sarvam-moe), and afmoe, chameleon, kimi-k2, superbpe.
"""

import dataclasses
import reprlib

from octavo.configs.errors import LoadError

_LETTER_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2_SPLIT = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _words(digits: str, letters: str = r"\p{L}+", marks: str = "") -> str:
    """The pattern that Llama 3 has from OpenAI's cl100k; `digits` and `letters` are what models change in it."""
    return (
        rf"{_LETTER_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _cased(endings: str, digits: str) -> str:
    """The pattern of OpenAI's o200k: a capital letter begins a word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{endings}|{before}{upper}+{lower}*{endings}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


_LLAMA3_SPLIT = _words(r"\p{N}{1,3}")
_QWEN2_SPLIT = _words(r"\p{N}")
_CASED_SPLIT = _cased(f"{_LETTER_ENDINGS}?", r"\p{N}{1,3}")
_PUNCTUATION = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_DEEPSEEK_WORDS = rf"[{_PUNCTUATION}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
# The cased letters of Unicode (\p{Lu}, \p{Ll} and \p{Lt}), as DeepSeek wrote them down.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclasses.dataclass(frozen=True)
class Splitting:
    """How text is cut before BPE.

    Attributes:
      patterns: each cuts what the ones before it left; matches and what lies between them are pieces.
      nfc: text is brought to NFC first.
      whole_words: a word that is a token is not built from merges.
      add_bos: what a file without `add_bos_token` means.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = Splitting((_GPT2_SPLIT,))
_NEOX = Splitting((_GPT2_SPLIT,), nfc=True)
_DIGITS = Splitting((r"\p{N}", _GPT2_SPLIT))
_LLAMA3 = Splitting((_LLAMA3_SPLIT,), whole_words=True, add_bos=True)
_CL100K = Splitting((_LLAMA3_SPLIT,))
_QWEN2 = Splitting((_QWEN2_SPLIT,), nfc=True)
_CASED = Splitting((_CASED_SPLIT,))
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

SPLITTINGS: dict[str, Splitting] = {
    # What llama.cpp does with files that name none.
    "default": Splitting((r"[\p{P}$+<=>^~|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9]{3}")),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("solar-open", "grok-2"), Splitting((_QWEN2_SPLIT,))),
    "qwen35": Splitting((_words(r"\p{N}", letters=r"[\p{L}\p{M}]+", marks=r"\p{M}"),), nfc=True),
    "deepseek-llm": Splitting(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), Splitting(_DEEPSEEK3)),
    "spark2_5": Splitting(
        (
            *_DEEPSEEK3[:2],
            rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
            r"\p{N}",
        )
    ),
    "tekken": Splitting((_cased("", r"\p{N}"),), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _CASED),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", _CASED_SPLIT))),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"), _GPT2),
    "granite-docling": _GPT2,
    **dict.fromkeys(("mpt", "olmo"), _NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    "command-r": dataclasses.replace(_DIGITS, nfc=True),
    "falcon": Splitting((r"[\p{P}$+<=>^~|`]+", _GPT2_SPLIT, "[0-9]{3}")),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("glm4", "glm5"), dataclasses.replace(_CL100K, whole_words=True)),
    "minicpm5": Splitting((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    "youtu": Splitting(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _cased(f"{_LETTER_ENDINGS}?", r"\p{N}"),
        ),
        whole_words=True,
    ),
    "jais-2": Splitting(
        (
            _LLAMA3_SPLIT.removesuffix(_SPACES)
            + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Splitting((_BAILING,))),
    "seed-coder": Splitting(
        (
            rf"{_LETTER_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",
        )
    ),
    "ufakzeka": Splitting((_QWEN2_SPLIT.removeprefix(f"{_LETTER_ENDINGS}|"),)),
    "laguna": Splitting((r"[^\n]+|[\n]+", _QWEN2_SPLIT)),
    "exaone-moe": Splitting(
        (
            rf"{_LETTER_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Splitting((_BLOOM,))),
    "viking": Splitting((_BLOOM, r"\p{N}")),
}


def find_splitting(name: object) -> Splitting:
    """The splitting of one `tokenizer.ggml.pre`; LoadError names those there are."""
    if not isinstance(name, str) or name not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        raise LoadError(f"tokenizer.ggml.pre {reprlib.repr(name)} is not supported; supported: {known}")
    return SPLITTINGS[name]
