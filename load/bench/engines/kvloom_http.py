"""kvloom in Triton over HTTP: server-sent events of `generate`, at intervals of at least 50 ms."""

from concurrent.futures import ThreadPoolExecutor

from bench.engines.kvloom_grpc import Grpc
from bench.engines.protocol import Prompts, serve
from kvloom_client import HttpClient


class Http(Grpc):
    """The same server over HTTP, with a thread for each prompt."""

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """See ``Engine``."""

        def one(prompt: list[int]) -> list[int]:
            with HttpClient(self.server.http_url) as client:
                stream = client.stream(input_ids=prompt, temperature=0.0, max_tokens=new, ignore_eos=True)
                return [token for chunk in stream for token in chunk.token_ids]

        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(one, prompts))


if __name__ == "__main__":
    serve(Http)
