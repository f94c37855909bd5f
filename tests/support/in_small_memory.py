"""A server on little shared memory. As a program: started several times over, in a mount namespace of its own.

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
    """64 streams; a prompt of 5 MB is refused for what it is, one of 60 MB for want of memory; nothing breaks."""

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
                    raise AssertionError(f"{size} MB were taken")
                assert door.generate(input_ids=[5], max_tokens=1, temperature=0.0, timeout=60).finish_reason == "length"


def main() -> None:
    """Start, use and stop a server; only the first is used hard."""
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
