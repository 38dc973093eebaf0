"""What clients may send: OpenAI's fields and, under the same names, vLLM's.

Strict: no text or true/false where a number belongs. null is the same as leaving a field out, except for max_tokens of
completions. What several fields mean together, and what depends on the model, is checked in translate.py and by the
engine. Large values (prompts, messages, token ids) are taken as they are and checked there too, in one pass.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from octavo.engine.request import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MIN_REPETITION,
)

MAX_INT = 2**63 - 1
MAX_SALT = 1024  # characters
MAX_BAD_WORD = 1024
MAX_ALLOWED_IDS = 1 << 18
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it

_TOKEN_ID = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1},
    ]
}
_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _PART}]},
    },
    "required": ["role", "content"],
}


def _at_most(limit: int) -> BeforeValidator:
    """Refuses long lists and objects before each of their entries is looked at."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries, at most {limit}")
        return value

    return BeforeValidator(check)


type Count = Annotated[int, Field(ge=0, le=MAX_INT)]
type TokenIds = Annotated[Any, WithJsonSchema({"anyOf": [_IDS, {"type": "null"}]})]  # checked by SamplingParams
type Stops = Annotated[
    Any,  # checked by SamplingParams
    WithJsonSchema(
        {"anyOf": [_STOP, {"type": "null"}, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]}
    ),
]
type Unbuilt = Annotated[Any, WithJsonSchema({"type": "null", "description": "Not built yet."})]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="One of /v1/models; the first of them by default.")


class StreamOptions(BaseModel):
    """What a stream says beside the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="A last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")


class GenerationRequest(_Body):
    """What completions and chats have in common. Defaults of sampling are the model's."""

    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1, description="Only as much as `n`.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    user: str | None = Field(None, description="Ignored.")
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None

    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION, le=1 / MIN_REPETITION)
    seed: int | None = Field(None, ge=-MAX_INT - 1, le=MAX_INT)
    stop: Stops = None
    stop_token_ids: Annotated[list[int] | None, _at_most(MAX_STOP_TOKEN_IDS)] = None
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD)]] | None, _at_most(MAX_BAD_WORDS)
    ] = None
    allowed_token_ids: Annotated[TokenIds, _at_most(MAX_ALLOWED_IDS)] = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, _at_most(MAX_LOGIT_BIAS)] = Field(
        None, description="Token ids, as strings, to numbers."
    )
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Count | None = Field(None, description="Not with `stream`.")

    echo: bool | None = Field(None, description="Begin the answer with the prompt (chats: with an open last message).")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Keep the last ones; -1: what fits."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower runs first.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Log-probabilities name tokens token_id:N.")

    prompt_embeds: Unbuilt = None
    use_beam_search: bool | None = None
    response_format: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "null"},
                    {"type": "object", "properties": {"type": {"enum": ["text"]}}, "required": ["type"]},
                ]
            }
        ),
    ] = None
    structured_outputs: Unbuilt = None
    guided_json: Unbuilt = None
    guided_regex: Unbuilt = None
    guided_choice: Unbuilt = None
    guided_grammar: Unbuilt = None
    guided_decoding_backend: Unbuilt = None
    guided_whitespace_pattern: Unbuilt = None
    structural_tag: Unbuilt = None
    logits_processors: Unbuilt = None
    kv_transfer_params: Unbuilt = None
    vllm_xargs: Unbuilt = None
    repetition_detection: Unbuilt = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Count | None = Field(DEFAULT_MAX_TOKENS, description="null: as many as fit.")
    logprobs: Count | None = None
    add_special_tokens: bool | None = None
    suffix: Unbuilt = None


class ChatRenderingRequest(_Body):
    """What makes a prompt of messages, in chats and in /tokenize."""

    messages: Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]
    add_generation_prompt: bool | None = Field(None, description="True, unless continue_final_message is.")
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Never: the template writes them.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    chat_template: Unbuilt = None
    tools: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]})] = None
    documents: Unbuilt = None
    mm_processor_kwargs: Unbuilt = None
    media_io_kwargs: Unbuilt = None


class ChatRequest(GenerationRequest, ChatRenderingRequest):
    """POST /v1/chat/completions"""

    max_tokens: Count | None = Field(None, description="The older name of max_completion_tokens, which wins.")
    max_completion_tokens: Count | None = Field(None, description="As many as fit by default.")
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, description="Only with `logprobs`.")
    reasoning_effort: str | None = Field(None, description="A variable of the chat template.")
    tool_choice: Annotated[Any, WithJsonSchema({"enum": [None, "none", "auto"]})] = None
    parallel_tool_calls: bool | None = None
    functions: Unbuilt = None
    function_call: Annotated[Any, WithJsonSchema({"enum": [None, "none", "auto"]})] = None
    modalities: Annotated[Any, WithJsonSchema({"enum": [None, ["text"]]})] = None
    audio: Unbuilt = None
    prediction: Unbuilt = None
    web_search_options: Unbuilt = None


class TokenizeRequest(ChatRenderingRequest):
    """POST /tokenize, with either a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "items": _MESSAGE, "minItems": 1}]})
    ] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize"""

    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": _TOKEN_ID})]
