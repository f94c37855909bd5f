"""llama.cpp's server, built for this CPU. Whole answers over HTTP."""

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.engines.protocol import Prompts, serve

START_S = 60.0


class LlamaServer:
    """A server in a separate process."""

    def __init__(self, model: str, options: dict[str, Any]):
        binary = Path(options["binary"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        threads = options["threads"]
        command = [str(binary), "-m", model, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["-t", threads, "-tb", threads, "-fa", "on"]
        slots = options["slots"]
        # a cache for each slot: with one for all, every query looks at every sequence's keys
        command += ["-np", str(slots), "-c", str(slots * options["slot_tokens"]), "--no-kv-unified"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.pid = self.process.pid
        self.versions = {"llama.cpp": options["version"]}
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with exit code {self.process.returncode}")
            try:
                if self._ask("GET", "/health", None).get("status") == "ok":
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.1)
        self.close()
        raise RuntimeError(f"llama-server did not become ready within {START_S:.0f} s")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK and method == "POST":
            raise RuntimeError(f"llama-server: {answer}")
        return answer

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """See ``Engine``."""

        def one(prompt: list[int]) -> list[int]:
            sampling = {"n_predict": new, "temperature": 0, "top_k": 1, "ignore_eos": True}
            body = {"prompt": prompt, **sampling, "cache_prompt": True, "return_tokens": True}
            return self._ask("POST", "/completion", body)["tokens"]

        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(one, prompts))

    def close(self) -> None:
        """See ``Engine``."""
        self.process.terminate()
        self.process.wait()


if __name__ == "__main__":
    serve(LlamaServer)
