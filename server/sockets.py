"""The port, the certificate and the number of files: what must be right before a model loads.

Refuses a port that is taken, a host that is unknown and a key that does not fit, each by name.
"""

import errno
import resource
import socket
import ssl

from octavo.configs.errors import ConfigError
from octavo.configs.server import ServerConfig

WANTED_FILES = 65536
SPARE_FILES = 128  # for everything that is no client's connection


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to host and port that does not listen yet: clients are turned away until the engine is ready.

    Raises:
      ConfigError: the host is unknown, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {config.host!r} is no address of this machine: {error}") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, config.host != "::")  # :: is for both
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(_why(error, config)) from None
    sock.setblocking(False)
    return sock


def url(sock: socket.socket, config: ServerConfig) -> str:
    """Where clients find the socket."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"


def is_loopback(sock: socket.socket) -> bool:
    """Only this machine can reach the socket."""
    host = sock.getsockname()[0]
    return host == "::1" or host.startswith("127.")


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer as the options say; None where they name no certificate.

    Raises:
      ConfigError: a file cannot be read, or key and certificate do not fit.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a password would ask for it at the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(f"ssl_certfile {config.ssl_certfile}, ssl_keyfile {config.ssl_keyfile}: {error}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs {config.ssl_ca_certs}: {error}") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def raise_file_limit() -> int:
    """Lets this process open as many files as it may; returns the number of connections that fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = WANTED_FILES if hard == unlimited else min(hard, WANTED_FILES)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max((WANTED_FILES if soft == unlimited else soft) - SPARE_FILES, 1)


def _why(error: OSError, config: ServerConfig) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {config.port} of {config.host} is in use"
        case errno.EACCES:
            return f"port {config.port} of {config.host} needs more privileges"
        case errno.EADDRNOTAVAIL:
            return f"host {config.host!r} is no address of this machine"
    return f"cannot listen on port {config.port} of {config.host}: {error.strerror}"
