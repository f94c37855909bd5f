"""Two engines in one tritonserver, each with a stateless model of its own in front."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from transformers import AutoModelForCausalLM

from kvloom.errors import SettingsError
from kvloom.launcher.launch import Server
from kvloom.launcher.repository import SOURCE, ModelRepository
from kvloom_client import Client
from support.server import eventually, metrics
from support.tiny_models import make_tiny

pytestmark = pytest.mark.slow

PROMPT, MORE = list(range(40, 60)), [70, 71, 72]
SETTINGS = {"weights": "fp32", "threads": "1", "block_size": "16", "kv_blocks": "256", "conversation_idle_s": "2"}
DOORS = {"llm": "generate", "second-llm": "second-generate"}


def expected(folder: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def copied(name: str, new_name: str, repository: Path) -> Path:
    """Copy a model under another name; returns its config."""
    shutil.copytree(repository / name, repository / new_name)
    config = repository / new_name / "config.pbtxt"
    config.write_text(config.read_text().replace(f'name: "{name}"', f'name: "{new_name}"', 1))
    return config


def parameters(settings: dict[str, str]) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in settings.items()
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny(folder / name, seed=seed) for seed, name in enumerate(DOORS)}


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    source = tmp_path_factory.mktemp("source") / "repository"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    config = copied("llm", "second-llm", source)
    text, count = re.subn(r"(?m)^parameters .*\n", "", config.read_text())
    assert count == 1
    config.write_text(text + parameters({"model": str(folders["second-llm"]), **SETTINGS}))
    config = copied("generate", "second-generate", source)
    config.write_text(config.read_text().replace('string_value: "llm"', 'string_value: "second-llm"'))
    # Triton's own, which is no setting of the engine
    config = source / "llm" / "config.pbtxt"
    config.write_text(config.read_text() + parameters({"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}))
    with Server.start(ModelRepository({"model": str(folders["llm"]), **SETTINGS}, source), exit_timeout_s=5) as server:
        yield server


class Talk:
    """A conversation with an engine, over plain tritonclient."""

    def __init__(self, server: Server, model: str):
        self._client = triton.InferenceServerClient(server.grpc_url)
        self._model = model
        self._heard: SimpleQueue[tuple[triton.InferResult | None, Exception | None]] = SimpleQueue()
        self._client.start_stream(lambda result, error: self._heard.put((result, error)))

    def turn(self, ids: list[int], start: bool) -> list[int]:
        values = {
            "input_ids": ("INT32", np.array([ids], np.int32)),
            "max_tokens": ("INT32", np.array([[8]], np.int32)),
            "temperature": ("FP32", np.array([[0.0]], np.float32)),
            "stream": ("BOOL", np.array([[False]])),
            "return_token_ids": ("BOOL", np.array([[True]])),
            "sampling_parameters": ("BYTES", np.array([[b'{"ignore_eos": true}']], np.object_)),
        }
        inputs = []
        for name, (kind, value) in values.items():
            inputs.append(triton.InferInput(name, list(value.shape), kind))
            inputs[-1].set_data_from_numpy(value)
        self._client.async_stream_infer(self._model, inputs, sequence_id="talk", sequence_start=start)
        result, error = self._heard.get(timeout=60)
        if error is not None:
            raise error
        assert result is not None
        return result.as_numpy("token_ids").ravel().tolist()


@pytest.mark.parametrize("engine", DOORS)
def test_each_serves_its_own_model(server, folders, engine):
    first = expected(folders[engine], PROMPT)
    with Client(server.grpc_url) as client:
        options = {"model": DOORS[engine], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "timeout": 60}
        assert list(client.generate(input_ids=PROMPT, **options).token_ids) == first
    talk = Talk(server, engine)
    assert talk.turn(PROMPT, start=True) == first
    assert talk.turn(MORE, start=False) == expected(folders[engine], PROMPT + first + MORE)


def test_each_ends_its_own_conversations_in_triton(server):
    """A conversation that was dropped is ended in Triton by a call of its engine to itself."""
    talks = {engine: Talk(server, engine) for engine in DOORS}
    for talk in talks.values():
        talk.turn(PROMPT, start=True)
    names = {"llm": "kvloom_conversations", "second-llm": 'kvloom_conversations{model="second-llm"}'}
    eventually(lambda: all(metrics(server)[name] == 0 for name in names.values()), within=30)
    for talk in talks.values():
        with pytest.raises(triton.InferenceServerException, match="NOT_FOUND: conversation talk: expired"):
            talk.turn(MORE, start=False)

        def unknown(talk: Talk = talk) -> bool:
            try:
                talk.turn(MORE, start=False)
            except triton.InferenceServerException as error:
                return "must specify the START flag" in str(error)
            return False

        eventually(unknown, within=30)


def test_what_one_engine_does_is_told_as_its_own(server):
    seen = metrics(server)
    families = {name.partition("{")[0] for name in seen}
    assert {name.partition("{")[0] for name in seen if 'model="second-llm"' in name} == families


def test_an_engine_whose_triton_keeps_too_few_sequences_is_refused(folders, tmp_path):
    source = tmp_path / "repository"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    config = source / "llm" / "config.pbtxt"
    config.write_text(config.read_text().replace("65536", "2000"))
    settings = {"model": str(folders["llm"]), "max_conversations": "700", "max_queue": "60", "max_running": "40"}
    ModelRepository(settings, source)
    expected = "max_running=41 with 1200 to spare need 2001 sequences, but Triton keeps 2000"
    with pytest.raises(SettingsError, match=expected):
        ModelRepository({**settings, "max_running": "41"}, source)
