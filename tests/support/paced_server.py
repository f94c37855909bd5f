"""A small gRPC server that speaks Triton's streaming protocol at a steady pace, in a process of its own.

Run as ``paced_server.py LOG TOKENS FIRST_S GAP_S FAIL_EVERY``; prints its port. Writes a line of JSON for every answer:
when the request came, and when each token went. Every FAIL_EVERY-th answer breaks off in its middle; 0: none does.
A control request is answered at once, and not written down.
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


@dataclass
class Paced:
    """A running paced server, as the test sees it."""

    url: str
    process: "subprocess.Popen[str]"
    log: Path

    def answers(self) -> list[dict]:
        """What the server itself noted."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def paced(log: Path, tokens: int, first_s: float, gap_s: float, fail_every: int = 0) -> Iterator[Paced]:
    command = [sys.executable, __file__, *map(str, (log, tokens, first_s, gap_s, fail_every))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Paced(f"127.0.0.1:{int(process.stdout.readline())}", process, log)
        finally:
            process.kill()


def response(text: str, tokens: int, final: bool = False) -> service_pb2.ModelStreamInferResponse:
    message = service_pb2.ModelStreamInferResponse()
    infer = message.infer_response
    infer.parameters["triton_final_response"].bool_param = final
    for name, value in (("text_output", text), ("finish_reason", "length" if final else "")):
        infer.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        infer.raw_output_contents.append(len(value).to_bytes(4, "little") + value.encode())
    infer.outputs.add(name="token_ids", datatype="INT32", shape=[1, tokens])
    infer.raw_output_contents.append(bytes(4 * tokens))
    return message


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, log: str, tokens: int, first_s: float, gap_s: float, fail_every: int):
        self.log = Path(log)
        self.tokens, self.first_s, self.gap_s, self.fail_every = tokens, first_s, gap_s, fail_every
        self.number = 0

    async def ModelStreamInfer(self, requests, context) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        request = await anext(aiter(requests))
        received = time.monotonic()
        if any(tensor.name == "control" for tensor in request.inputs):
            yield response('{"ok": true}', 0, final=True)
            return
        self.number += 1
        fails = self.fail_every and self.number % self.fail_every == 0
        sent = []
        await context.send_initial_metadata(())
        yield response("", 0)
        for token in range(self.tokens):
            # by the clock, so that the pace does not depend on how long sending takes
            await asyncio.sleep(received + self.first_s + token * self.gap_s - time.monotonic())
            if fails and token == self.tokens // 2:
                yield service_pb2.ModelStreamInferResponse(error_message="INTERNAL: made to fail")
                break
            sent.append(time.monotonic())
            yield response(" a", 1, final=token == self.tokens - 1)
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
