"""What clients get: OpenAI's objects with vLLM's additions, which are left out unless they were asked for.

The OpenAPI document reads these classes too. Chunks of a stream are put together from bytes, in the same shapes, by
the routes and chunks.py.
"""

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # found in the prefix cache, a multiple of the block size


class Usage(msgspec.Struct, frozen=True):
    """Tokens: each prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """A token at a position. `bytes` is exact where `token` has only a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry a token of `text`; the first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters of `text` before the token


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


type PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """`index` is the prompt's number times `n`, plus the sample's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    id: str
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    object: str = "text_completion"


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "octavo"
    parent: None = None
    permission: list[str] = []


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: str = "list"


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str


class Version(msgspec.Struct, frozen=True):
    version: str


class Done(msgspec.Struct, frozen=True):
    success: bool


class ErrorDetails(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True):
    error: ErrorDetails
