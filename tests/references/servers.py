"""A real `octavo serve` in a process of its own, on a free port, and what it leaves behind."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from tests.references.byte_tokenizer import byte_ids, piece_id
from tests.references.table_model import EOS, TableModel, chain

START_SECONDS = 120.0
SMALL = {  # one ladder for all servers, so the programs of the first one serve the others
    "max-model-len": 8192,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
    "num-gpu-blocks-override": 1024,
    "decode-rungs": "8",
    "token-rungs": "64",
    "warmup": "full",
}
ENDLESS = "z"  # continues "yxyxyx…" for as long as it may, which is seconds
HELLO = "a"  # continues "hello world" and ends
TABLE = {
    **chain(*byte_ids(HELLO), piece_id(b"hello"), piece_id(b" world"), EOS),
    **chain(*byte_ids("\n"), piece_id(b"Pari"), piece_id(b"s is"), EOS),  # an assistant's turn
    **chain(*byte_ids(ENDLESS + "yxy")),
}


class Server:
    """One server. Use it in `with`: nothing of it is left behind, or that is an error.

    Args:
      model: what to serve.
      log: a file for its standard error.
      flags: more of the command line.
      options: by flag name, over `SMALL`; None leaves one out.
      python: flags of the interpreter, such as -O.
      environment: added to this process's.
      module: what to run instead of the server's own.
    """

    def __init__(
        self,
        model: pathlib.Path | str,
        log: pathlib.Path,
        flags: Sequence[str] = (),
        *,
        options: Mapping[str, Any] | None = None,
        python: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        module: str = "octavo.server",
    ) -> None:
        merged = {"port": 0, **SMALL, **(options or {})}
        words = [word for name, value in merged.items() if value is not None for word in (f"--{name}", str(value))]
        command = [sys.executable, *python, "-m", module, "serve", str(model), *words, *flags]
        self._log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # a signal for it is not one for the tests
            )
        self._family: list[psutil.Process] = []
        self.url = ""

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine(self) -> psutil.Process:
        """Its engine process."""
        (engine,) = psutil.Process(self.process.pid).children()
        return engine

    def wait_until_ready(self) -> "Server":
        """Returns once /health is 200."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            if match := re.search(r"listening on (\S+)", self.log):
                self.url = match[1]
                if self.status("/health") == 200:
                    self._family = [psutil.Process(self.process.pid), self.engine]
                    return self
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready after {START_SECONDS} s:\n{self.log}")

    def request(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """One GET, or a POST of JSON: status, body, headers."""
        data = None if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, given)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers

    def status(self, path: str) -> int:
        """Of a GET; 0 where nobody answers."""
        try:
            return self.request(path)[0]
        except OSError:
            return 0

    def open_stream(self, prompt: str = ENDLESS, max_tokens: int = 8000) -> "Stream":
        """A stream whose first events have come."""
        return Stream(self.port, {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        text = self.request("/metrics")[1].decode()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        }

    @property
    def load(self) -> tuple[float, float, float]:
        """Samples that run, samples that wait, and the used part of the cache."""
        values = {name.partition("{")[0]: value for name, value in self.metrics().items()}
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        running, waiting, usage = (values[f"octavo:{name}"] for name in names)
        return running, waiting, usage

    def wait_until_idle(self, seconds: float = 2.0) -> None:
        """Returns once nothing runs, nothing waits and no block is held."""
        end = time.monotonic() + seconds
        while (load := self.load) != (0, 0, 0):
            assert time.monotonic() < end, f"running, waiting, cache: {load} after {seconds} s"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = 30.0) -> int:
        """The exit status; nothing of the server is left then."""
        status = self.process.wait(timeout)
        _, alive = psutil.wait_procs(self._family, timeout=10)
        assert not alive, f"left behind: {alive}"
        return status

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        for process in [*self._family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


class Stream:
    """An answer of server-sent events; `rest` must be called."""

    def __init__(self, port: int, body: Mapping[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        data = json.dumps({**body, "stream": True})
        self._connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
        self._answer = self._connection.getresponse()
        self._first = self._answer.readline()

    def rest(self) -> str:
        """All of it, however it ends."""
        try:
            text = (self._first + self._answer.read()).decode()
        except http.client.IncompleteRead as error:
            text = (self._first + error.partial).decode() + "(broken off)"
        except OSError as error:
            text = f"({error})"
        self._answer.close()
        self._connection.close()
        return text


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """The scripted model that the servers of tests serve."""
    return TableModel(table=TABLE).write(folder)


@contextlib.contextmanager
def running(model: pathlib.Path | str, log: pathlib.Path, *flags: str, **options: Any) -> Iterator[Server]:
    """A server that is ready; it must end well."""
    with Server(model, log, flags, **options) as server:
        yield server.wait_until_ready()
        if server.process.poll() is None:
            status = server.stop()
            assert status == 0, server.log
