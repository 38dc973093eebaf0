"""From a request's fields to SamplingParams: pure functions, no engine and no tokenizer.

Refuses (RequestError) what is not built yet, by name, and fields that contradict each other.
"""

import re
from typing import Any

import msgspec

from octavo.engine.checks import shown
from octavo.engine.errors import RequestError
from octavo.engine.request import SamplingParams
from octavo.server.openai.requests import (
    MAX_ALLOWED_IDS,
    ChatRenderingRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)

MAX_SAMPLES = 4096  # prompts times n

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "min_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
# Fields that stand for something this server cannot do, and the values that ask for nothing.
_UNBUILT_GENERATION: dict[str, tuple[object, ...]] = {
    "prompt_embeds": (), "use_beam_search": (False,), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_decoding_backend": (),
    "guided_whitespace_pattern": (), "structural_tag": (), "logits_processors": ([],), "kv_transfer_params": ({},),
    "vllm_xargs": ({},), "repetition_detection": (),
}  # fmt: skip
_UNBUILT_RENDERING: dict[str, tuple[object, ...]] = {
    "tools": ([],), "documents": ([],), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
}  # fmt: skip
_UNBUILT_CHAT: dict[str, tuple[object, ...]] = {
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"], []), "audio": (), "prediction": (), "web_search_options": (),
}  # fmt: skip


def check_completion(request: CompletionRequest) -> None:
    """Refuses what a completion cannot have."""
    _check_generation(request)
    _refuse_unbuilt(request, {"suffix": ()})


def check_chat(request: ChatRequest) -> None:
    """Refuses what a chat cannot have."""
    _check_generation(request)
    check_rendering(request)
    _refuse_unbuilt(request, _UNBUILT_CHAT)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")


def check_template(request: ChatRenderingRequest) -> None:
    """Refuses a template that comes with the request, and parts of prompts that are not built."""
    if request.chat_template is not None:
        raise RequestError("chat_template must not come with a request: the operator chooses it", "chat_template")
    _refuse_unbuilt(request, _UNBUILT_RENDERING)


def check_rendering(request: ChatRenderingRequest) -> None:
    """Refuses that, and what a conversation cannot be rendered with."""
    check_template(request)
    if request.add_special_tokens:
        raise RequestError("add_special_tokens is not for chats: the template writes them", "add_special_tokens")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )


def check_samples(num_prompts: int, n: int | None, *, max_prompts: int, max_n: int) -> None:
    """Refuses more prompts or samples than one request may have."""
    n = 1 if n is None else n
    if n > max_n:
        raise RequestError(f"n must be at most {max_n}, got {shown(n)}", "n")
    if num_prompts > max_prompts:
        raise RequestError(f"prompt holds {num_prompts} prompts, at most {max_prompts}", "prompt")
    if num_prompts * n > MAX_SAMPLES:
        raise RequestError(f"{num_prompts} prompts with n {n} are more than {MAX_SAMPLES} samples", "n")


def check_room(num_prompts: int, n: int | None, room: int) -> None:
    """Refuses what even an idle server would not queue: an answer of "later" would be asked for ever.

    Args:
      room: samples that run and wait at most; the last prompt's may go beyond.
    """
    n = 1 if n is None else n
    if (num_prompts - 1) * n >= room:
        raise RequestError(
            f"{num_prompts} prompts with n {n} are more than the {room} samples that this server runs and queues "
            "(max_num_seqs, max_num_queued_reqs)",
            "prompt",
        )


def check_priority(priority: int | None, policy: str) -> None:
    """Refuses a priority that the scheduler would not heed."""
    if priority and policy != "priority":
        raise RequestError(f"priority needs a server whose scheduling_policy is priority, not {policy}", "priority")


def check_allowed_ids(allowed: object, num_prompts: int) -> None:
    """Refuses long lists for many prompts, each of which has its own copy to check."""
    if isinstance(allowed, list) and len(allowed) * num_prompts > MAX_ALLOWED_IDS:
        raise RequestError(
            f"allowed_token_ids has {len(allowed)} entries for {num_prompts} prompts, together at most "
            f"{MAX_ALLOWED_IDS}",
            "allowed_token_ids",
        )


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """What a completion asks for; `max_tokens` is None where it does not say."""
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    return _params(request, defaults, _said(request, "max_tokens"), request.logprobs, prompt_logprobs)


def chat_params(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """What a chat asks for; `max_tokens` is None where it does not say."""
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, defaults, asked, logprobs, request.prompt_logprobs)


def in_chat_words(error: RequestError, request: ChatRequest) -> RequestError:
    """The same complaint under the names that a chat has for the engine's fields."""
    names = {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    message = re.sub(r"\b(?:logprobs|max_tokens)\b", lambda match: names.get(match[0], match[0]), str(error))
    return RequestError(message, (names | {"prompt": "messages"}).get(error.field or "", error.field))


def with_room(params: SamplingParams, default: int | None, room: int) -> SamplingParams:
    """The same with a number for `max_tokens`.

    Args:
      params: one that the client gave stays, and is refused later if it does not fit.
      default: of the route and the model; cut to what fits.
      room: tokens that fit behind the prompt.
    """
    if params.max_tokens is not None:
        return params
    limit = room if default is None else min(default, room)
    return msgspec.structs.replace(params, max_tokens=max(limit, 1))  # at least 1: a full prompt is refused by name


def split_prompts(prompt: object, max_tokens: int | None) -> list[str | list[int]]:
    """The prompts of a completion: text, token ids (at most `max_tokens` of them), or a list of these."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError("prompt must be a string, a list of token ids, or a list of these", "prompt")
    if not prompt:
        raise RequestError("prompt must not be empty", "prompt")
    if not isinstance(prompt[0], str | list):
        return [_token_ids(prompt, max_tokens)]
    for item in prompt:
        if not isinstance(item, str | list):
            raise RequestError(f"prompt must not mix prompts and numbers, got {shown(item)}", "prompt")
    return [item if isinstance(item, str) else _token_ids(item, max_tokens) for item in prompt]


def _token_ids(ids: list[Any], max_tokens: int | None) -> list[int]:
    if max_tokens is not None and len(ids) > max_tokens:
        raise RequestError(f"prompt holds {len(ids)} token ids, at most {max_tokens} (max_model_len)", "prompt")
    if set(map(type, ids)) - {int}:
        wrong = next(item for item in ids if type(item) is not int)
        raise RequestError(f"prompt must hold integer token ids, got {shown(wrong)}", "prompt")
    return ids


def _check_generation(request: GenerationRequest) -> None:
    _refuse_unbuilt(request, _UNBUILT_GENERATION)
    kind = request.response_format
    if kind is not None and not (isinstance(kind, dict) and kind.get("type") == "text"):
        raise RequestError('response_format is not built yet; supported: {"type": "text"}', "response_format")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError(f"best_of is not built yet: it must be n ({request.n or 1}) or absent", "best_of")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs does not work with stream", "prompt_logprobs")


def _refuse_unbuilt(request: Any, fields: dict[str, tuple[object, ...]]) -> None:
    for name, harmless in fields.items():
        value = getattr(request, name)
        if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
            raise RequestError(f"{name} is not built yet", name)


def _params(
    request: GenerationRequest,
    defaults: SamplingParams,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    return msgspec.structs.replace(
        defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given
    )


def _said(request: CompletionRequest, name: str) -> int | None:
    return getattr(request, name) if name in request.model_fields_set else None


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise RequestError(f"logit_bias must map token ids to numbers, got the id {shown(name)}", "logit_bias")
        bias[int(name)] = value
    return bias
