"""Whole load tests of a tiny model: the comparisons, and every user in every scenario."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_load import comparisons
from kvloom_load.drive import TALK, USERS, LoadPlan, drive
from kvloom_load.figures import Target, row
from kvloom_load.scenarios import SCENARIOS
from support.server import assert_idle
from support.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]


def test_a_batcher_delay_is_in_the_config(tmp_path):
    path = tmp_path / "config.pbtxt"
    shutil.copy(ROOT / "model_repository" / "generate" / "config.pbtxt", path)
    comparisons._delay(path, 5000)
    config = text_format.Parse(path.read_text(), ModelConfig())
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000


TINY = ["--set", "weights=fp32", "--set", "threads=1", "--set", "kv_blocks=1024", "--set", "block_size=16"]


def load(folder: Path, *arguments: str) -> dict:
    """Run load/run.py on a tiny model; the JSON it wrote."""
    model = make_tiny(folder / "model", max_position_embeddings=8192)
    command = [sys.executable, str(ROOT / "load" / "run.py"), *arguments, *TINY, "--set", f"model={model}"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "tokens/s" in run.stdout
    [page] = re.findall(r"report: (\S+)", run.stdout)
    assert (folder / page).read_text().startswith("<!DOCTYPE html>")
    return json.loads((folder / page).with_suffix(".json").read_text())


@pytest.mark.slow
def test_one_command_compares_two_configurations(tmp_path):
    content = load(tmp_path, "compare", "prefix_cache", "--users", "2", "--seconds", "2")
    assert content["meta"]["scenario"] == "shared_prefix"
    off, on = content["rows"]
    assert (off["configuration"], on["configuration"]) == ("prefix_cache=false", "prefix_cache=true")
    assert off["ok"] and on["ok"]
    assert not off["failed"] + on["failed"]
    assert not off["engine"]["prefix_hits"]
    assert on["engine"]["prefix_hits"] > 0.5
    assert len(list((tmp_path / "build" / "reports").glob("load-prefix_cache-locust-*.html"))) == 2


@pytest.mark.full
@pytest.mark.parametrize("what", ["max_running", "batcher_delay", "conversations"])
def test_every_comparison(tmp_path, what):
    content = load(tmp_path, "compare", what, "--users", "1,8", "--seconds", "5")
    assert [row["users"] for row in content["rows"]] == [1, 8] * len(comparisons.COMPARISONS[what].configurations)
    assert all(row["ok"] and not row["failed"] for row in content["rows"])
    if what == "max_running":
        alone, together = content["rows"][1], content["rows"][3]
        assert alone["engine"]["sequences_per_step"] == 1
        assert together["engine"]["sequences_per_step"] > 1.1  # a tiny model's answers overlap as clients come around
        assert alone["engine"]["queue_ms"] > together["engine"]["queue_ms"]


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory) -> Iterator[Server]:
    model = make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=8192)
    settings = {"model": str(model), "weights": "fp32", "kv_blocks": "2048", "block_size": "16", "threads": "1"}
    # so soon do conversations end that a user has left
    settings["conversation_idle_s"] = "2"
    with Server.start(ModelRepository(settings), exit_timeout_s=5) as server:
        yield server


@pytest.mark.slow
def test_turns_of_a_conversation_compute_only_what_is_new(tiny_server):
    chat, talk = (
        row(drive(tiny_server, LoadPlan(user, seconds=3, turns=5), users=2), user, Target())
        for user in ("ChatUser", "ConversationUser")
    )
    for figures in (chat, talk):
        assert figures["ok"] and not figures["failed"] + figures["cut"]
        assert [turn["turn"] for turn in figures["turns"]] == [1, 2, 3, 4, 5]
        assert sum(turn["answers"] for turn in figures["turns"]) == figures["ok"]
        assert figures["conversations"]["begun"] >= figures["turns"][0]["answers"]
        assert figures["conversations"]["lost"] == 0
        known = [turn["prompt_tokens"] for turn in figures["turns"]]
        assert known == sorted(known) and known[-1] > 3 * known[0]
    # the answer before and the new message; a whole chat may find its full blocks in the prefix cache
    assert all(turn["computed_tokens"] < 2 * talk["turns"][0]["prompt_tokens"] for turn in talk["turns"])
    assert talk["turns"][-1]["computed_tokens"] <= chat["turns"][-1]["computed_tokens"]
    assert_idle(tiny_server)


@pytest.mark.full
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_every_user_in_every_scenario(tiny_server, user, scenario):
    figures = row(drive(tiny_server, LoadPlan(user, scenario, seconds=5), users=8), "tiny", Target())
    assert figures["ok"]
    assert not figures["failed"] + figures["cut"]
    assert bool(figures["cancelled"]) == (scenario == "cancel_storm" and user not in TALK)
    assert_idle(tiny_server)
