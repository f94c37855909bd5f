"""`kvloom serve` while /dev/shm fills up again and again. As a program: in a mount namespace of its own.

Arguments: folder of a model, number of times that it is filled.
"""

import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from kvloom_client import Client, HttpClient, KvloomClientError
from support.launched import Launched, launched
from support.server import SETTINGS, assert_idle

SIZE = "64m"
FILLER = Path("/dev/shm/filler")
CLIENTS = 16
LENGTHS = (20, 400, 240_000, 1_200_000)
"""Characters of the prompts; the long ones are refused, and take shared memory on their way to the model."""


def fill() -> None:
    """Leave no page free."""
    with FILLER.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def use(serving: Launched, number: int, ends: Counter[str], stop: threading.Event) -> None:
    """Ask until ``stop`` is set: every request ends, with an answer or with an error that the client knows."""
    door = Client(serving.url) if number % 2 else HttpClient(f"http://127.0.0.1:{serving.http}")
    with door:
        while not stop.is_set():
            prompt = "a" * LENGTHS[number // 2 % len(LENGTHS)]
            try:
                door.generate(text_input=prompt, max_tokens=8, ignore_eos=True, logprobs=20, timeout=60)
            except KvloomClientError as error:
                ends[type(error).__name__] += 1
                time.sleep(0.02)
            else:
                ends["answer"] += 1


def main() -> None:
    """Fill and free it beneath the requests, then look whether all is well."""
    model, rounds = sys.argv[1:]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "shm", "/dev/shm"], check=True)
    ends: Counter[str] = Counter()
    stop = threading.Event()
    with launched(settings=SETTINGS | {"model": model, "stuck_after_s": "5"}) as serving:
        users = [threading.Thread(target=use, args=(serving, number, ends, stop)) for number in range(CLIENTS)]
        fill()
        for user in users:
            user.start()
        for _ in range(int(rounds)):
            time.sleep(1)
            FILLER.unlink()
            time.sleep(0.1)
            fill()
        FILLER.unlink()
        stop.set()
        for user in users:
            user.join()
        # whatever it did to the server
        serving.wait_until_health_is(200, 120)
        with Client(serving.url) as client:
            assert client.generate(input_ids=[5], max_tokens=1, timeout=60).finish_reason == "length"
        assert_idle(serving)
        serving.process.terminate()
        _, errors = serving.process.communicate(timeout=120)
        assert serving.process.returncode == 0, errors
        # of a restart the end of the server's log is told, where a model's traceback may stand
        assert "Traceback" not in errors.replace("  | Traceback", ""), errors
    print("fine", dict(ends), f"{errors.count('kvloom: serving again')} restarts")


if __name__ == "__main__":
    main()
