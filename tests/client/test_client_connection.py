"""Encryption, headers and compression of the clients, against the real server and what stands in front of it."""

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import trustme

from kvloom.launcher.launch import Server
from kvloom_client import (
    AccessDenied,
    Answer,
    AsyncClient,
    Client,
    ConnectionFailed,
    HttpClient,
    InvalidArgument,
    ServerError,
    Tls,
)
from support.bare_server import bare_server
from support.scripted_server import Scripted
from support.server import assert_idle
from support.tls_proxy import tls_proxy

ASKED = {"input_ids": [5, 6, 7], "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "timeout": 60}
TOKEN = "sesame"


class Certificates(NamedTuple):
    """Files, and what signed them."""

    authority: trustme.CA
    ca_file: Path
    certificate_file: Path
    key_file: Path

    @property
    def tls(self) -> Tls:
        return Tls(self.ca_file, self.certificate_file, self.key_file)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    files = Certificates(authority, folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    authority.cert_pem.write_to_path(files.ca_file)
    issued.private_key_pem.write_to_path(files.key_file)
    issued.cert_chain_pems[0].write_to_path(files.certificate_file)
    return files


@pytest.fixture(scope="module")
def encrypted(certificates, tmp_path_factory) -> Iterator[str]:
    """gRPC address of a server that encrypts, and asks for the client's certificate."""
    options = (
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={certificates.certificate_file}",
        f"--grpc-server-key={certificates.key_file}",
        f"--grpc-root-cert={certificates.ca_file}",
    )
    with bare_server(tmp_path_factory.mktemp("encrypted"), *options) as addresses:
        yield addresses[1]


def of_both_clients(url: str, **how: object) -> list[Answer]:
    async def ask() -> Answer:
        async with AsyncClient(url, **how) as client, client.conversation() as talk:
            return await talk.generate(**ASKED)

    with Client(url, **how) as client:
        return [client.generate(**ASKED), asyncio.run(ask())]


def test_grpc_encrypted_and_compressed(encrypted, certificates):
    plain = of_both_clients(encrypted, tls=certificates.tls)
    gzipped = of_both_clients(f"grpcs://{encrypted}", tls=certificates.tls, compression="gzip")
    deflated = of_both_clients(encrypted, tls=certificates.tls, compression="deflate", headers={"X-Who": "me"})
    texts = {answer.text for answer in (*plain, *gzipped, *deflated)}
    assert len(texts) == 1
    assert plain[0].num_output_tokens == 12


@pytest.mark.parametrize("who", ["nobody is trusted", "no certificate of its own", "plain"])
def test_grpc_that_is_not_encrypted_as_the_server_wants(encrypted, certificates, who):
    tls = {"nobody is trusted": True, "no certificate of its own": Tls(certificates.ca_file), "plain": False}[who]
    with Client(encrypted, tls=tls) as client, pytest.raises(ConnectionFailed) as refused:
        client.generate(**ASKED)
    assert ("give the CA that signed it" in str(refused.value)) == (who == "nobody is trusted")


def control_ping(*options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("kvloom")), "control", "ping", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_command_line(certificates, tmp_path):
    lines = tmp_path / "headers"
    lines.write_text(f"authorization: Bearer {TOKEN}\n\n")
    with Scripted(['{"op": "ping", "ok": true}']) as server:
        done = control_ping("--url", server.url, "--header", f"@{lines}", "--header", "X-Who: me")
        assert json.loads(done.stdout) == {"op": "ping", "ok": True}, done.stderr
        assert server.metadata[0]["authorization"] == f"Bearer {TOKEN}"
        assert server.metadata[0]["x-who"] == "me"
        done = control_ping("--url", f"grpcs://{server.url}", "--ca-file", str(certificates.ca_file))
        assert done.returncode == 1
        assert "no encrypted connection" in done.stderr


def test_every_call_carries_the_headers():
    with Scripted(["a"], ["b"], ['{"op": "status"}'], ["c"], ['{"op": "end"}']) as server:
        with Client(server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            client.generate(text_input="a")
            with client.conversation(7) as talk:
                talk.generate(text_input="b")
                talk.status()
                list(talk.stream(text_input="c"))
        assert [metadata["authorization"] for metadata in server.metadata] == [f"Bearer {TOKEN}"] * 5


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, AccessDenied),
        (grpc.StatusCode.PERMISSION_DENIED, AccessDenied),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError),
    ],
)
def test_who_is_not_let_in_is_told_so(status, kind):
    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.generate(text_input="a", retries=3)

    with Scripted(status, status) as server:
        with Client(server.url) as client, pytest.raises(kind, match="as the test says"):
            client.generate(text_input="a", retries=3)
        with pytest.raises(kind, match="as the test says"):
            asyncio.run(ask(server.url))


@pytest.fixture(scope="module")
def proxy(server: Server, certificates) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate_file, certificates.key_file)
    with tls_proxy(context, server.http_url.removeprefix("http://"), TOKEN) as address:
        yield address


def test_http_encrypted_behind_a_proxy(server, proxy, certificates):
    with HttpClient(server.http_url) as client:
        expected = client.generate(**ASKED)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    tls = Tls(certificates.ca_file)
    with HttpClient(f"https://{proxy}", tls=tls, headers=headers) as client:
        assert client.generate(**ASKED).text == expected.text
        assert "".join(chunk.text for chunk in client.stream(**ASKED)) == expected.text
        # leaving breaks the encrypted connection off, and the server's work with it
        with client.stream(**ASKED | {"max_tokens": 5000}) as stream:
            next(stream)
    assert_idle(server)
    with HttpClient(proxy, tls=tls) as client, pytest.raises(AccessDenied, match="HTTP 401"):
        client.generate(**ASKED)
    with HttpClient(proxy, tls=True) as client, pytest.raises(ConnectionFailed, match="give the CA that signed it"):
        client.generate(**ASKED)
    with HttpClient(server.http_url.removeprefix("http://"), tls=tls) as client:
        with pytest.raises(ConnectionFailed, match="check that it uses TLS"):
            client.generate(**ASKED)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Client("ftp://127.0.0.1:1"), "url: ftp://"),
        (lambda: Client("http://127.0.0.1:1", tls=True), "tls: the URL says http://"),
        (lambda: Client("127.0.0.1:1/triton"), "url: gRPC takes host:port"),
        (lambda: Client("127.0.0.1:1", headers={"two words": "x"}), "headers: 'two words'"),
        (lambda: Client("127.0.0.1:1", headers={"grpc-timeout": "1"}), "headers: 'grpc-timeout'"),
        (lambda: HttpClient("127.0.0.1:1", headers={"x": "a\r\nb: c"}), "headers: the value of x"),
        (lambda: Client("127.0.0.1:1", compression="zstd"), "compression: 'zstd'"),
        (lambda: Client("127.0.0.1:1", tls=Tls("nowhere.pem")), "tls: ca_file: nowhere.pem"),
        (lambda: HttpClient("127.0.0.1:1", tls=Tls("nowhere.pem")), "tls: nowhere.pem"),
        (lambda: HttpClient("127.0.0.1:1", tls=Tls(__file__)), "tls: .*test_client_connection.py"),
        (lambda: Tls(certificate_file="a.pem"), "tls: give certificate_file and key_file together"),
    ],
)
def test_what_can_not_be_used_is_refused_at_once(make, named):
    with pytest.raises(InvalidArgument, match=f"^INVALID_ARG: {named}"):
        make()
