"""The READMEs say what is so: their commands run, their tables are the code's, their links lead somewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvloom.config import Settings
from kvloom.launcher import cli
from kvloom.launcher.launch import Server
from kvloom.launcher.repository import parse_assignments
from kvloom_client import Client, InvalidArgument, errors
from support.launched import KVLOOM, Launched
from support.readmes import BLOCKS, ROOT, TEXTS, Block, anchors, commands, links, names, table
from support.server import SETTINGS, assert_idle, canary
from support.tiny_server import Tiny
from test_imports import MAY_IMPORT

RUN_HERE = (
    '.venv/bin/kvloom generate "Why is the sky blue?"',
    ".venv/bin/kvloom chat",
    ".venv/bin/kvloom control ping",
    ".venv/bin/kvloom control status ada",
    ".venv/bin/kvloom control flush",
    "curl -s 127.0.0.1:8002/metrics",
)
"""Commands that ``test_command`` runs."""

DRAIN = "tests/test_readme.py::test_an_admin_token_drains"
SERVE = "tests/docker/test_deployment.py::test_as_first_process_with_64_mib_of_shared_memory_until_sigterm"
REHEARSED = "docker/rehearse.py::build"
IMAGES = "tests/docker/test_deployment.py::test_images_and_compose_call_serve_as_it_is"
LOCUST = "tests/load/test_load.py::test_h38_grpc_times_are_of_tokens_and_failed_answers_are_in_no_figure"
BENCH = "tests/load/test_bench.py::test_quick_benchmark_of_kvloom_with_an_absent_peer"
LOAD = "tests/load/test_load_runs.py::test_every_user_in_every_scenario"

COVERED_BY = {
    "make demo": "tests/test_readme.py::test_make_demo",
    "make test": ".ci/run::make test",
    "make serve": SERVE,
    ".venv/bin/kvloom serve --model /models/my-llama": SERVE,
    ".venv/bin/kvloom serve --set weights=fp32 --set kv_memory=2GiB --set max_running=32": SERVE,
    ".venv/bin/kvloom plan --set weights=bf16 --set kv_memory=2GiB": (
        "tests/planning/test_plan.py::test_the_table_in_the_readme_is_the_real_one"
    ),
    "pip install ./client": REHEARSED,
    "python3 -m pip wheel --no-deps --wheel-dir build/wheels ./client .": REHEARSED,
    "python3 -m venv /opt/kvloom": REHEARSED,
    "/opt/kvloom/bin/pip install -c .ci/constraints.txt build/wheels/*.whl nvidia-pytriton": REHEARSED,
    "/opt/kvloom/bin/kvloom serve --model /models/my-llama": REHEARSED,
    "docker build -f docker/Dockerfile --target cpu -t kvloom:cpu .": REHEARSED,
    "docker run --init -p 127.0.0.1:8000-8003:8000-8003 -v kvloom-cache:/cache -v /models:/models:ro kvloom:cpu "
    "kvloom serve --host=0.0.0.0 --model=/models/my-llama": IMAGES,
    "docker run --gpus=all -p 127.0.0.1:8000-8003:8000-8003 -v kvloom-cache:/cache kvloom:gpu": IMAGES,
    "docker compose -f docker/compose.yaml up --build": IMAGES,
    "KVLOOM_MODELS=/models KVLOOM_MODEL=/models/my-llama docker compose -f docker/compose.yaml up": IMAGES,
    "tritonserver --model-repository=model_repository --model-control-mode=none "
    "--http-restricted-api=shared-memory,model-repository,trace,logging:switched:off=- "
    "--grpc-restricted-protocol=shared-memory,model-repository,trace,logging:switched:off=- "
    "--grpc-http2-max-ping-strikes=0 --grpc-header-forward-pattern=triton_grpc_error": (
        "tests/support/bare_server.py::bare_server"
    ),
    "curl -s -o /dev/null -w '%{http_code}' 127.0.0.1:8003/health/ready": DRAIN,
    "head -c 24 /dev/urandom | base64 > admin-token": DRAIN,
    ".venv/bin/kvloom serve --set admin_token=sha256:$(tr -d '\\n' < admin-token | sha256sum | cut -d ' ' -f 1)": DRAIN,
    ".venv/bin/kvloom control drain --admin-token-file=admin-token --timeout-s=20": DRAIN,
    "make load": LOAD,
    ".venv/bin/python load/run.py run --scenario burst --user SseUser --users 8 --seconds 60": LOAD,
    ".venv/bin/python load/run.py run --users 1,2,4,8,16,32,64 --seconds 15 --name smollm2 --folder load/results": LOAD,
    ".venv/bin/python load/run.py compare max_running": "tests/load/test_load_runs.py::test_every_comparison",
    ".venv/bin/locust -f load/locustfile.py GrpcUser --host 127.0.0.1:8001 --web-host 127.0.0.1": LOCUST,
    ".venv/bin/locust -f load/locustfile.py GrpcUser --host 127.0.0.1:8001 --headless --users 4 --run-time 20s": LOCUST,
    ".venv/bin/locust -f load/locustfile.py SseUser --host http://127.0.0.1:8000 --headless --users 4 --run-time 20s": (
        "tests/load/test_load.py::test_h38_http_times_are_of_tokens"
    ),
    "make bench-peers": "tests/load/test_bench.py::test_peers_keep_the_precision_and_the_version_that_are_said",
    "make bench": BENCH,
    ".venv/bin/python load/benchmark.py run --only kvloom --only vllm --resume": BENCH,
    ".venv/bin/python load/benchmark.py run --quick --rounds 1 --name quick": BENCH,
    ".venv/bin/python load/benchmark.py profile": "tests/load/test_bench.py::test_a_step_is_profiled",
    ".venv/bin/python load/benchmark.py figures": (
        "tests/load/test_bench_results.py::test_the_figures_are_those_of_the_results"
    ),
    ".venv/bin/python load/bench/weights_quality.py --tokens 2048 --report build/reports/weights.json": (
        "tests/models/test_served_weights.py::test_quality_of_the_default_model"
    ),
    "make kernel-audit": "tests/load/test_kernel_audit.py::test_every_kernel_at_every_shape_on_every_target",
    "make gpu-check": "tests/load/test_gpu_check.py::test_without_a_gpu_it_says_so",
    ".venv/bin/python load/gpu_check.py --dry": "tests/load/test_gpu_check.py::test_a_dry_run_finds_everything_right",
}
"""Commands that run elsewhere, as they are or on a smaller model: which file, and what in it."""

SHOWN = {
    "The capital city of France is": r" Paris\.",
    "client.generate(text_input=": r" length( 8)?$",
    "generate_stream": r'^data: \{.*"text_output"',
    "talk.status()": r"^\d+ \d+ \{.*'busy': False",
    'control("ping")': r"'op': 'ping', 'ok': True",
}
"""What a block with these words prints, as a pattern; every other one prints an answer."""

CODE = [block for block in BLOCKS if block.language in ("python", "bash")]


def addressed(text: str, server: Server) -> str:
    """With the server's addresses in the place of the default ones."""
    addresses = (server.http_url, server.grpc_url, server.metrics_url.removesuffix("/metrics"))
    for port, address in zip((8000, 8001, 8002), addresses, strict=True):
        text = text.replace(f"127.0.0.1:{port}", address.removeprefix("http://"))
    return text


def run(*command: str, **options: object) -> str:
    """What a command prints; fails where it does."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# what runs


def test_every_block_says_what_it_is():
    assert {block.language for block in BLOCKS} <= {"python", "bash", "console", "mermaid"}
    assert CODE
    assert all(block.commands for block in BLOCKS if block.language == "console")


@pytest.mark.parametrize("block", CODE, ids=str)
def test_code(server: Server, block: Block):
    assert "127.0.0.1:800" in block.text, "code of a README asks a server at its default address"
    interpreter = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euc"]
    printed = run(*interpreter, addressed(block.text, server))
    assert len(printed.split()) >= 3, printed
    for words, pattern in SHOWN.items():
        if words in block.text:
            assert re.search(pattern, printed, re.MULTILINE), printed
    canary(server)
    assert_idle(server)


def test_a_stream_over_http_stops_at_a_stop_string(server: Server):
    [block] = [block for block in CODE if "generate_stream" in block.text]
    printed = run("bash", "-euc", addressed(block.text, server))
    events = [json.loads(line.removeprefix("data: ")) for line in printed.splitlines() if line]
    assert len(events) > 1
    text = "".join(event["text_output"] for event in events)
    assert text
    assert "\n\n" not in text


def test_every_command_is_covered():
    """A new command in a README: run it in a test, and say here in which."""
    here = {command for _, command in commands()}
    assert here == {*RUN_HERE, *COVERED_BY}


@pytest.mark.parametrize("place", sorted(set(COVERED_BY.values())))
def test_what_covers_a_command_exists(place: str):
    path, words = place.split("::")
    assert re.search(rf"\b{re.escape(words)}\b", (ROOT / path).read_text())


@pytest.mark.parametrize("command", RUN_HERE)
def test_command(server: Server, command: str):
    command = addressed(command, server).replace(".venv/bin/kvloom", KVLOOM)
    if command.startswith(KVLOOM):
        command += f" --url {server.grpc_url}"
    with Client(server.grpc_url) as client, client.conversation("ada") as talk:
        talk.generate(text_input="Hello", max_tokens=2)
        printed = run("bash", "-euc", command, input="Name three colours.\n")
    assert printed.strip()
    if " control " in command:
        assert json.loads(printed)["ok"]
    canary(server)
    assert_idle(server)


@pytest.mark.slow
def test_make_demo():
    [recipe] = re.findall(r"^demo: setup\n\t\$\(BIN\)/kvloom (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "Paris" in run(KVLOOM, *shlex.split(recipe), "--set=threads=1", "--set=kv_memory=64MiB")


@pytest.mark.slow
def test_an_admin_token_drains(tiny: Tiny, tmp_path: Path):
    [block] = [block for block in BLOCKS if any("admin-token-file" in command for command in block.commands)]
    make_token, serve, drain = block.commands
    [health] = [command for _, command in commands() if "/health/ready" in command]
    shown = block.text.splitlines()[-1]
    run("bash", "-euc", make_token, cwd=tmp_path)
    settings = SETTINGS | {"model": str(tiny.folder)}
    options = [f"--set={key}={value}" for key, value in settings.items()]
    options += [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "health")]
    command = f"exec {serve.replace('.venv/bin/kvloom', KVLOOM)} {' '.join(options)}"
    process = subprocess.Popen(
        ["bash", "-euc", command], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        launched = Launched(process)
        ask_health = health.replace("127.0.0.1:8003", f"127.0.0.1:{launched.health}")
        assert run("bash", "-euc", ask_health) == "200"
        drain = f"{drain.replace('.venv/bin/kvloom', KVLOOM)} --url {launched.url}"
        assert run("bash", "-euc", drain, cwd=tmp_path).strip() == shown
        launched.wait_until_health_is(503, within=60)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


# what is said of options, targets and files


CALLS_KVLOOM = re.compile(r"(?:^|[/ ])kvloom (?=serve|plan|generate|chat|control)")
KVLOOM_COMMANDS = [command for _, command in commands() if CALLS_KVLOOM.search(command) and "$(" not in command]


@pytest.mark.parametrize("command", KVLOOM_COMMANDS)
def test_options_of_kvloom(command: str):
    name, *arguments = shlex.split(CALLS_KVLOOM.split(command)[1].replace("=admin-token", f"={os.devnull}"))
    parsed = typer.main.get_command(cli.app).commands[name].make_context(name, arguments)
    Settings.parse(parse_assignments(parsed.params.get("assignments") or []))


LOAD_COMMANDS = [shlex.split(command) for _, command in commands() if " load/" in command]


def program(words: list[str]) -> tuple[str, ...]:
    """A program of load/ and its subcommand; Locust with its file."""
    return tuple(words[: 3 if words[2:3] and not words[2].startswith("-") else 2])


@pytest.mark.parametrize("words", sorted({program(words) for words in LOAD_COMMANDS}))
def test_options_of_load(words: tuple[str, ...]):
    given = {word for command in LOAD_COMMANDS if program(command) == words for word in command}
    known = run(*(word.replace(".venv/bin", str(Path(sys.executable).parent)) for word in words), "--help", cwd=ROOT)
    assert not {word for word in given if word.startswith("--") and word not in known}


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = {name for text in TEXTS.values() for name in re.findall(r"(?:\$ |`)make ([\w-]+)", text)}
    assert said
    assert said <= targets


def test_files_of_docker_exist():
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    docker = [shlex.split(command) for _, command in commands() if "docker " in command]
    assert docker
    for words in docker:
        for option, value in zip(words, words[1:], strict=False):
            if option == "-f":
                assert (ROOT / value).is_file()
            elif option == "--target":
                assert re.search(rf"^FROM .* AS {value}$", dockerfile, re.MULTILINE)


@pytest.mark.parametrize("readme, target", sorted(set(links())))
def test_links_lead_somewhere(readme: str, target: str):
    path, _, anchor = target.partition("#")
    file = (ROOT / readme).parent / path if path else ROOT / readme
    assert file.exists()
    if anchor:
        assert anchor in anchors(file)


def test_the_top_one_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 150


# tables


def first_names(rows: list[list[str]]) -> list[str]:
    return [name for row in rows for name in names(row[0])]


def test_settings_of_other_engines_are_compared_with_those_there_are():
    rows = table("kvloom", "vLLM", "TensorRT-LLM, LLM API")
    assert rows
    assert set(first_names(rows)) <= set(Settings.names())


def test_every_error_of_the_client_is_described():
    described = set(first_names(table("error", "means")))
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert described == classes


def test_the_departments_are_those_of_the_import_test():
    rows = {names(name)[0]: names(others) for name, _, others in table("department", "what it does", "may import")}
    assert rows == {name: others.split() for name, others in MAY_IMPORT.items()}


def test_the_figures_at_the_top_are_those_of_the_benchmark():
    [header] = re.findall(r"^\| \| (kvloom bf16 gRPC) \| (vLLM bf16) \|$", TEXTS["README.md"], re.MULTILINE)
    shown = re.findall(r"^\| (\d+) streams?, tokens/s \| ([\d.]+) \| ([\d.]+) \|$", TEXTS["README.md"], re.MULTILINE)
    assert len(shown) >= 4
    rows = json.loads((ROOT / "load" / "results" / "bench.json").read_text())["rows"]
    measured = {(row["engine"], row["size"]): row["value"] for row in rows if row["case"] == "total" and "value" in row}
    for streams, *values in shown:
        for engine, value in zip(header, values, strict=True):
            assert float(f"{measured[engine, int(streams)]:.3g}") == float(value)


def test_the_error_in_the_readme_is_the_real_one(client: Client):
    [text] = [found for text in TEXTS.values() for found in re.findall(r"`(INVALID_ARG: temperature: [^`]+)`", text)]
    with pytest.raises(InvalidArgument) as caught:
        client.generate(text_input="Hello", temperature=-1.0)
    assert str(caught.value) == text
