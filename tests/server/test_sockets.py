"""What must be right before a model loads: the port and the certificate."""

import pathlib
import resource
import socket

import pytest

from octavo.configs.errors import ConfigError
from octavo.configs.server import ServerConfig
from octavo.server.sockets import bind, is_loopback, raise_file_limit, tls_context, url


def test_a_free_port() -> None:
    with bind(ServerConfig(port=0)) as sock:
        assert url(sock, ServerConfig(root_path="/a")) == f"http://127.0.0.1:{sock.getsockname()[1]}/a"
        assert is_loopback(sock)
        with socket.socket() as client:
            assert client.connect_ex(sock.getsockname()) != 0  # bound, but not listening


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "", "a" * 300, "a..b"])
def test_hosts(host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        bind(ServerConfig(host=host, port=0))


def test_all_addresses() -> None:
    try:
        sock = bind(ServerConfig(host="::", port=0))
    except ConfigError:
        pytest.skip("no IPv6 here")
    with sock:
        sock.listen()
        assert url(sock, ServerConfig()).startswith("http://[::]:")
        assert not is_loopback(sock)
        socket.create_connection(("127.0.0.1", sock.getsockname()[1]), timeout=5).close()


def test_certificates_that_do_not_load(tmp_path: pathlib.Path) -> None:
    assert tls_context(ServerConfig()) is None
    (tmp_path / "junk.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for name in ("nowhere.pem", "junk.pem"):
        path = str(tmp_path / name)
        with pytest.raises(ConfigError, match="ssl_certfile"):
            tls_context(ServerConfig(ssl_certfile=path, ssl_keyfile=path))


def test_the_file_limit_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        connections = raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, 65536)
        assert 0 < connections < soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
