"""What every route works with: the engine, the options, the names of the model, the threads for text."""

import dataclasses
import hashlib
import importlib.metadata
import time
import uuid

from octavo.configs.server import ServerConfig
from octavo.engine.client import AsyncEngine
from octavo.engine.errors import RequestError
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.http.errors import ApiError
from octavo.server.http.workers import Workers

VERSION = importlib.metadata.version("octavo")


@dataclasses.dataclass(frozen=True)
class Service:
    """One server's means.

    Attributes:
      engine: runs requests.
      config: the options.
      names: of the model, the first one in answers to requests that name none.
      workers: threads for text.
      created: when the server started, seconds since 1970.
      fingerprint: of the program and the model; answers with equal ones come from equal configurations.
    """

    engine: AsyncEngine
    config: ServerConfig
    names: tuple[str, ...]
    workers: Workers
    created: int
    fingerprint: str

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError: a dummy model has none."""
        if self.engine.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give token ids to /v1/completions", "prompt")
        return self.engine.tokenizer

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ApiError (404): no model has the name."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ApiError(404, f"the model {asked!r} does not exist", param="model", code="model_not_found")
        return asked


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What all chunks of one answer share."""

    id: str
    created: int
    model: str
    fingerprint: str


def make_service(engine: AsyncEngine, config: ServerConfig) -> Service:
    """The service of a started engine."""
    names = config.served_model_name or (engine.config.model,)
    facts = repr((VERSION, names, engine.facts))
    fingerprint = f"octavo-{VERSION}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
    return Service(engine, config, names, Workers(), int(time.time()), fingerprint)


def make_stamp(service: Service, kind: str, model: str, request_id: str | None) -> Stamp:
    """The stamp of a new answer; `kind` is chatcmpl or cmpl."""
    return Stamp(f"{kind}-{request_id or uuid.uuid4().hex}", int(time.time()), model, service.fingerprint)
