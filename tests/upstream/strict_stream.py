"""Crashes a tritonserver 2.51.0: an error on a gRPC stream with `triton_grpc_error`, and another request's response.

The stream carries two requests to a decoupled model. The first one is answered after a second. The second one is
answered with an error at once, which closes the stream. The response to the first one then makes tritonserver use the
stream's freed state (`ModelStreamInferHandler::StreamInferResponseComplete`) and end with SIGSEGV.

    strict_stream.py TRITONSERVER BACKENDS      exit code 0 if tritonserver lives, 1 if it has crashed
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "FAIL" data_type: TYPE_BOOL dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_BOOL dims: [ 1 ] }
instance_group { kind: KIND_CPU }
"""
MODEL = """
import threading
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            fail = pb_utils.get_input_tensor_by_name(request, "FAIL")
            sender = request.get_response_sender()
            threading.Thread(target=answer, args=(sender, fail.as_numpy().any(), fail.as_numpy())).start()


def answer(sender, fail, value):
    if fail:
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError("refused"))
    else:
        time.sleep(1)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)])
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_repository(folder: Path) -> None:
    """Write a model repository with the model `answers`."""
    (folder / "answers" / "1").mkdir(parents=True)
    (folder / "answers" / "config.pbtxt").write_text(CONFIG)
    (folder / "answers" / "1" / "model.py").write_text(MODEL)


def request(fail: bool) -> service_pb2.ModelInferRequest:
    """A request to the model."""
    message = service_pb2.ModelInferRequest(model_name="answers")
    message.inputs.add(name="FAIL", datatype="BOOL", shape=[1])
    message.raw_input_contents.append(bytes([fail]))
    return message


def requests() -> Iterator[service_pb2.ModelInferRequest]:
    """A good request, and a bad one while the good one is running."""
    yield request(fail=False)
    time.sleep(0.3)
    yield request(fail=True)
    time.sleep(3)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def main() -> int:
    """Start the server, send the stream, and say what has become of the server."""
    binary, backends = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder))
        port = free_port()
        options = ["--allow-http=false", "--allow-metrics=false", "--grpc-address=127.0.0.1", f"--grpc-port={port}"]
        server = subprocess.Popen([binary, f"--model-repository={folder}", f"--backend-directory={backends}", *options])
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(timeout=120)
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                try:
                    for response in stub.ModelStreamInfer(requests(), metadata=[("triton_grpc_error", "true")]):
                        print("a response:", response)
                except grpc.RpcError as error:
                    print("the stream has ended:", error.code(), error.details())
                time.sleep(3)
            if server.poll() is None:
                print("tritonserver lives")
                return 0
            print("tritonserver has ended with", server.returncode)
            return 1
        finally:
            if server.poll() is None:
                server.terminate()
                server.wait(60)


if __name__ == "__main__":
    sys.exit(main())
