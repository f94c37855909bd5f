"""Conversations of both gRPC clients on a real server: what is asynchronous, and what only Triton has lost."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from kvloom.launcher.cli import app
from kvloom_client import AsyncClient, Client, InvalidArgument, NotFound, UnknownSequence
from support.server import assert_idle
from support.tiny_server import GREEDY, tokens

KVLOOM = str(Path(sys.executable).parent / "kvloom")
SHORT = {**GREEDY, "max_tokens": 6, "timeout": 60}


@pytest.fixture(autouse=True)
def left_idle(server):
    yield
    assert_idle(server)


def forget_in_triton(server, conversation) -> None:
    """Triton refuses a request without inputs, and ends its sequence all the same; the engine hears of neither."""
    message = service_pb2.ModelInferRequest(model_name="llm")
    message.parameters["sequence_id"].string_param = conversation
    message.parameters["sequence_end"].bool_param = True
    with grpc.insecure_channel(server.grpc_url) as channel:
        [reply] = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter((message,)), timeout=60)
    assert "0 inputs" in reply.error_message


def test_turns_of_an_asyncio_conversation(server):
    async def talk():
        async with AsyncClient(server.grpc_url) as client:
            history = []
            async with client.conversation("async") as talk:
                for turn in range(3):
                    new = tokens(turn, 9)
                    if turn == 1:
                        chunks = [chunk async for chunk in talk.stream(input_ids=new, return_usage=True, **SHORT)]
                        said, usage = [token for chunk in chunks for token in chunk.token_ids], chunks[-1].usage
                    else:
                        answer = await talk.generate(input_ids=new, return_usage=True, **SHORT)
                        said, usage = list(answer.token_ids), answer.usage
                    history += new
                    assert tuple(said) == (await client.generate(input_ids=history, **SHORT)).token_ids
                    assert usage["prompt_tokens"] == len(history)
                    assert usage["prompt_tokens"] - usage["cached_tokens"] <= len(new) + 1
                    history += said
                status = await talk.status(timeout=60)
                assert (status["tokens"], status["busy"]) == (len(history), False)
            with pytest.raises(NotFound):
                await talk.status()
            assert not talk.begun

    asyncio.run(talk())


def test_barge_in_and_the_last_turn_of_an_asyncio_conversation(server):
    async def talk():
        async with AsyncClient(server.grpc_url) as client:
            talk = client.conversation()
            said, reason = [], None
            async with talk.stream(input_ids=tokens(1, 20), **{**SHORT, "max_tokens": 4000}) as stream:
                async for chunk in stream:
                    said += chunk.token_ids
                    reason = chunk.finish_reason
                    if len(said) == 1:
                        await talk.interrupt(timeout=60)
            assert reason == "cancelled"
            assert 1 <= len(said) < 4000
            history = [*tokens(1, 20), *said, *tokens(2, 5)]
            last = await talk.generate(input_ids=tokens(2, 5), last=True, **SHORT)
            assert last.num_input_tokens == len(history)
            assert last.token_ids == (await client.generate(input_ids=history, **SHORT)).token_ids
            assert not talk.begun
            with pytest.raises(NotFound):
                await talk.status()
            # the server has none: nothing to end
            talk.begun = True
            await talk.end()

    asyncio.run(talk())


def test_an_asyncio_conversation_that_is_lost_begins_anew(server):
    async def talk():
        async with AsyncClient(server.grpc_url) as client, client.conversation("lost") as talk:
            await talk.generate(input_ids=tokens(1, 9), **SHORT)
            await client.control("end", "lost")
            with pytest.raises(NotFound):
                await talk.generate(input_ids=tokens(2, 9), **SHORT)
            answer = await talk.generate(input_ids=tokens(3, 9), **SHORT)
            assert answer.num_input_tokens == 9
            # what is refused leaves it as it was
            with pytest.raises(InvalidArgument):
                await talk.generate(input_ids=tokens(2, 9), timeout=60, temperature=-1.0)
            assert (await talk.generate(input_ids=tokens(4, 9), **SHORT)).num_input_tokens == 9 + 6 + 9

    asyncio.run(talk())


@pytest.mark.parametrize("last", [False, True])
def test_what_only_triton_has_lost_goes_on(server, client, last):
    with client.conversation("reopened") as talk:
        first = talk.generate(input_ids=tokens(1, 9), **SHORT)
        forget_in_triton(server, "reopened")
        with pytest.raises(UnknownSequence, match="START"):
            # as a client that does not know better
            talk._client._send(talk._request(False, stream=True, input_ids=[5], max_tokens=1), 60, 0).__next__()
        second = talk.generate(input_ids=tokens(2, 9), last=last, **SHORT)
        history = [*tokens(1, 9), *first.token_ids, *tokens(2, 9)]
        assert second.num_input_tokens == len(history)
        assert second.token_ids == client.generate(input_ids=history, **SHORT).token_ids
    with pytest.raises(NotFound):
        client.control("status", "reopened")


def test_what_only_triton_has_lost_goes_on_in_asyncio_too(server):
    async def talk():
        async with AsyncClient(server.grpc_url) as client, client.conversation("reopened") as talk:
            await talk.generate(input_ids=tokens(1, 9), **SHORT)
            forget_in_triton(server, "reopened")
            chunks = [chunk async for chunk in talk.stream(input_ids=tokens(2, 9), **SHORT)]
            assert chunks[0].num_input_tokens == 9 + 6 + 9

    asyncio.run(talk())


def test_what_the_engine_has_lost_too_is_not_found_and_leaves_nothing_in_triton(client):
    talk = client.conversation("gone")
    talk.begun = True
    for _ in range(2):
        with pytest.raises(UnknownSequence):
            talk.generate(input_ids=tokens(1, 9), **SHORT)
        assert not talk.begun
        talk.begun = True
    with pytest.raises(NotFound, match="unknown"):
        client.control("status", "gone")


def test_an_op_about_a_conversation_needs_its_id(client):
    for op in ("status", "cancel", "end"):
        with pytest.raises(InvalidArgument, match=f"^INVALID_ARG: conversation: {op} needs the id of a conversation"):
            client.control(op)


def control(server, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    command = [KVLOOM, "control", *arguments, "--url", server.grpc_url]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def test_the_control_command(server, client, tmp_path):
    ping = json.loads(control(server, "ping").stdout)
    assert (ping["op"], ping["ok"], ping["draining"]) == ("ping", True, False)
    with client.conversation(7) as number, client.conversation("7") as text:
        number.generate(input_ids=tokens(1, 9), **SHORT)
        text.generate(input_ids=tokens(1, 19), **SHORT)
        assert json.loads(control(server, "status", "7").stdout)["tokens"] == 9 + 6
        assert json.loads(control(server, "end", "7", "--text-id").stdout) == {"op": "end", "ok": True}
        again = control(server, "end", "7", "--text-id")
        assert (again.returncode, again.stderr) == (1, "kvloom: NOT_FOUND: conversation 7: unknown\n")
        assert number.status()["tokens"] == 9 + 6
    token = tmp_path / "token"
    token.write_text("wrong\n")
    for refused in (
        control(server, "drain", f"--admin-token-file={token}", "--timeout-s=1"),
        control(server, "drain", "--admin-token-file=-", stdin="wrong\n"),
    ):
        assert refused.returncode == 1
        assert "INVALID_ARG: admin_token: is not this server's" in refused.stderr
    missing = control(server, "drain", f"--admin-token-file={tmp_path / 'none'}")
    assert missing.returncode == 2
    assert "--admin-token-file" in missing.stderr


@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_token_is_read_from_a_file_or_stdin(monkeypatch, tmp_path, from_stdin):
    asked = []
    monkeypatch.setattr(Client, "control", lambda self, *args, **fields: asked.append((args, fields)))
    token = tmp_path / "token"
    token.write_text("let me\n")
    path = "-" if from_stdin else str(token)
    done = CliRunner().invoke(app, ["control", "drain", f"--admin-token-file={path}"], input="let me\n")
    assert (done.exit_code, asked) == (0, [(("drain", None), {"admin_token": "let me"})])


def test_who_asks_nowhere_is_told_what_to_do():
    with (
        Client("127.0.0.1:1") as nowhere,
        pytest.raises(Exception, match="no server answers at 127.0.0.1:1 .*kvloom s"),
    ):
        nowhere.control("ping")
