"""Streams through HTTP against the offline engine: tokens a second, and what the server's process spends on a token.

SmolLM2-135M on CPU, the same greedy chats in both forms, alternating in one run. Needs `octavo` beside this python.

python -m benchmarks.http_serving
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import psutil

from benchmarks.report import print_table, use_cores, write_row
from benchmarks.smollm2_vs_transformers import smollm2_path

STREAMS, TOKENS, RUNS = 16, 128, 3
OPTIONS = {"max_model_len": 1024, "max_num_seqs": STREAMS, "warmup": "full", "enable_prefix_caching": False}


def questions(seed: int) -> list[str]:
    """Different prompts of about the same length."""
    return [f"Tell me a long story about number {seed * 1000 + i} and the sea." for i in range(STREAMS)]


def offline() -> None:
    """In a process of its own: answers each line of standard input (a seed) with seconds, tokens and texts as JSON."""
    from octavo.engine import Engine, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with Engine(smollm2_path(), progress=False, **OPTIONS) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            chats = [[{"role": "user", "content": text}] for text in questions(int(line))]
            started = time.perf_counter()
            outputs = engine.chat(chats, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            texts = [output.outputs[0].text for output in outputs]
            print(json.dumps({"seconds": seconds, "texts": texts}), flush=True)


async def one_stream(port: int, question: str) -> tuple[str, int]:
    """The text of one streamed chat, and in how many events it came."""
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": question}],
            "stream": True,
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    lines = []
    async for line in reader:
        if line.startswith(b"data: "):
            if line == b"data: [DONE]\n":
                break
            lines.append(line)
    writer.close()
    text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines)
    return text, len(lines)


async def all_streams(port: int, seed: int) -> tuple[float, list[str], int]:
    started = time.perf_counter()
    results = await asyncio.gather(*(one_stream(port, text) for text in questions(seed)))
    return time.perf_counter() - started, [result[0] for result in results], sum(result[1] for result in results)


def start_server(cores: int) -> tuple[subprocess.Popen[bytes], int]:
    """A server on a free port, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        str(STREAMS),
        "--warmup",
        "full",
        "--no-enable-prefix-caching",
    ]
    command = [sys.executable, "-m", "octavo.server", "serve", smollm2_path(), "--port", str(port)]
    server = subprocess.Popen([*command, "--served-model-name", "m", *flags])
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return server, port
        except OSError:
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    use_cores(args.cores)
    if args.offline:
        offline()
        return
    server, port = start_server(args.cores)
    twin = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.http_serving", "--offline", "--cores", str(args.cores)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        rows = measure(server, port, twin)
    finally:
        server.terminate()
        twin.terminate()
        server.wait()
        twin.wait()
    report(rows, server.returncode)


def measure(server: "subprocess.Popen[bytes]", port: int, twin: "subprocess.Popen[str]") -> list[dict[str, float]]:
    """One warm-up and RUNS pairs."""
    if twin.stdin is None or twin.stdout is None or twin.stdout.readline() != "ready\n":
        raise SystemExit("the offline engine did not start")
    process, rows = psutil.Process(server.pid), []
    for seed in range(RUNS + 1):
        twin.stdin.write(f"{seed}\n")
        twin.stdin.flush()
        there = json.loads(twin.stdout.readline())
        before = sum(process.cpu_times()[:2])
        seconds, texts, events = asyncio.run(all_streams(port, seed))
        spent = sum(process.cpu_times()[:2]) - before
        rows.append(
            {
                "offline": STREAMS * TOKENS / there["seconds"],
                "http": STREAMS * TOKENS / seconds,
                "us_per_token": spent / (STREAMS * TOKENS) * 1e6,
                "same": sum(a == b for a, b in zip(texts, there["texts"], strict=True)),
                "events_per_token": events / (STREAMS * TOKENS),
            }
        )
    return rows[1:]


def report(rows: list[dict[str, float]], status: int) -> None:
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ratio = statistics.median(row["http"] / row["offline"] for row in rows)
    print_table(
        [
            (f"{STREAMS} streams x {TOKENS} tokens, median of {RUNS}", "", "bar"),
            ("offline", f"{median['offline']:.1f} tok/s", ""),
            ("through HTTP", f"{median['http']:.1f} tok/s", ""),
            ("ratio", f"{ratio:.3f}", ">= 0.900"),
            ("server CPU per token", f"{median['us_per_token']:.1f} us", "<= 60"),
            ("events per token", f"{median['events_per_token']:.2f}", ""),
        ]
    )
    print(f"the same texts: {sum(row['same'] for row in rows):.0f} of {RUNS * STREAMS}; the server ended with {status}")
    row = {"model": "SmolLM2-135M-Instruct", "dtype": "float32", "ratio": round(ratio, 4)}
    row |= {name: round(value, 2) for name, value in median.items()} | {"runs": rows}
    print(f"written to {write_row('http_serving', row)}")


if __name__ == "__main__":
    main()
