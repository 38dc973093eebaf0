"""ServerConfig: every option of the HTTP server, checked when it is made. Names are vLLM's where vLLM has one.

Reads no file and opens nothing: `octavo serve` reads the template and binds the port (server/serve.py).
"""

import dataclasses
import math

from octavo.configs.errors import ConfigError
from octavo.configs.fields import check_types

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
NAME_LIMIT = 256  # characters of a model name or of a key
MAX_BODY_LIMIT = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The options of `octavo serve` beside those of the engine.

    Attributes:
      host: the address to listen on; 0.0.0.0 or :: for all.
      port: the TCP port; 0 takes a free one and the log says which.
      api_key: keys, of which every request but /health must bring one; several after one flag or by
        repeating it. $OCTAVO_API_KEY adds one that no process list shows.
      served_model_name: the names that requests may use and /v1/models lists, the first one in
        answers; by default MODEL as given.
      chat_template: Jinja that replaces the model's own template; as a flag, the file that holds it.
      response_role: the role in chat answers.
      root_path: the path under which a proxy shows this server.
      uvicorn_log_level: of the HTTP server's own log.
      disable_uvicorn_access_log: no line for each request.
      disable_log_stats: no line of throughput and load in the log.
      log_stats_interval: seconds between those lines.
      drain_timeout: seconds that running requests get to finish after SIGTERM; then they are aborted.
      max_num_queued_reqs: samples that may wait for the engine; requests beyond are answered 503.
      max_body_size: bytes of a request's body; more are answered 413.
      max_header_size: bytes of a request's line and headers; more are answered 431.
      max_header_count: headers of a request; more are answered 431.
      max_prompts: prompts in one request.
      max_n: samples of one prompt (`n`).
      request_timeout: seconds within which a request, headers and body, must have arrived.
      timeout_keep_alive: seconds that a connection may idle between requests.
      allowed_origins: web pages that may call from a browser (CORS); * for all.
      allowed_methods: HTTP methods for them.
      allowed_headers: request headers for them.
      allow_credentials: cookies and the like from them; not together with allowed_origins *.
      ssl_keyfile: the private key for TLS, PEM.
      ssl_certfile: its certificate chain, PEM.
      ssl_ca_certs: authorities that client certificates are checked against, PEM.
      ssl_cert_reqs: client certificates: 0 none, 1 optional, 2 required.
      forwarded_allow_ips: addresses of proxies whose X-Forwarded-For and -Proto are believed; * for all.
      open_metrics: /metrics needs no key.
      enable_reset_prefix_cache: offer POST /reset_prefix_cache.
      disable_fastapi_docs: no /docs, /redoc and /openapi.json.
      return_tokens_as_token_ids: log-probabilities name tokens as token_id:N instead of by their text.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    response_role: str = "assistant"
    root_path: str = ""
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    disable_log_stats: bool = False
    log_stats_interval: float = 10.0
    drain_timeout: float = 20.0
    max_num_queued_reqs: int = 2048
    max_body_size: int = 32 << 20
    max_header_size: int = 64 << 10
    max_header_count: int = 100
    max_prompts: int = 256
    max_n: int = 128
    request_timeout: float = 60.0
    timeout_keep_alive: float = 65.0
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    forwarded_allow_ips: tuple[str, ...] = ("127.0.0.1", "::1")
    open_metrics: bool = False
    enable_reset_prefix_cache: bool = False
    disable_fastapi_docs: bool = False
    return_tokens_as_token_ids: bool = False

    def __post_init__(self) -> None:
        # Before check_types, which shows values.
        if not isinstance(self.api_key, tuple) or not all(isinstance(key, str) for key in self.api_key):
            raise ConfigError("api_key must be a tuple of strings")
        check_types(self)
        self._check_numbers()
        self._check_names()
        self._check_tls()
        if self.uvicorn_log_level not in LOG_LEVELS:
            raise ConfigError(
                f"uvicorn_log_level must be one of {', '.join(LOG_LEVELS)}, got {self.uvicorn_log_level!r}"
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must start with a slash and end without one, got {self.root_path!r}")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials needs allowed_origins that are named: with * any page could use them")

    def _check_numbers(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("log_stats_interval", "request_timeout", "timeout_keep_alive"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} must be a positive number of seconds, got {value}")
        if not 0 <= self.drain_timeout < math.inf:
            raise ConfigError(f"drain_timeout must be a number of seconds, not negative, got {self.drain_timeout}")
        for name in ("max_num_queued_reqs", "max_prompts", "max_n", "max_header_count"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name, low in (("max_body_size", 1024), ("max_header_size", 1024)):
            if not low <= (value := getattr(self, name)) <= MAX_BODY_LIMIT:
                raise ConfigError(f"{name} must be between {low} and {MAX_BODY_LIMIT} bytes, got {value}")

    def _check_names(self) -> None:
        for name in self.served_model_name:
            if not name.strip() or len(name) > NAME_LIMIT or not name.isprintable():
                raise ConfigError(f"served_model_name must be 1 to {NAME_LIMIT} printable characters, got {name!r}")
        if not self.response_role.isprintable() or not 0 < len(self.response_role) <= NAME_LIMIT:
            raise ConfigError(
                f"response_role must be 1 to {NAME_LIMIT} printable characters, got {self.response_role!r}"
            )
        for key in self.api_key:  # never shown
            if not key or len(key) > NAME_LIMIT or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(f"api_key must be 1 to {NAME_LIMIT} printable ASCII characters without blanks")

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile must come together")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs):
            raise ConfigError("ssl_ca_certs and ssl_cert_reqs need ssl_certfile and ssl_keyfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"ssl_cert_reqs {self.ssl_cert_reqs} needs ssl_ca_certs")
