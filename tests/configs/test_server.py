"""ServerConfig refuses what cannot work, by name, and never shows a key."""

import math
from typing import Any

import pytest

from octavo.configs.errors import ConfigError
from octavo.configs.server import ServerConfig


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"port": 65536}, "65536"),
        ({"port": -1}, "port"),
        ({"port": True}, "port"),
        ({"host": 1}, "host"),
        ({"drain_timeout": -1.0}, "drain_timeout"),
        ({"drain_timeout": math.inf}, "drain_timeout"),
        ({"drain_timeout": math.nan}, "drain_timeout"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"timeout_keep_alive": math.nan}, "timeout_keep_alive"),
        ({"log_stats_interval": 0.0}, "log_stats_interval"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs"),
        ({"max_prompts": 0}, "max_prompts"),
        ({"max_n": 0}, "max_n"),
        ({"max_header_count": 0}, "max_header_count"),
        ({"max_body_size": 10}, "max_body_size"),
        ({"max_body_size": 1 << 31}, "max_body_size"),
        ({"max_header_size": 10}, "max_header_size"),
        ({"uvicorn_log_level": "loud"}, "loud"),
        ({"root_path": "api"}, "root_path"),
        ({"root_path": "/api/"}, "root_path"),
        ({"served_model_name": ("",)}, "served_model_name"),
        ({"served_model_name": ("a\nb",)}, "served_model_name"),
        ({"served_model_name": ["a"]}, "served_model_name"),
        ({"response_role": ""}, "response_role"),
        ({"ssl_keyfile": "k"}, "ssl_certfile"),
        ({"ssl_ca_certs": "c"}, "ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_cert_reqs": 3}, "ssl_cert_reqs"),
        ({"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_cert_reqs": 2}, "ssl_ca_certs"),
        ({"allow_credentials": True}, "allowed_origins"),
    ],
)
def test_refusals(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerConfig(**options)


@pytest.mark.parametrize("key", ["", "with blank", "line\n", "k" * 300, "schlüssel", 7])
def test_keys_are_refused_and_never_shown(key: Any) -> None:
    with pytest.raises(ConfigError, match="api_key") as error:
        ServerConfig(api_key=(key,))
    assert not key or str(key) not in str(error.value)
    with pytest.raises(ConfigError, match=r"api_key must be a tuple of strings$"):
        ServerConfig(api_key=key)
    assert "secret" not in repr(ServerConfig(api_key=("secret",)))


def test_credentials_with_named_origins() -> None:
    assert ServerConfig(allow_credentials=True, allowed_origins=("https://a.example",)).allow_credentials
