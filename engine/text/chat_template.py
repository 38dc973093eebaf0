"""Conversations to prompts, by the model's own template.

Refuses malformed messages, roles and content that the template has no word for (with the template's message),
and arguments that would replace what the engine itself passes.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jinja2
from jinja2 import nodes

from octavo.configs.errors import LoadError
from octavo.engine.errors import RequestError
from octavo.engine.text.prompts import Prompt, check_length
from octavo.engine.text.sandbox import compile_template, parse_template, render
from octavo.engine.text.tokenizer import Tokenizer, check_text

# What chat_template_kwargs must not hold: our own arguments, those of transformers' apply_chat_template, the globals.
RESERVED = frozenset(
    [
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
        "additional_special_tokens",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
        "dict",
        "joiner",
    ]
)
MAX_MESSAGES = 100_000


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: Jinja, as in tokenizer_config.json.
      special_tokens: variables that it may use: bos_token, eos_token, …

    Raises:
      LoadError: it does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        try:
            tree = parse_template(source)
            self.wants_parts = _wants_parts(tree)
            self._template = compile_template(tree)
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise LoadError(f"the chat template does not compile: {error}") from error
        self._source = source
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_request(cls, source: object, special_tokens: Mapping[str, str] | None = None) -> Self:
        """A template that came with a request. Raises RequestError: it is no text or does not compile."""
        if not isinstance(source, str):
            raise RequestError(f"chat_template must be a string, got {type(source).__name__}", "chat_template")
        try:
            return cls(source, special_tokens)
        except LoadError as error:
            raise RequestError(str(error), "chat_template") from error

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        max_tokens: int | None = None,
        **options: Any,
    ) -> Prompt:
        """The prompt of a conversation, encoded so that only the template's own control tokens are some.

        Names of control tokens in messages, tools and template_kwargs are plain text.

        Args:
          messages: as for `render`.
          tokenizer: the model's.
          max_tokens: of the model; text that cannot fit is refused before it is encoded.
          options: the other arguments of `render`.

        Raises:
          RequestError: as `render`, or text that the tokenizer refuses.
        """
        variables, mark = self._variables(messages, **options)
        control = tokenizer.control_tokens
        hidden = control.hide(variables, self._source)
        try:
            variables = hidden.hide(variables)
        except RecursionError:
            raise RequestError("messages are nested too deep", "messages") from None
        rendered = self._render(variables, mark)
        text = hidden.show(rendered)
        check_length(text, tokenizer, max_tokens)
        if not hidden.names:
            return Prompt(text, tokenizer.encode(text, add_special_tokens=False))
        check_text(text)
        return Prompt(text, control.encode(rendered, hidden))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation's prompt. `prompt` encodes it; by itself it does not tell who wrote what.

        Args:
          messages: {"role": …, "content": text, null or a list of text parts, …}, oldest first.
          add_generation_prompt: end with the start of an assistant's message.
          continue_final_message: leave the last message, an assistant's, open, and end with exactly its content.
          tools: function definitions for the template.
          template_kwargs: more variables, such as enable_thinking.

        Raises:
          RequestError: malformed messages, or what the template says against them.
        """
        variables, mark = self._variables(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self._render(variables, mark)

    def _variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], str | None]:
        """What the caller gives the template, checked, and the mark behind a message to be continued."""
        _check_kwargs({} if template_kwargs is None else template_kwargs)
        _check_tools(tools)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        conversation = normalise_messages(messages, as_parts=self.wants_parts)
        mark = _mark_end(conversation) if continue_final_message else None
        variables = {
            **(template_kwargs or {}),
            "messages": conversation,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return variables, mark

    def _render(self, variables: Mapping[str, Any], mark: str | None) -> str:
        try:
            text = render(self._template, {**variables, **self._special_tokens})
        except Exception as error:  # expressions may raise anything
            message = str(error) or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {message}", "messages") from error
        if mark is None:
            return text
        before, found, _ = text.rpartition(mark)
        if not found:
            raise RequestError("the chat template leaves the final message out", "continue_final_message")
        return before


def normalise_messages(messages: object, *, as_parts: bool = False) -> list[dict[str, Any]]:
    """Checks messages and brings them to one form: a role, content as text, no empty extras.

    Args:
      messages: as users give them; not changed.
      as_parts: make content a list of {"type": "text", "text": …} instead.

    Raises:
      RequestError: names the message and the field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries, at most {MAX_MESSAGES}", "messages")
    return [_normalise(message, f"messages[{i}]", as_parts) for i, message in enumerate(messages)]


def _normalise(message: object, where: str, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string that is not empty, got {role!r}", f"{where}.role")
    result = {str(key): value for key, value in message.items() if value is not None}
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = _normalise_calls(calls, f"{where}.tool_calls")
    if "content" not in message and not calls:
        raise RequestError(f"{where}.content is missing", f"{where}.content")
    text = _content_text(message.get("content"), f"{where}.content")
    result["content"] = [{"type": "text", "text": text}] if as_parts else text
    return result


def _content_text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} must be a string or a list of parts, got {type(content).__name__}", where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, Mapping):
            kind = part.get("type", "text")
            if kind not in ("text", "input_text", "output_text", "refusal"):
                raise RequestError(
                    f"{where}[{i}].type {kind!r} is not supported; supported: text", f"{where}[{i}].type"
                )
            part = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(part, str):
            raise RequestError(f"{where}[{i}].text must be a string", f"{where}[{i}].text")
        texts.append(part)
    return "\n".join(texts)


def _normalise_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Copies tool calls; arguments that are JSON in a string become objects, as templates expect."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(f"{where} must be a list", where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{i}].function must be an object with a name", f"{where}[{i}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            field = f"{where}[{i}].function.arguments"
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise RequestError(f"{field} must be JSON", field) from None
        result.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return result


def _mark_end(conversation: list[dict[str, Any]]) -> str:
    """Puts a mark behind the last message's content, so that the place is found whatever the template does."""
    last = conversation[-1]
    if last["role"] != "assistant":
        raise RequestError(
            f"continue_final_message needs an assistant's message at the end, got one of role {last['role']!r}",
            "continue_final_message",
        )
    mark = f"END{secrets.token_hex(16)}END"
    if isinstance(last["content"], str):
        last["content"] += mark
    else:
        last["content"][-1]["text"] += mark
    return mark


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools must be a list of function definitions, got {type(tools).__name__}", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] must be an object, got {type(tool).__name__}", "tools")


def _check_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    if not isinstance(template_kwargs, Mapping):
        raise RequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in template_kwargs:
        if not isinstance(name, str) or not name.isidentifier():
            raise RequestError(f"chat_template_kwargs: {name!r} is no name", "chat_template_kwargs")
        if name in RESERVED or name.startswith("_"):
            raise RequestError(f"chat_template_kwargs must not set {name}", "chat_template_kwargs")


def _wants_parts(template: nodes.Template) -> bool:
    """Whether content must be a list of parts: the template loops over it and never asks if it is a string."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    asks = any(test.name == "string" for test in template.find_all(nodes.Test))
    names = {
        assign.target.name
        for assign in template.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and is_content(assign.node)
    }
    loops = any(
        is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in template.find_all(nodes.For)
    )
    return loops and not asks
