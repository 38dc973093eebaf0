"""A parent of an engine process, to be killed: prints the child's process id, then "ready", and streams until its end.

python -m tests.references.engine_parent MODEL OPTIONS_AS_JSON
"""

import asyncio
import json
import sys

from octavo.configs.engine import EngineConfig
from octavo.engine import SamplingParams
from octavo.engine.client import AsyncEngine
from octavo.engine.connection import EngineConnection


async def main(model: str, options: dict) -> None:
    opened = EngineConnection.open

    async def open_and_tell(self: EngineConnection) -> None:
        await opened(self)
        print(self.pid, self._folder, flush=True)

    EngineConnection.open = open_and_tell
    config = EngineConfig(model=model, **{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    engine = await AsyncEngine.start(config, progress=False)
    print("ready", sys.flags.optimize, flush=True)
    streams = [engine.submit(engine.parse_prompt("c"), SamplingParams(temperature=0, max_tokens=2000))]
    while True:
        for stream in streams:
            async for _ in stream:
                pass
        streams = [engine.submit(engine.parse_prompt("c"), SamplingParams(temperature=0, max_tokens=2000))]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
