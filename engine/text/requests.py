"""From what callers ask to a `Request`: prompts to ids, defaults and what is left of max_tokens, bad words, templates.

Shared by the offline `Engine` and the `AsyncEngine`. Refuses what it can see by itself; `check_request`
checks the rest against the model.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.engine.errors import RequestError
from octavo.engine.request import Request, SamplingParams
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.prompts import Prompt, bad_words_token_ids, parse_prompt
from octavo.engine.text.tokenizer import Tokenizer

type Message = Mapping[str, Any]


class RequestMaker:
    """Makes the requests of one engine. Any thread may call it.

    Args:
      tokenizer: None where there is none; then prompts are ids.
      max_model_len: tokens of prompt and output.
      max_length: the same, as far as the KV pool holds them.
      eos_token_ids: that the model's configs declare; the tokenizer's own is added.
      default_sampling_params: what a request without params gets.
      chat_template: replaces the model's.

    Raises:
      LoadError: `chat_template` does not compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        max_length: int,
        eos_token_ids: tuple[int, ...],
        default_sampling_params: Mapping[str, Any],
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_length = max_length
        own = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *own)))
        self.default_params = SamplingParams(**default_sampling_params)
        self._chat_template: ChatTemplate | None = None
        if chat_template is not None:
            special_tokens = None if tokenizer is None else tokenizer.special_tokens
            self._chat_template = ChatTemplate(chat_template, special_tokens)

    def get_tokenizer(self) -> Tokenizer:
        """What turns text into token ids here.

        Raises:
          RequestError: a dummy model has none.
        """
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give token ids", "prompt")
        return self.tokenizer

    def parse_prompt(self, prompt: object) -> Prompt:
        """One prompt of any form: text, ids, a mapping, or one that is parsed already."""
        return prompt if isinstance(prompt, Prompt) else parse_prompt(prompt, self.tokenizer, self.max_model_len)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """The prompt of one conversation; see `Engine.chat`."""
        tokenizer = self.get_tokenizer()
        return self._template(chat_template).prompt(
            messages,
            tokenizer,
            max_tokens=self.max_model_len,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
            tools=tools,
        )

    def make(self, request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int = 0) -> Request:
        """The request, not checked against the model yet.

        Raises:
          RequestError: params are none, or need a tokenizer where there is none.
        """
        if params is None:
            params = self.default_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}", "params")
        if params.max_tokens is None or params is self.default_params:
            # All that is left; at least one, so that a long prompt is refused by name. A default that nobody
            # asked for is cut to it.
            rest = max(self.max_length - len(prompt.token_ids), 1)
            rest = rest if params.max_tokens is None else min(params.max_tokens, rest)
            params = msgspec.structs.replace(params, max_tokens=rest)
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise RequestError("stop and bad_words need a tokenizer", "stop" if params.stop_strings else "bad_words")
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=bad_words_token_ids(self.get_tokenizer(), params.bad_words) if params.bad_words else [],
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=prompt.cache_salt,
        )

    def _template(self, source: str | None) -> ChatTemplate:
        tokenizer = self.get_tokenizer()
        if source is not None:
            return ChatTemplate.from_request(source, tokenizer.special_tokens)
        if self._chat_template is None:  # two threads may both make it: they make the same
            if tokenizer.chat_template is None:
                raise RequestError("the model has no chat template: pass one as chat_template", "chat_template")
            self._chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        return self._chat_template
