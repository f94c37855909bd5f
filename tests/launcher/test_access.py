"""What clients can do to a server beside asking it: every row of the table in docker/README.md, over HTTP and gRPC."""

import base64
import http.client
import json
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from kvloom.launcher import access
from kvloom.launcher.launch import Server
from kvloom_client import Client
from support.bare_server import bare_server
from support.launched import launched
from support.raw_grpc import raw_grpc_call, spoken
from support.server import REFERENCE, SETTINGS, assert_idle, canary
from support.tiny_models import make_tiny

DOCUMENT = (Path(__file__).parents[2] / "docker" / "README.md").read_text()
TABLE = dict(re.findall(r"^\| ([\w ,]+?) \| .* \| (open|off)\b[^|]*\|$", DOCUMENT, re.MULTILINE))

MODEL_PY = """
import pathlib
pathlib.Path({marker!r}).write_text("code of a client ran")
class TritonPythonModel:
    def execute(self, requests): return []
"""
REGION = {"key": "kvloom-test-region", "offset": 0, "byte_size": 64}


def upload(marker: Path) -> dict[str, dict[str, str]]:
    """A model whose Python is in the request that loads it."""
    code = base64.b64encode(MODEL_PY.format(marker=str(marker)).encode()).decode()
    config = {"name": "mine", "backend": "python", "max_batch_size": 0, "input": [], "output": []}
    return {"parameters": {"config": json.dumps(config), "file:1/model.py": code}}


def http_calls(marker: Path) -> dict[str, list[tuple[str, str, object]]]:
    """The requests of each row: method, path, JSON."""
    prompt = {"input_ids": [5], "max_tokens": 1}
    calls: dict[str, list[tuple[str, str, object]]] = {
        "health": [("GET", f"/v2/{path}", None) for path in ("health/live", "health/ready", "models/llm/ready")],
        "metadata": [("GET", path, None) for path in ("/v2", "/v2/models/llm")],
        "model config": [("GET", "/v2/models/llm/config", None)],
        "statistics": [("GET", f"/v2/models/{path}", None) for path in ("llm/stats", "stats")],
        "inference": [("POST", f"/v2/models/generate/{path}", prompt) for path in ("generate", "generate_stream")],
        "model repository": [
            ("POST", "/v2/repository/index", {}),
            ("POST", "/v2/repository/models/mine/load", upload(marker)),
            ("POST", "/v2/repository/models/llm/load", {"parameters": {"config": '{"max_batch_size": 1}'}}),
            ("POST", "/v2/repository/models/llm/unload", {}),
            ("POST", "/v2/repository/models/generate/unload", {"parameters": {"unload_dependents": True}}),
        ],
        "logging": [
            ("GET", "/v2/logging", None),
            ("POST", "/v2/logging", {"log_error": False, "log_file": str(marker)}),
        ],
    }
    for row, kind in (("system shared memory", "system"), ("CUDA shared memory", "cuda")):
        root = f"/v2/{kind}sharedmemory"
        calls[row] = [("GET", f"{root}/status", None), ("GET", f"{root}/region/mine/status", None)]
        calls[row] += [("POST", f"{root}/region/mine/register", REGION), ("POST", f"{root}/unregister", {})]
        calls[row] += [("POST", f"{root}/region/mine/unregister", {})]
    setting = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_file": str(marker)}
    paths = ("/v2/trace/setting", "/v2/models/llm/trace/setting")
    calls["trace"] = [("GET", path, None) for path in paths] + [("POST", path, setting) for path in paths]
    return calls


def grpc_calls(marker: Path) -> dict[str, list[tuple[str, object]]]:
    """The requests of each row: name of the call, message."""
    code = pb.ModelRepositoryParameter(bytes_param=base64.b64decode(upload(marker)["parameters"]["file:1/model.py"]))
    config = pb.ModelRepositoryParameter(string_param=upload(marker)["parameters"]["config"])
    setting = pb.TraceSettingRequest.SettingValue(value=["TIMESTAMPS"])
    return {
        "health": [
            ("ServerLive", pb.ServerLiveRequest()),
            ("ServerReady", pb.ServerReadyRequest()),
            ("ModelReady", pb.ModelReadyRequest(name="llm")),
        ],
        "metadata": [
            ("ServerMetadata", pb.ServerMetadataRequest()),
            ("ModelMetadata", pb.ModelMetadataRequest(name="llm")),
        ],
        "model config": [("ModelConfig", pb.ModelConfigRequest(name="llm"))],
        "statistics": [("ModelStatistics", pb.ModelStatisticsRequest())],
        "inference": [],
        "model repository": [
            ("RepositoryIndex", pb.RepositoryIndexRequest()),
            (
                "RepositoryModelLoad",
                pb.RepositoryModelLoadRequest(
                    model_name="mine", parameters={"config": config, "file:1/model.py": code}
                ),
            ),
            ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="llm")),
            ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="llm")),
        ],
        "system shared memory": [
            ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
            ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="mine", **REGION)),
            ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
        ],
        "CUDA shared memory": [
            ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
            ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="mine", byte_size=64)),
            ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
        ],
        "logging": [
            ("LogSettings", pb.LogSettingsRequest()),
            (
                "LogSettings",
                pb.LogSettingsRequest(settings={"log_error": pb.LogSettingsRequest.SettingValue(bool_param=False)}),
            ),
        ],
        "trace": [
            ("TraceSetting", pb.TraceSettingRequest()),
            ("TraceSetting", pb.TraceSettingRequest(model_name="llm", settings={"trace_level": setting})),
        ],
    }


OVER_HTTP = set(http_calls(Path()))
OVER_GRPC = set(grpc_calls(Path()))
ELSEWHERE = {"metrics", "readiness", "SageMaker, Vertex AI"}
"""Rows of other ports, which other tests are about."""


def request(url: str, method: str, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, str]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=30)
    try:
        # text/plain: what a web page may send anywhere without being asked
        kind = {"Content-Type": "text/plain"}
        connection.request(method, path, None if body is None else json.dumps(body), kind | (headers or {}))
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module", params=["kvloom serve", "tritonserver"])
def doors(request, tmp_path_factory) -> Iterator[tuple[str, str]]:
    """HTTP and gRPC address of a server with and without the launcher."""
    if request.param == "kvloom serve":
        server = request.getfixturevalue("server")
        with neighbour(server):
            yield server.http_url, server.grpc_url
        canary(server)
        assert_idle(server)
    else:
        with bare_server(tmp_path_factory.mktemp("bare")) as addresses:
            yield addresses


@contextmanager
def neighbour(server: Server) -> Iterator[None]:
    """Somebody's answers while the others do what they want: always the right ones."""
    expected = REFERENCE[0]
    done = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        with Client(server.grpc_url) as client:
            while not done.is_set():
                try:
                    answer = client.generate(text_input=expected["prompt"], max_tokens=16, temperature=0.0, timeout=60)
                    if list(answer.token_ids) != expected["ids"][:16]:
                        wrong.append(answer)
                except Exception as error:  # noqa: BLE001 whatever it is, the neighbour was hurt
                    wrong.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert wrong == []


def test_the_table_has_a_row_for_everything_that_is_tried_and_no_other():
    assert set(TABLE) == OVER_HTTP | OVER_GRPC | ELSEWHERE
    assert {row for row, state in TABLE.items() if state == "off"} == {
        *("model repository", "system shared memory", "CUDA shared memory", "logging", "trace", "SageMaker, Vertex AI")
    }


@pytest.mark.parametrize("row", sorted(OVER_HTTP))
def test_over_http(doors, row, tmp_path):
    marker = tmp_path / "marker"
    for method, path, body in http_calls(marker)[row]:
        status, text = request(doors[0], method, path, body)
        if TABLE[row] == "open":
            assert status == 200, (path, text)
        else:
            assert status == 403, (path, text)
            assert "This API is restricted" in json.loads(text)["error"]
    assert not marker.exists()


@pytest.mark.parametrize("row", sorted(OVER_GRPC))
def test_over_grpc(doors, row, tmp_path):
    marker = tmp_path / "marker"
    with grpc.insecure_channel(doors[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, message in grpc_calls(marker)[row]:
            if TABLE[row] == "open":
                getattr(stub, name)(message, timeout=30)
                continue
            with pytest.raises(grpc.RpcError) as refused:
                getattr(stub, name)(message, timeout=30)
            assert "This protocol is restricted" in refused.value.details(), name
    assert not marker.exists()


def test_inference_and_health_over_grpc(doors):
    with grpc.insecure_channel(doors[1]) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=30) == b"\x08\x01"  # SERVING
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        prompt = pb.ModelInferRequest.InferInputTensor(
            name="input_ids", datatype="INT32", shape=[1, 1], contents={"int_contents": [5]}
        )
        more = {"max_tokens": pb.InferParameter(int64_param=1)}
        asked = pb.ModelInferRequest(model_name="generate", inputs=[prompt], parameters=more)
        [answer] = stub.ModelStreamInfer(iter([asked]), timeout=60)
        assert answer.error_message == ""
        assert [output.name for output in answer.infer_response.outputs] == ["text_output"]
        # what answers with streams Triton refuses to answer otherwise
        with pytest.raises(grpc.RpcError, match="decoupled"):
            stub.ModelInfer(asked, timeout=30)
    status, text = request(doors[0], "POST", "/v2/models/generate/infer", {"inputs": []})
    assert status in (400, 501), text


def test_the_header_that_is_asked_for_can_not_be_sent(doors):
    name, _, value = access.HEADER.partition("=")
    # in HTTP the name ends at the colon, however it is written
    for line in (f"{name}: {value}", f"{name.replace(':', '%3A')}: {value}", f"{name}", f"switched\r\n :off: {value}"):
        head = f"GET /v2/logging HTTP/1.1\r\nHost: here\r\n{line}\r\nConnection: close\r\n\r\n"
        answered = spoken(urlsplit(doors[0]).netloc, head.encode())
        assert b"log_verbose_level" not in answered
        # or it hangs up
        assert not answered or answered.split(b" ")[1] in (b"400", b"403"), answered
    # in HTTP/2 it can be written, past every library; gRPC drops what comes with it
    for sent in (f"triton-grpc-protocol-{name}", f"triton-grpc-protocol-{name}".lower()):
        answered = spoken(doors[1], raw_grpc_call("/inference.GRPCInferenceService/LogSettings", (sent, value)))
        assert b"log_verbose_level" not in answered
        assert b"Missing :method header" in answered
    # and the bytes are right: a name without colon is heard
    answered = spoken(doors[1], raw_grpc_call("/inference.GRPCInferenceService/LogSettings", ("some-name", value)))
    assert b"This protocol is restricted" in answered


def shared_input(address: str, region: shared_memory.SharedMemory) -> str:
    """Ask for an answer to a prompt that lies in shared memory: what comes of it."""
    with triton.InferenceServerClient(address) as client:
        prompt = triton.InferInput("input_ids", [1, 4], "INT32")
        prompt.set_shared_memory("mine", 16)
        heard: list[object] = []
        came = threading.Event()

        def take(result: object, error: object) -> None:
            heard.append(error if error is not None else result)
            came.set()

        client.start_stream(take)
        client.async_stream_infer("llm", [prompt], sequence_id="shm", sequence_start=True, sequence_end=True)
        assert came.wait(30)
        client.stop_stream()
    return str(heard[0])


@contextmanager
def region() -> Iterator[shared_memory.SharedMemory]:
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        memory.buf[:16] = struct.pack("4i", 5, 6, 7, 8)
        yield memory
    finally:
        memory.close()
        memory.unlink()


def test_inputs_in_shared_memory_are_refused(doors):
    with region() as memory:
        status, text = request(
            doors[0],
            "POST",
            "/v2/systemsharedmemory/region/mine/register",
            {"key": f"/{memory.name}", "offset": 0, "byte_size": 64},
        )
        assert status == 403, text
        assert "Unable to find shared memory region: 'mine'" in shared_input(doors[1], memory)


def test_an_operator_may_allow_shared_memory_and_is_warned(tmp_path):
    settings = SETTINGS | {"model": str(make_tiny(tmp_path / "model"))}
    with launched("--shared-memory", "--exit-timeout=5", settings=settings) as serving, region() as memory:
        with triton.InferenceServerClient(serving.url) as client:
            client.register_system_shared_memory("mine", f"/{memory.name}", 64)
            assert "Unable to find" not in shared_input(serving.url, memory)
            with pytest.raises(triton.InferenceServerException, match="restricted"):
                client.get_log_settings()
        serving.process.terminate()
        _, said = serving.process.communicate(timeout=60)
        assert "kvloom: warning: --shared-memory: every client can read and write" in said
        assert ("kvloom: warning: running as root" in said) == (os.geteuid() == 0)


def test_nobody_else_may_enter_the_launchers_folders(server):
    """Its process shows where they are."""
    arguments = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
    [models] = [Path(one.partition("=")[2]) for one in arguments if one.startswith("--model-repository=")]
    for folder in (models.parent, models.parent.parent):
        assert folder.stat().st_mode & 0o077 == 0
        assert folder.stat().st_uid == os.geteuid()
