"""The offline facade: prompts in, text out, on an `EngineCore` in this process.

Text becomes ids here and ids become text; everything that is wrong with a request is refused here or
by the core's check, before anything runs. One thread at a time may use an Engine.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import tqdm

from octavo.configs.engine import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.errors import ConfigError, EngineDeadError, RequestError
from octavo.engine.request import Request, SamplingParams
from octavo.engine.text.load import load_tokenizer
from octavo.engine.text.output import OutputProcessor, Piece, RequestOutput
from octavo.engine.text.prompts import Prompt, PromptInput, split_prompts
from octavo.engine.text.requests import Message, RequestMaker
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models_flax.checkpoint import resolve


class Engine:
    """One model, ready to answer.

    Args:
      model: a directory, a .gguf file or a Hugging Face hub id.
      progress: show bars while loading and compiling.
      options: the fields of EngineConfig; the names are vLLM's.

    Raises:
      ConfigError, LoadError: the engine cannot start with these options or this model.
    """

    def __init__(self, model: str, *, progress: bool = True, **options: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
        if unknown := sorted(set(options) - known):
            raise ConfigError(f"unknown option {unknown[0]}; known: {', '.join(sorted(known))}")
        config = EngineConfig(model=str(model), **options)
        source = resolve(config.model, revision=config.revision, load_format=config.load_format)
        tokenizer = load_tokenizer(config, source)
        self.core = EngineCore(
            config,
            progress=progress,
            source=source,
            sampled_vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        )
        self.config = config
        self._requests = RequestMaker(
            tokenizer,
            max_model_len=self.core.resolved.max_model_len,
            max_length=self.core.max_length,
            eos_token_ids=self.core.model_config.eos_token_ids,
            default_sampling_params=self.core.default_sampling_params,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, collections.deque[Piece]] = {}
        self._unclaimed: list[RequestOutput] = []  # complete, but `generate` was asked for others
        self._ids = map(str, itertools.count())

    # Whole results.

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts and returns the results in their order.

        Args:
          prompts: text, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of these.
          params: for all, or one for each prompt; by default the model's own.
          use_tqdm: show a bar.
          priority: one for each prompt; lower runs first, where the policy is priority.

        Raises:
          RequestError: one of them is wrong; then none of them runs.
          EngineDeadError: the device failed.
        """
        parsed = [self._requests.parse_prompt(prompt) for prompt in split_prompts(prompts)]
        return self._run(parsed, params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of conversations.

        Args:
          messages: {"role": …, "content": …}, oldest first.
          params: as for `generate`.
          use_tqdm: show a bar.
          add_generation_prompt: start an assistant's message.
          continue_final_message: continue the last message, an assistant's, instead.
          chat_template: Jinja that replaces the model's template; trusted as far as the sandbox goes.
          chat_template_kwargs: more variables for the template.
          tools: function definitions for the template.

        Raises:
          RequestError: as for `generate`, and what the template says against the messages.
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
        several = bool(messages) and isinstance(messages[0], list | tuple)
        conversations = messages if several else [messages]
        prompts = [
            self.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
            )
            for conversation in conversations
        ]
        return self._run(prompts, params, use_tqdm, None)

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
        """The prompt that `chat` would run for one conversation."""
        return self._requests.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )

    # Results as they come.

    def stream(self, prompt: PromptInput | Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields what is new, step by step; closing the iterator ends the request.

        Args:
          prompt: as for `generate`, or what `render_chat` gives.
          params: as for `generate`.

        Raises:
          RequestError: at once, when the request is wrong.
        """
        parsed = self._requests.parse_prompt(prompt)
        request = self._requests.make(next(self._ids), parsed, params)
        self.core.scheduler.check(request)
        return self._stream(request, parsed.text)

    def add_request(self, prompt: PromptInput | Prompt, params: SamplingParams | None = None, priority: int = 0) -> str:
        """Queues one request for `step` and returns its id."""
        parsed = self._requests.parse_prompt(prompt)
        request = self._requests.make(next(self._ids), parsed, params, priority)
        self._add(request, parsed.text)
        return request.request_id

    def step(self) -> tuple[list[Piece], list[RequestOutput]]:
        """Runs the engine one step: what is new, and the outputs that are complete now."""
        pieces, outputs, over = self._outputs.process(self.core.step())
        outputs, self._unclaimed = self._unclaimed + outputs, []
        for request_id, index in over:
            self.core.abort(request_id, index)
        for piece in pieces:
            if piece.request_id in self._streams:
                self._streams[piece.request_id].append(piece)
        return pieces, outputs

    def abort(self, request_id: str) -> None:
        """Ends a request, at whatever stage; an unknown id is nothing.

        Its samples end with the finish reason "abort", which the next `step` gives.
        """
        self.core.abort(request_id)

    # About the engine.

    def get_tokenizer(self) -> Tokenizer:
        """What turns text into token ids here.

        Raises:
          RequestError: a dummy model has none.
        """
        return self._requests.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without params gets: the model's generation_config.json over vLLM's defaults."""
        return self._requests.default_params

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self.core.resolved.max_model_len

    @property
    def num_programs(self) -> int:
        """Compiled programs that the engine has or will have once its warm-up is over."""
        return self.core.runner.num_programs

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while something runs."""
        return self.core.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Frees the device. A second call does nothing."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Below: from prompts to requests, and the loop.

    def _run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        each = self._params_for(prompts, params)
        if priority is not None and not isinstance(priority, list | tuple):
            raise RequestError(f"priority must be a list of numbers, got {type(priority).__name__}", "priority")
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(priority)} priorities", "priority")
        priorities = [0] * len(prompts) if priority is None else priority
        requests = [self._requests.make(next(self._ids), *one) for one in zip(prompts, each, priorities, strict=True)]
        for request in requests:
            self.core.scheduler.check(request)
        results: dict[str, RequestOutput] = {}
        bar = tqdm.tqdm(total=len(requests), desc="prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True)
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                self._add(request, prompt.text)
            wanted = {request.request_id for request in requests}
            num_tokens = 0
            while len(results) < len(requests):
                self._require_work()
                for output in self._step_for(wanted):
                    results[output.request_id] = output
                    num_tokens += output.metrics.num_generation_tokens
                    _advance(bar, num_tokens)
        finally:
            bar.close()
            for request in requests:
                if request.request_id not in results:
                    self._forget(request.request_id)
        return [results[request.request_id] for request in requests]

    def _stream(self, request: Request, text: str | None) -> Iterator[Piece]:
        queue = self._streams[request.request_id] = collections.deque[Piece]()
        still_open = request.params.n
        try:
            self._add(request, text)
            while still_open:
                while queue:
                    piece = queue.popleft()
                    still_open -= piece.finish_reason is not None
                    yield piece
                if still_open:
                    self._require_work()
                    self._step_for({request.request_id})
        finally:
            del self._streams[request.request_id]
            if still_open:
                self._forget(request.request_id)

    def _params_for(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self._requests.default_params
        if not isinstance(params, SamplingParams | list | tuple):
            raise RequestError(
                f"params must be SamplingParams, or a list of them, got {type(params).__name__}", "params"
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(each)} params", "params")
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"params must be SamplingParams, got {type(one).__name__}", "params")
        return each

    def _add(self, request: Request, text: str | None) -> None:
        self.core.add(request)
        self._outputs.add(request.request_id, text, request.prompt_token_ids, request.params, request.arrival_time)

    def _step_for(self, wanted: set[str]) -> list[RequestOutput]:
        """Runs a step; complete outputs of others wait for the next call of `step`."""
        outputs = self.step()[1]
        self._unclaimed += [output for output in outputs if output.request_id not in wanted]
        return [output for output in outputs if output.request_id in wanted]

    def _forget(self, request_id: str) -> None:
        """Ends a request whose results nobody waits for any more."""
        self.core.abort(request_id)
        self._outputs.drop(request_id)

    def _require_work(self) -> None:
        if not self.core.has_unfinished:
            raise EngineDeadError("the engine has nothing to do while a request waits for its end")


def _advance(bar: Any, num_tokens: int) -> None:
    """One more prompt is done."""
    if seconds := bar.format_dict["elapsed"]:
        bar.set_postfix_str(f"{num_tokens / seconds:.1f} tok/s", refresh=False)
    bar.update(1)
