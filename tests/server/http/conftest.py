"""One scripted engine and one server for all tests here."""

from tests.references.scripted_server import engine, nothing_is_left, server

__all__ = ["engine", "nothing_is_left", "server"]
