"""What docker/ promises, as far as a machine without Docker shows it (H36 of the faults that users reported)."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml

from kvloom.errors import LaunchError
from kvloom.launcher import cli, launch, processes
from kvloom.launcher.health import HealthEndpoint
from kvloom.launcher.launch import Server
from kvloom.launcher.ports import Ports
from kvloom.launcher.repository import ModelRepository
from kvloom.serving.metric_families import FAMILIES
from kvloom_client import Client, HttpClient
from support.bare_server import bare_server
from support.in_small_memory import use
from support.launched import KVLOOM, serve
from support.server import SETTINGS
from support.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "kvloom.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def commands(instruction: str) -> list[list[str]]:
    """The exec forms of an instruction in the Dockerfile, one for each image."""
    found = re.findall(rf"^{instruction}\b.*?(\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert len(found) == 2
    return [json.loads(command) for command in found]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1024)


# the files


def test_the_wheel_carries_the_whole_model_repository():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = {(folder, name) for folder, names in project["tool"]["setuptools"]["data-files"].items() for name in names}
    files = [path.relative_to(ROOT) for path in (ROOT / "model_repository").rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    assert listed == {(f"share/kvloom/{path.parent}", str(path)) for path in files}


def test_only_the_image_without_a_tritonserver_installs_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if "pytriton" in line]
    assert ["pytriton" in line for line in project["optional-dependencies"]["tritonserver"]] == [True]
    cpu, gpu = re.findall(r"^FROM \S+ AS (?:cpu|gpu)$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert "[tritonserver]" in cpu
    assert "[tritonserver]" not in gpu


def test_images_and_compose_call_serve_as_it_is():
    serve = typer.main.get_command(cli.app).commands["serve"]
    [compose] = [COMPOSE["services"]["kvloom"]["command"]]
    for program, command, *arguments in [*commands("CMD"), compose]:
        assert (program, command) == ("kvloom", "serve")
        parsed = serve.make_context(
            "serve", [argument.replace("${KVLOOM_MODEL:-default}", "m") for argument in arguments]
        )
        assert parsed.params["host"] == "0.0.0.0"
        ports = [parsed.params[f"{name}_port"] for name in ("http", "grpc", "metrics", "health")]
        assert COMPOSE["services"]["kvloom"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]
        assert f"EXPOSE {' '.join(map(str, ports))}" in DOCKERFILE
        grace = int(COMPOSE["services"]["kvloom"]["stop_grace_period"].removesuffix("s"))
        assert grace >= parsed.params["exit_timeout"] + 2 * processes.KILL_GRACE_S
        scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
        assert scraped == [{"targets": [f"kvloom:{parsed.params['metrics_port']}"]}]


def test_what_compose_mounts_is_there_and_nothing_is_published_beyond_this_machine():
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists()
            else:
                assert source in COMPOSE["volumes"] or source == "${KVLOOM_MODELS"


def test_the_images_health_check_tells_a_ready_server():
    ports = Ports().resolved()
    ready = HealthEndpoint(ports.host, ports.health, lambda: True)
    other = HealthEndpoint(ports.host, ports.http, lambda: False)
    for python, *arguments in commands("HEALTHCHECK"):
        assert python == "python3"
        for port, expected in ((ports.health, 0), (ports.http, 1), (1, 1)):
            check = [argument.replace(":8003/", f":{port}/") for argument in arguments]
            assert (
                subprocess.run([sys.executable, *check], stderr=subprocess.DEVNULL, check=False).returncode == expected
            )
    ready.close()
    other.close()


def test_the_dashboard_shows_every_metric_there_is_and_no_other():
    kinds = {own.name: own.kind for own in FAMILIES}
    shown = {name for _, query in QUERIES for name in re.findall(r"kvloom_\w+", query)}
    histograms = {
        f"{name}_{part}" for name, kind in kinds.items() if kind == "histogram" for part in ("bucket", "sum", "count")
    }
    assert shown <= kinds.keys() | histograms
    assert {re.sub("_(bucket|sum|count)$", "", name) if name in histograms else name for name in shown} == kinds.keys()
    for title, query in QUERIES:
        labels = {own.label for own in FAMILIES if own.name in query}
        if not labels:
            continue  # one of Triton's or Prometheus' own
        used = re.findall(r"(\w+)\s*(?:=~?|!=|!~)\s*\"", query)
        used += [label for group in re.findall(r"\bby\s*\(([^)]*)\)", query) for label in re.split(r",\s*", group)]
        assert set(used) <= labels | {"le"}, (title, query)


def test_the_dashboard_asks_the_data_source_that_is_provisioned():
    provisioning = DOCKER / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    asked = {part["datasource"]["uid"] for panel in PANELS for part in (panel, *panel["targets"])}
    assert asked == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "kvloom.yaml").read_text())["providers"]
    mounts = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


# addresses, signals and shared memory as in a container


def isolated(*command: str, namespaces: tuple[str, ...], **options: Any) -> "subprocess.Popen[str]":
    """Start a command in namespaces of its own; skips the test where the system does not permit that."""
    unshare = ["unshare", *namespaces]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(unshare)} is not permitted here")
    return subprocess.Popen([*unshare, *command], stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_as_first_process_with_64_mib_of_shared_memory_until_sigterm(tiny):
    arguments = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    arguments += [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "health")]
    small = 'mount -t tmpfs -o size=64m shm /dev/shm && exec "$@"'
    serving = isolated(
        *["sh", "-c", small, "sh", KVLOOM, "serve", "--host=127.0.0.2", f"--model={tiny}", "--exit-timeout=5"],
        *arguments,
        namespaces=("--pid", "--fork", "--mount-proc", "--kill-child"),
    )
    try:
        ready = re.fullmatch(
            r"kvloom ready http=127\.0\.0\.2:(\d+) grpc=127\.0\.0\.2:(\d+) metrics=\S+ health=127\.0\.0\.2:(\d+)\n",
            serving.stdout.readline(),
        )
        assert ready
        use(f"127.0.0.2:{ready[2]}", f"http://127.0.0.2:{ready[1]}")
        listening = {
            c.laddr.ip.removeprefix("::ffff:")  # as gRPC's socket, which is of both kinds, has it
            for c in psutil.net_connections("tcp")
            if c.status == "LISTEN" and str(c.laddr.port) in ready.groups()
        }
        assert listening == {"127.0.0.2"}
        [first] = psutil.Process(serving.pid).children()
        processes = first.children(recursive=True)
        assert len(processes) >= 3  # tritonserver and two stubs
        first.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 0
        assert not any(process.is_running() for process in processes)
    finally:
        serving.kill()
        serving.communicate()


@pytest.mark.slow
def test_tritonserver_serves_the_repository_without_the_launcher(tmp_path):
    with bare_server(tmp_path) as (http_url, grpc_url), Client(grpc_url) as client, HttpClient(http_url) as http:
        for endpoint in (client, http):
            assert endpoint.generate(input_ids=[5], max_tokens=3, ignore_eos=True).num_output_tokens == 3


def test_a_host_that_is_not_this_machines_is_refused():
    for host in ("localhost", "192.0.2.1", "2001:db8::1", "[::1]"):
        with pytest.raises(LaunchError, match=f"host '{re.escape(host)}': not an IPv4 or IPv6 address of this machine"):
            Ports(host=host).resolved()
    ports = Ports(1, 2, 3, 4, host="0.0.0.0")
    assert (ports.address("grpc"), ports.own_address("grpc")) == ("0.0.0.0:2", "127.0.0.1:2")
    ports = Ports(1, 2, 3, 4, host="::")
    assert (ports.address("grpc"), ports.own_address("grpc")) == ("[::]:2", "[::1]:2")


@pytest.mark.slow
@pytest.mark.parametrize("host", ["::1", "::"])
def test_k18_a_server_listens_on_ipv6(tmp_path, host):
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    serving = serve("--host", host, settings=SETTINGS | {"model": str(make_tiny(tmp_path / "model"))})
    try:
        assert serving.stdout is not None
        ready = serving.stdout.readline()
        shown = dict(re.findall(r"(\w+)=(\[[:1]+\]:\d+)", ready))
        assert shown.keys() == {"http", "grpc", "metrics", "health"}, ready
        assert all(address.startswith(f"[{host}]:") for address in shown.values())
        own = {name: address.replace("[::]", "[::1]") for name, address in shown.items()}
        with Client(own["grpc"]) as client, HttpClient(own["http"]) as http:
            for endpoint in (client, http):
                assert endpoint.generate(input_ids=[5], max_tokens=3, ignore_eos=True).num_output_tokens == 3
        for url in (f"http://{own['health']}/health/ready", f"http://{own['metrics']}/metrics"):
            with urllib.request.urlopen(url, timeout=30) as response:
                assert response.status == 200
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
    finally:
        serving.kill()
        serving.communicate()


def test_too_little_shared_memory_is_said_at_start(tmp_path, monkeypatch):
    launch.check_shared_memory(launch.SHARED_MEMORY)
    with pytest.raises(LaunchError, match="nowhere: No such file or directory"):
        launch.check_shared_memory(tmp_path / "nowhere")
    usage = shutil.disk_usage(tmp_path)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LaunchError, match=r"/dev/shm has 3.0 MiB free, .* needs 16 MiB: .*--shm-size=256m"):
        Server.start(ModelRepository(SETTINGS))


@pytest.mark.full
def test_64_mib_of_shared_memory_are_enough_again_and_again(tiny):
    def in_small_memory(size: str, rounds: int) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "support.in_small_memory", size, str(tiny), str(rounds)]
        options = {"stderr": subprocess.PIPE, "cwd": ROOT / "tests"}
        running = isolated(*command, namespaces=("--mount",), **options)
        output, errors = running.communicate(timeout=300)
        return running.returncode, output, errors

    assert in_small_memory("64m", 5) == (0, "fine\n", "")
    code, _, errors = in_small_memory("8m", 1)
    assert code == 1
    assert "LaunchError: shared memory: /dev/shm has 8.0 MiB free" in errors


@pytest.mark.slow
def test_a_full_shared_memory_ends_requests_and_no_server_for_long(tiny):
    command = [sys.executable, "-m", "support.in_full_memory", str(tiny), "8"]
    running = isolated(*command, namespaces=("--mount",), stderr=subprocess.PIPE, cwd=ROOT / "tests")
    output, errors = running.communicate(timeout=400)
    assert running.returncode == 0, errors
    print(output)
    assert "'ServerError'" in output and "'answer'" in output


# the dashboard's queries, answered by a real Prometheus


def ask(url: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=10) as response:
        return json.load(response)["data"]["result"]


def wait_for(done: Callable[[], bool], within: float) -> None:
    deadline = time.monotonic() + within
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def traffic(server: Server, seconds: float) -> None:
    """Answers of every kind, some with a shared beginning, for so long; errors too."""
    end = time.monotonic() + seconds
    with Client(server.grpc_url) as client:
        while time.monotonic() < end:
            client.generate(input_ids=list(range(5, 105)), max_tokens=20, ignore_eos=True)
            with pytest.raises(Exception, match="test_fail_after_tokens|INTERNAL"):
                client.generate(input_ids=[5], max_tokens=20, ignore_eos=True, request_id="test-fail")
            time.sleep(0.2)


@pytest.mark.full
def test_prometheus_answers_every_query_of_the_dashboard(tiny, tmp_path):
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    assert prometheus and promtool, "this test needs Prometheus on PATH (Debian and Ubuntu: apt install prometheus)"
    subprocess.run([promtool, "check", "config", DOCKER / "prometheus.yml"], check=True)
    settings = SETTINGS | {"model": str(tiny), "test_fail_after_tokens": "3"}
    with Server.start(ModelRepository(settings), exit_timeout_s=5) as server:
        config = (DOCKER / "prometheus.yml").read_text()
        config = config.replace("kvloom:8002", server.ports.address("metrics")).replace("interval: 5s", "interval: 1s")
        (tmp_path / "prometheus.yml").write_text(config)
        address = f"127.0.0.1:{Ports().resolved().http}"
        command = [
            prometheus,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
        ]
        with (tmp_path / "log").open("wb") as log:
            running = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            url = f"http://{address}/api/v1/query"
            wait_for(lambda: b"Server is ready" in (tmp_path / "log").read_bytes(), 30)
            traffic(server, 2)
            wait_for(lambda: [r["value"][1] for r in ask(url, query="up")] == ["1"], 15)
            traffic(server, 8)
            answers = {
                (title, query): ask(url, query=query.replace("$__rate_interval", "20s")) for title, query in QUERIES
            }
        finally:
            running.terminate()
            running.wait(30)
    for question, series in answers.items():
        values = [float(entry["value"][1]) for entry in series]
        print(*question, values)
        assert values, question
        assert not any(value != value for value in values), question  # NaN
    assert answers.keys() == set(QUERIES)
    [busy] = [series for (title, _), series in answers.items() if title == "Prefix hits"]
    assert 0.5 < float(busy[0]["value"][1]) < 1
