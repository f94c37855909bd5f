"""Faults that users of such servers reported: where a model lies (K01)."""

import signal

import pytest

from kvloom_client import Client
from support.launched import launched
from support.server import SETTINGS
from support.tiny_models import make_tiny, to_gguf

ASKED = {"input_ids": [5, 6, 7], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_k01_paths_may_have_any_letters(tmp_path, monkeypatch, kind, locale):
    monkeypatch.setenv("LC_ALL", locale)
    home = tmp_path / "modèles 模型"
    model = make_tiny(home / "é")
    if kind == "file":
        model = to_gguf(model, home / "é.gguf")
    settings = SETTINGS | {"model": str(model), "journal_dir": str(home / "journal é")}
    with launched(settings=settings) as serving:
        with Client(serving.url) as client, client.conversation() as talk:
            assert talk.generate(**ASKED).num_output_tokens == 8
        assert list((home / "journal é").iterdir())
        serving.process.send_signal(signal.SIGTERM)
        _, said = serving.process.communicate(timeout=60)
        assert serving.process.returncode == 0
        assert f"loading the model {model}" in said
