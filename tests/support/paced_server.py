"""A small gRPC server in a separate process that streams answers in Triton's protocol at a steady pace.

Run as ``python -m support.paced_server LOG TOKENS FIRST_S GAP_S FAIL_EVERY``. It prints its port. For every answer it
writes a line of JSON: when the request came, and when each token was sent. Every FAIL_EVERY-th answer fails in the
middle; 0 for none. A control request is answered at once and not logged.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.triton_response import response


@dataclass
class Paced:
    """A running paced server."""

    url: str
    process: "subprocess.Popen[str]"
    log: Path

    def answers(self) -> list[dict]:
        """The server's log of its answers."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def paced(log: Path, tokens: int, first_s: float, gap_s: float, fail_every: int = 0) -> Iterator[Paced]:
    command = [sys.executable, "-m", "support.paced_server", *map(str, (log, tokens, first_s, gap_s, fail_every))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        try:
            yield Paced(f"127.0.0.1:{int(process.stdout.readline())}", process, log)
        finally:
            process.kill()


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, log: str, tokens: int, first_s: float, gap_s: float, fail_every: int):
        self.log = Path(log)
        self.tokens, self.first_s, self.gap_s, self.fail_every = tokens, first_s, gap_s, fail_every
        self.number = 0

    async def ModelStreamInfer(self, requests, context) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        request = await anext(aiter(requests))
        received = time.monotonic()
        if any(tensor.name == "control" for tensor in request.inputs):
            yield response('{"ok": true}', "length", 0)
            return
        self.number += 1
        fails = self.fail_every and self.number % self.fail_every == 0
        sent = []
        await context.send_initial_metadata(())
        yield response("", tokens=0)
        for token in range(self.tokens):
            # By the clock, so that the pace does not depend on the time to send
            await asyncio.sleep(received + self.first_s + token * self.gap_s - time.monotonic())
            if fails and token == self.tokens // 2:
                yield service_pb2.ModelStreamInferResponse(error_message="INTERNAL: made to fail")
                break
            sent.append(time.monotonic())
            yield response(" a", "length" if token == self.tokens - 1 else "", 1)
        with self.log.open("a") as log:
            log.write(json.dumps({"received": received, "sent": sent, "failed": bool(fails)}) + "\n")


async def serve() -> None:
    log, tokens, first_s, gap_s, fail_every = sys.argv[1:]
    server = grpc.aio.server()
    servicer = Servicer(log, int(tokens), float(first_s), float(gap_s), int(fail_every))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve())
