"""`octavo chat`: a conversation at the terminal, or with lines from a pipe."""

from typing import TextIO

from octavo.engine import Engine, RequestError, SamplingParams

HELP = "/reset forgets the conversation, /exit (or end of input) ends it, Ctrl-C stops an answer"


def talk(engine: Engine, params: SamplingParams, system: str | None, source: TextIO, sink: TextIO) -> None:
    """Answers every line of `source` on `sink` until it ends or says /exit."""
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    interactive = source.isatty()
    if interactive:
        print(HELP, file=sink)
    while True:
        if interactive:
            print("> ", end="", file=sink, flush=True)
        line = source.readline()
        if not line or line.strip() == "/exit":
            return
        match line.strip():
            case "":
                continue
            case "/reset":
                messages = list(start)
            case "/help":
                print(HELP, file=sink)
            case question:
                messages = _answer(engine, params, messages, question, sink)


def _answer(
    engine: Engine, params: SamplingParams, messages: list[dict[str, str]], question: str, sink: TextIO
) -> list[dict[str, str]]:
    """Prints the answer and returns the longer conversation; the old one when it was refused."""
    asked = [*messages, {"role": "user", "content": question}]
    answer = ""
    try:
        for piece in engine.stream(engine.render_chat(asked), params):
            answer += piece.text
            print(piece.text, end="", file=sink, flush=True)
    except KeyboardInterrupt:
        print(" …", end="", file=sink)
    except RequestError as error:
        print(f"[{error}; /reset starts anew]", file=sink, flush=True)
        return messages
    print(file=sink, flush=True)
    return [*asked, {"role": "assistant", "content": answer}]
