"""kvloom in Triton over gRPC: `llm`, with a response per token or at intervals of ``stream_interval_ms``."""

import asyncio
from importlib.metadata import version
from typing import Any

from bench.engines.protocol import Prompts, serve
from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import AsyncClient


class Grpc:
    """A server, and a client in this process."""

    def __init__(self, model: str, options: dict[str, Any]):
        self.interval_ms = options.pop("stream_interval_ms", 0)
        self.server = Server.start(ModelRepository({"model": model, **options}), exit_timeout_s=5)
        self.versions = {name: version(name) for name in ("kvloom", "torch", "nvidia-pytriton")}
        self.pid = self.server.process.pid

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """See ``Engine``."""

        async def one(client: AsyncClient, prompt: list[int]) -> list[int]:
            stream = client.stream(
                input_ids=prompt,
                temperature=0.0,
                max_tokens=new,
                ignore_eos=True,
                stream_interval_ms=self.interval_ms,
            )
            return [token async for chunk in stream for token in chunk.token_ids]

        async def all_of_them() -> list[list[int]]:
            async with AsyncClient(self.server.grpc_url) as client:
                return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

        return asyncio.run(all_of_them())

    def close(self) -> None:
        """See ``Engine``."""
        self.server.stop()


if __name__ == "__main__":
    serve(Grpc)
