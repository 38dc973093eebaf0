"""POST /tokenize and /detokenize: what the tokenizer does with a prompt, a conversation, or ids."""

from starlette.types import Send

from octavo.engine.checks import shown
from octavo.engine.errors import RequestError
from octavo.server.http.connection import send_json
from octavo.server.openai.prompts import encode_text, rendered
from octavo.server.openai.requests import DetokenizeRequest, TokenizeRequest
from octavo.server.openai.responses import Text, Tokens
from octavo.server.openai.service import Service
from octavo.server.openai.translate import check_rendering, check_template


async def tokenize(service: Service, request: TokenizeRequest, request_id: str, send: Send) -> None:
    """Answers with the ids that a completion of the prompt, or a chat, would start from."""
    service.model_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("exactly one of prompt and messages must be given", "prompt")
    await send_json(send, await service.workers.run(_tokens, service, request))


async def detokenize(service: Service, request: DetokenizeRequest, request_id: str, send: Send) -> None:
    """Answers with the text of ids, special tokens by name."""
    service.model_name(request.model)
    ids, facts = request.tokens, service.engine.facts
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise RequestError("tokens must be a list of integer token ids", "tokens")
    if len(ids) > facts.max_model_len:
        raise RequestError(f"tokens holds {len(ids)} ids, at most {facts.max_model_len} (max_model_len)", "tokens")
    if ids and (min(ids) < 0 or max(ids) >= facts.vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        text = f"tokens holds the id {shown(wrong)}, outside of the vocabulary 0 … {facts.vocab_size - 1}"
        raise RequestError(text, "tokens")
    decoded = await service.workers.run(service.tokenizer.decode, ids, skip_special_tokens=False)
    await send_json(send, Text(decoded))


def _tokens(service: Service, request: TokenizeRequest) -> Tokens:
    if request.prompt is None:
        check_rendering(request)
        ids = rendered(service, request, request.chat_template_kwargs or {}).token_ids
    else:
        check_template(request)
        special = request.add_special_tokens is not False
        ids = encode_text(service, request.prompt, add_special_tokens=special).token_ids
    spelled = [service.tokenizer.backend.id_to_token(i) or "" for i in ids] if request.return_token_strs else None
    return Tokens(len(ids), service.engine.facts.max_model_len, ids, spelled)
