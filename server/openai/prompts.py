"""Prompts of a request, made in a worker thread: texts encoded, conversations rendered by the chat template.

Refuses what the tokenizer, the template or the limits refuse, as RequestError.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import RequestError
from octavo.engine.text.prompts import Prompt, check_length
from octavo.server.openai.requests import ChatRenderingRequest, ChatRequest, CompletionRequest
from octavo.server.openai.service import Service
from octavo.server.openai.translate import check_allowed_ids, check_room, check_samples, split_prompts

# Characters of a prompt that may be truncated: nothing else runs while a tokenizer lists the ids of a long one.
MAX_CUT_TEXT = 4 << 20
CUT_CHARACTERS = 16  # or as many for each token of the model's context


def completion_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion, in order."""
    config, most = service.config, service.engine.facts.max_model_len
    keep = _kept(service, request.truncate_prompt_tokens, request.max_tokens)
    given = split_prompts(request.prompt, most if keep is None else None)
    check_samples(len(given), request.n, max_prompts=config.max_prompts, max_n=config.max_n)
    check_room(len(given), request.n, service.engine.facts.max_num_seqs + config.max_num_queued_reqs)
    check_allowed_ids(request.allowed_token_ids, len(given))
    prompts = []
    for item in given:
        if isinstance(item, str):
            special = request.add_special_tokens is not False
            prompt = encode_text(service, item, add_special_tokens=special, bounded=keep is None)
        else:
            prompt = Prompt(None, item)
        prompts.append(_finished(prompt, keep, request.cache_salt))
    return prompts


def encode_text(service: Service, text: str, *, add_special_tokens: bool, bounded: bool = True) -> Prompt:
    """A text's prompt; `bounded` refuses in no time what cannot fit the model, otherwise what is too long to be cut."""
    tokenizer, most = service.tokenizer, service.engine.facts.max_model_len
    check_length(text, tokenizer, most if bounded else None)
    limit = max(MAX_CUT_TEXT, CUT_CHARACTERS * most)
    if not bounded and len(text) > limit:
        raise RequestError(f"the prompt has {len(text)} characters, at most {limit} can be truncated", "prompt")
    return Prompt(text, tokenizer.encode(text, add_special_tokens=add_special_tokens))


def chat_prompt(service: Service, request: ChatRequest) -> Prompt:
    """The prompt of a chat."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    keep = _kept(service, request.truncate_prompt_tokens, asked)
    return _finished(rendered(service, request, variables), keep, request.cache_salt)


def rendered(service: Service, request: ChatRenderingRequest, variables: Mapping[str, Any]) -> Prompt:
    """What the operator's or the model's template makes of the messages."""
    tokenizer = service.tokenizer
    continued = bool(request.continue_final_message)
    generation = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    return service.engine.render_chat(
        _known_roles(request.messages, service.config.chat_template or tokenizer.chat_template),
        add_generation_prompt=generation,
        continue_final_message=continued,
        chat_template_kwargs=variables,
    )


def _known_roles(messages: Any, template: str | None) -> Any:
    """The same; `developer` becomes `system` for a template that has no word for it."""
    if not isinstance(messages, list) or (template is not None and "developer" in template):
        return messages
    return [
        message | {"role": "system"} if isinstance(message, dict) and message.get("role") == "developer" else message
        for message in messages
    ]


def _kept(service: Service, truncate: int | None, max_tokens: int | None) -> int | None:
    """How many of a prompt's tokens are kept, None for all."""
    limit = service.engine.facts.max_length
    if truncate is None:
        return None
    if truncate == -1:  # what leaves room for the output
        return max(limit - max(max_tokens or 1, 1), 1)
    if truncate > limit:
        raise RequestError(f"truncate_prompt_tokens must be at most {limit}, got {truncate}", "truncate_prompt_tokens")
    return truncate


def _finished(prompt: Prompt, keep: int | None, salt: str | None) -> Prompt:
    if keep is not None and len(prompt.token_ids) > keep:
        prompt = Prompt(None, prompt.token_ids[len(prompt.token_ids) - keep :])
    return prompt if salt is None else dataclasses.replace(prompt, cache_salt=salt)
