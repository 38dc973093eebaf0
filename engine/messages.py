"""What API process and engine process say to each other: MessagePack structs, checked when they are read, no pickle.

A message is one frame: four bytes that name the protocol and its version, then a tagged array. Whatever
does not start or decode so raises MessageError; nothing is guessed.
"""

import msgspec

from octavo.configs.engine import EngineConfig
from octavo.engine.errors import ConfigError, EngineDeadError, KVCacheMemoryError, LoadError, OctavoError
from octavo.engine.request import Request, TokenEvent
from octavo.engine.stats import EngineFacts, EngineStats

VERSION = 1  # goes up with every change of a message or of a struct in one
PREFIX = b"OCT" + bytes([VERSION])


class MessageError(OctavoError, ValueError):
    """Bytes that are no message of this version."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages."""


# From the API process to the engine.


class Start(Message, frozen=True):
    """The first message: load this model. `log_level` is logging's number."""

    config: EngineConfig
    sampled_vocab_size: int | None
    progress: bool
    log_level: int


class Add(Message, frozen=True):
    """Run this request."""

    request: Request


class Abort(Message, frozen=True):
    """End a request, or one sample of it; one that is unknown or finished is nothing."""

    request_id: str
    index: int | None = None


class ResetPrefixCache(Message, frozen=True):
    """Forget cached prefixes; `call` comes back in ResetDone."""

    call: int


class Stop(Message, frozen=True):
    """End the process."""


# From the engine to the API process.


class Hello(Message, frozen=True):
    """The first message: the token proves that this is the process that was started."""

    token: str


class Ready(Message, frozen=True):
    """The engine serves."""

    facts: EngineFacts


class Refused(Message, frozen=True):
    """A request that the core's own check refused: a RequestError."""

    request_id: str
    message: str
    field: str | None = None


class Step(Message, frozen=True):
    """What one step, or several while the reader was slow, gave; and the load behind it."""

    events: list[TokenEvent]
    stats: EngineStats


class ResetDone(Message, frozen=True):
    """The answer to ResetPrefixCache."""

    call: int
    done: bool


class Failed(Message, frozen=True):
    """The last message of an engine that could not start, or that died. `kind` is the error's class."""

    kind: str
    message: str

    def error(self) -> OctavoError:
        """The error to raise in the API process."""
        return _KINDS.get(self.kind, EngineDeadError)(self.message)


type ToEngine = Start | Add | Abort | ResetPrefixCache | Stop
type FromEngine = Hello | Ready | Refused | Step | ResetDone | Failed

_KINDS: dict[str, type[OctavoError]] = {
    kind.__name__: kind for kind in (ConfigError, KVCacheMemoryError, LoadError, EngineDeadError)
}
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(Start | Add | Abort | ResetPrefixCache | Stop)
_from_engine = msgspec.msgpack.Decoder(Hello | Ready | Refused | Step | ResetDone | Failed)


def encode(message: Message) -> bytes:
    """One frame.

    Raises:
      MessageError: it holds what MessagePack has no word for (a lone surrogate, an object).
    """
    try:
        return PREFIX + _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{type(message).__name__} cannot be sent: {error}") from error


def decode_to_engine(frame: bytes) -> ToEngine:
    """Reads a frame that the API process sent. Raises MessageError."""
    return _decode(_to_engine, frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Reads a frame that the engine process sent. Raises MessageError."""
    return _decode(_from_engine, frame)


def request_id_of(frame: bytes) -> str | None:
    """The id in a frame that was meant as an Add but does not decode as one; None if it is nothing like it."""
    try:
        match msgspec.msgpack.decode(memoryview(frame)[len(PREFIX) :]):
            case ["Add", {"request_id": str(request_id)}, *_]:
                return request_id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return None


def _decode[M](decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    if frame[: len(PREFIX)] != PREFIX:
        if frame[:3] == PREFIX[:3] and len(frame) > 3:
            raise MessageError(f"a message of version {frame[3]}, this is version {VERSION}")
        raise MessageError(f"{len(frame)} bytes that are no message")
    try:
        return decoder.decode(memoryview(frame)[len(PREFIX) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MessageError(f"a message that does not decode: {error}") from error
