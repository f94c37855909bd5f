"""The ``kvloom`` command. Each command imports its modules itself, so that ``--help`` is fast."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from kvloom.errors import KvloomError, LaunchError
from kvloom.launcher import access
from kvloom.launcher.cli_options import (
    Assignments,
    Binary,
    CaFile,
    DescribesSettings,
    Header,
    ListsSettings,
    LogFile,
    MaxTokens,
    Model,
    Repository,
    Seed,
    Serve,
    Stop,
    Temperature,
    TopK,
    TopP,
    Url,
    Verbose,
)
from kvloom.launcher.interrupts import Interrupts
from kvloom.launcher.ports import HOST, Ports

if TYPE_CHECKING:
    from kvloom.launcher.repository import ModelRepository
    from kvloom_client import Client

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help breaks lines badly and shows flags as if they took a value
    context_settings={"max_content_width": 100},
)

Op = Literal["ping", "status", "cancel", "end", "flush", "drain"]
ABOUT_A_CONVERSATION: tuple[Op, ...] = ("status", "cancel", "end")

URL = "127.0.0.1:8001"
ENDPOINTS = ("http", "grpc", "metrics", "health")


@app.callback()
def kvloom() -> None:
    """Serve large language models inside NVIDIA Triton Inference Server."""


@app.command(cls=DescribesSettings)
def serve(
    model: Model = None,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="For all ports: 0 takes any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535)] = 8002,
    health_port: Annotated[int, typer.Option(min=0, max=65535, help="GET /health/ready: 200 or 503.")] = 8003,
    host: Annotated[
        str, typer.Option(help="Address of all four ports. There is no access control.", metavar="ADDRESS")
    ] = HOST,
    assignments: Assignments = None,
    binary: Binary = None,
    model_repository: Repository = None,
    log_file: LogFile = None,
    exit_timeout: Annotated[int, typer.Option(min=0, help="Seconds that running answers get when it stops.")] = 30,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Let clients register regions of /dev/shm: see docker/README.md.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Start tritonserver, and restart it whenever it fails, until Ctrl-C or SIGTERM."""
    from kvloom.launcher.supervisor import Supervisor

    ports = Ports(http_port, grpc_port, metrics_port, health_port, host)
    with Interrupts() as interrupts:
        try:
            with interrupts.raising():
                repository = _repository(model, assignments, model_repository)
            supervisor = Supervisor(
                repository,
                ports=ports,
                stop=interrupts.event,
                binary=binary,
                log_file=log_file,
                exit_timeout_s=exit_timeout,
                shared_memory=shared_memory,
                verbose=verbose,
            )
            with supervisor:
                for warning in access.warnings(shared_memory, os.geteuid()):
                    print(f"kvloom: warning: {warning}", file=sys.stderr)
                addresses = (f"{name}={supervisor.ports.address(name)}" for name in ENDPOINTS)
                print("kvloom ready", *addresses, flush=True)
                supervisor.watch()
                print(f"kvloom: stopping; running answers get up to {exit_timeout} s", file=sys.stderr)
        except KeyboardInterrupt:
            raise typer.Exit(128 + (interrupts.signum or 0)) from None


@app.command(cls=ListsSettings)
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Sent as a chat message of the user.")],
    url: Url = URL,
    ca_file: CaFile = None,
    header: Header = None,
    serve: Serve = False,
    raw: Annotated[bool, typer.Option("--raw", help="Send PROMPT without applying the chat template.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    model: Model = None,
    assignments: Assignments = None,
    binary: Binary = None,
    model_repository: Repository = None,
    verbose: Verbose = False,
) -> None:
    """Stream one answer to the terminal and print its speed on stderr. Ctrl-C cancels it.

    --model, --set, --tritonserver, --model-repository and --verbose are for --serve.
    """
    from kvloom.launcher.terminal import print_answer

    request: dict[str, Any] = {"text_input": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    request["sampling_parameters"] = _given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    with _talking() as interrupts:
        started = (serve, model, assignments, model_repository, binary, verbose)
        with _client(interrupts, url, ca_file, header, *started) as client:
            print_answer(lambda: client.stream(**request), [], interrupts)
        if interrupts.event.is_set():
            raise KeyboardInterrupt


@app.command(cls=ListsSettings)
def chat(
    url: Url = URL,
    ca_file: CaFile = None,
    header: Header = None,
    serve: Serve = False,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.", metavar="TEXT")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    model: Model = None,
    assignments: Assignments = None,
    binary: Binary = None,
    model_repository: Repository = None,
    verbose: Verbose = False,
) -> None:
    """Chat with the model. Ctrl-C interrupts an answer; at the prompt Ctrl-C or Ctrl-D exits. /help lists commands.

    --model, --set, --tritonserver, --model-repository and --verbose are for --serve.
    """
    from kvloom.launcher.terminal import ChatSession

    sampling = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop)
    with _talking() as interrupts:
        started = (serve, model, assignments, model_repository, binary, verbose)
        with _client(interrupts, url, ca_file, header, *started) as client:
            ChatSession(client, sampling, interrupts, system).run()


@app.command()
def control(
    op: Annotated[Op, typer.Argument(metavar="OP", help="ping, status, cancel, end, flush or drain.")],
    conversation: Annotated[
        str | None, typer.Argument(metavar="ID", help="The conversation's id, for status, cancel and end.")
    ] = None,
    text_id: Annotated[bool, typer.Option("--text-id", help="ID is a string even if it is all digits.")] = False,
    admin_token_file: Annotated[
        typer.FileText | None,
        typer.Option(help="A file with the server's admin_token, for drain; - is stdin.", metavar="PATH"),
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds that running answers get, for drain. Default: no limit.")
    ] = None,
    url: Url = URL,
    ca_file: CaFile = None,
    header: Header = None,
) -> None:
    """Control a running server, and print its reply as JSON.

    ping: check that the engine works. status: show what a conversation holds. cancel: end its running answer. end: end
    the conversation. flush: drop the prefix cache. drain: finish running answers and refuse new requests.
    """
    if conversation is not None and op not in ABOUT_A_CONVERSATION:
        raise typer.BadParameter(f"{op} takes no conversation", param_hint="ID")
    import json

    # The token itself is no option, because every user of the machine can see the arguments of a process
    token = admin_token_file.read().strip() if admin_token_file is not None else None
    given = _given(admin_token=token, timeout_s=timeout_s)
    number = conversation is not None and conversation.isdecimal() and not text_id
    with _talking() as interrupts, _connect(url, ca_file, header) as client, interrupts.raising():
        print(json.dumps(client.control(op, int(conversation or 0) if number else conversation, **given)))


@app.command(cls=ListsSettings)
def plan(
    model: Model = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of the sequences to count, in tokens. May be repeated.")
    ] = None,
    assignments: Assignments = None,
    model_repository: Repository = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with sizes in bytes.")] = False,
) -> None:
    """Show how a server would use the free memory: weights, cache, and how many sequences fit."""
    import torch
    from rich.console import Console

    from kvloom.models.weights import open_model
    from kvloom.planning.placement import free_on, with_device
    from kvloom.planning.report import report

    settings = with_device(_repository(model, assignments, model_repository).settings)
    files = open_model(Path(settings.model))
    free = free_on(torch.device(settings.device))
    result = report(settings.model, files.spec, settings, free.device, tuple(length or ()), free.host)
    if json:
        Console().print_json(data=result.values())
    else:
        result.print(Console())


def main() -> None:
    """Run the command. kvloom's own errors become a message and exit code 1."""
    try:
        app()
    except KvloomError as error:
        _fail(error)


def _repository(model: str | None, assignments: list[str] | None, source: Path | None) -> "ModelRepository":
    from kvloom.launcher.repository import SOURCE, ModelRepository
    from kvloom.launcher.starting import shown

    with shown():
        return ModelRepository(_chosen(model, assignments), source or SOURCE)


def _connect(url: str, ca_file: Path | None, header: list[str] | None) -> "Client":
    from kvloom_client import Client, Tls
    from kvloom_client.connection import parse_headers

    lines = []
    for given in header or []:
        try:
            lines += Path(given[1:]).read_text().splitlines() if given.startswith("@") else [given]
        except OSError as error:
            raise LaunchError(f"--header: {given[1:]}: {error.strerror}") from error
    tls = Tls(ca_file=ca_file) if ca_file is not None else False
    return Client(url, tls=tls, headers=parse_headers(line for line in lines if line.strip()))


@contextmanager
def _client(
    interrupts: Interrupts,
    url: str,
    ca_file: Path | None,
    header: list[str] | None,
    serve: bool,
    model: str | None,
    assignments: list[str] | None,
    source: Path | None,
    binary: Path | None,
    verbose: bool,
) -> "Iterator[Client]":
    """A client of the server at ``url``, or with ``serve`` of a server that is started and then stopped again."""
    if not serve:
        if model or assignments or source or binary or verbose:
            raise LaunchError(
                "--model, --set, --tritonserver, --model-repository and --verbose need --serve: they can't change the "
                f"running server at {url}"
            )
        with _connect(url, ca_file, header) as client:
            yield client
        return
    if ca_file or header:
        raise LaunchError("--ca-file and --header are for a server at --url; leave them out with --serve")
    from kvloom.launcher.launch import Server
    from kvloom.launcher.starting import shown

    with interrupts.raising():
        repository = _repository(model, assignments, source)
    with shown(plain=verbose):
        server = Server.start(repository, stop=interrupts.event, binary=binary, verbose=verbose)
    with server, _connect(server.grpc_url, None, None) as client:
        yield client


@contextmanager
def _talking() -> Iterator[Interrupts]:
    """Handle signals for a command that uses a client. The client's errors become a message and exit code 1."""
    from kvloom_client import KvloomClientError

    with Interrupts() as interrupts:
        try:
            yield interrupts
        except KvloomClientError as error:
            _fail(error)
        except KeyboardInterrupt:
            raise typer.Exit(128 + (interrupts.signum or 0)) from None


def _chosen(model: str | None, assignments: list[str] | None) -> dict[str, str]:
    """The settings from the command line."""
    from kvloom.launcher.repository import parse_assignments

    return parse_assignments(assignments or []) | ({"model": model} if model is not None else {})


def _given(**keys: Any) -> dict[str, Any]:
    """The keys that are not None. The server has defaults for the others."""
    return {key: value for key, value in keys.items() if value is not None}


def _fail(error: Exception) -> NoReturn:
    print(f"kvloom: {error}", file=sys.stderr)
    raise SystemExit(1)
