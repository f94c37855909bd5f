"""Starts a server several times with little shared memory. A program to run in a separate mount namespace.

Arguments: size of /dev/shm, folder of a model, number of rounds.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Client, HttpClient, InvalidArgument, KvloomClientError
from support.server import SETTINGS

STREAMS = 64


def use(grpc_url: str, http_url: str) -> None:
    """Run 64 streams. A prompt of 5 MB is refused for its length, one of 60 MB for lack of shared memory."""

    with Client(grpc_url) as client, ThreadPoolExecutor(STREAMS) as pool:

        def stream(_: int) -> int:
            return sum(len(c.token_ids) for c in client.stream(input_ids=[5] * 100, max_tokens=8, ignore_eos=True))

        assert list(pool.map(stream, range(STREAMS))) == [8] * STREAMS
    with Client(grpc_url) as client, HttpClient(http_url) as http:
        for door in (client, http):
            for size, refusal in ((5, "has 5242880 characters; that can't fit"), (60, "--shm-size")):
                try:
                    door.generate(text_input="x" * (size << 20), timeout=60)
                except KvloomClientError as error:
                    assert refusal in str(error), error
                    assert isinstance(error, InvalidArgument) == (size == 5), repr(error)
                else:
                    raise AssertionError(f"a prompt of {size} MB was accepted")
                assert door.generate(input_ids=[5], max_tokens=1, temperature=0.0, timeout=60).finish_reason == "length"


def main() -> None:
    """Start and stop a server in each round. The first round also sends requests."""
    size, model, rounds = sys.argv[1:]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "shm", "/dev/shm"], check=True)
    for turn in range(int(rounds)):
        with Server.start(ModelRepository(SETTINGS | {"model": model}), exit_timeout_s=5) as server:
            assert len(os.listdir("/dev/shm")) == 2  # one region for each model
            if turn == 0:
                use(server.grpc_url, server.http_url)
                assert server.ready
        assert os.listdir("/dev/shm") == []
    print("fine")


if __name__ == "__main__":
    main()
