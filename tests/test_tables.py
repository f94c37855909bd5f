"""What is declared once is everywhere as declared: config.pbtxt, READMEs, help, the client."""

import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from kvloom.config import Settings
from kvloom.engine.observations import Name
from kvloom.engine.stats import Stats
from kvloom.request import SamplingParams
from kvloom.serving import tables
from kvloom.serving.interface import INPUTS, OUTPUTS, Part, inputs_of
from kvloom.serving.metric_families import FAMILIES
from kvloom.serving.options import Options
from kvloom_client.answer import Chunk
from kvloom_client.request import RequestArguments, build_request
from kvloom_client.wire import decode_response, encode_request

FILES = tables.files()
READMES = [path for path in FILES if path.name == "README.md"]


def of(part: Part) -> set[str]:
    return {own.name for own in inputs_of(part)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(tables.ROOT)))
def test_a_file_is_as_declared(path):
    text = path.read_text(encoding="utf-8")
    assert FILES[path](text) == text, "run `make tables`"


def test_each_table_is_in_one_readme():
    assert {"llm", "generate"} <= {path.parent.name for path in FILES}
    found = [first for path in READMES for first in tables.tables_in(path.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(tables.TABLES)


def test_a_table_that_is_behind_is_written_anew():
    first = "| setting | default | meaning |"
    behind = f"before\n\n{first}\n|---|---|---|\n| `model` | 1 | old |\n\nafter\n"
    text = tables.readme_text(behind)
    assert text.startswith(f"before\n\n{first}\n|---|---|---|\n| `model` | `default` | ")
    assert text.endswith(" |\n\nafter\n")
    assert tables.readme_text(text) == text
    with pytest.raises(SystemExit, match="no line `input \\[`"):
        tables.config_text('name: "llm"\n')


def test_everything_is_described_in_one_line():
    rows = [row for make in tables.TABLES.values() for row in make()]
    for *names, about in rows:
        assert about and about == about.strip(), names
        assert not {"|", "\n", "  "} & set(about), names
        assert not about.endswith("."), names


def test_what_the_parser_reads_is_declared():
    assert of(Part.OPTION) == set(Options.model_fields)
    assert {own.key for own in inputs_of(Part.SAMPLING)} <= set(SamplingParams.model_fields)
    assert len({own.name for own in (*INPUTS, *OUTPUTS)}) == len(INPUTS) + len(OUTPUTS)


def test_a_readme_names_no_setting_that_is_none():
    for path in READMES:
        named = re.findall(r"--set[ =]([a-z_]+)=", path.read_text(encoding="utf-8"))
        assert set(named) <= set(Settings.names()), path


@pytest.mark.parametrize("command", ["serve", "plan", "generate", "chat"])
def test_the_help_lists_the_settings(command):
    run = [str(Path(sys.executable).parent / "kvloom"), command, "--help"]
    text = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
    if command == "serve":
        words = text.partition("Settings:\n")[2].split()
        said = [word for name, default, about in Settings.described() for word in f"{name}={default} {about}".split()]
        assert words == [word.replace("`", "") for word in said]
    else:
        listed = re.search(r"Settings: ([\w,\s]+)\.", text)
        assert listed
        assert re.split(r",\s+", listed[1]) == Settings.names()


# the client, which never imports the server

OWN = {"model", "request_id"}
"""Arguments that are no inputs."""

SENT = {"stream", "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_token_ids"}
"""Inputs that the client sends by itself."""

NEVER_SENT = {"control", "return_num_output_tokens"}
"""A control request is another call, and the client counts ``token_ids``."""


def test_the_client_has_a_keyword_for_every_input_and_sampling_key():
    inputs = {own.name for own in INPUTS if own.part is not Part.SAMPLING}
    assert set(RequestArguments.__annotations__) == OWN | inputs - SENT - NEVER_SENT | set(SamplingParams.model_fields)


def test_the_clients_types_are_the_servers():
    hints = typing.get_type_hints(RequestArguments)
    for name, field in SamplingParams.model_fields.items():
        if field.annotation in (int, float, bool):
            assert hints[name] is field.annotation, name


def test_what_the_client_sends_is_as_declared():
    options = {"kv": {}, "cache_salt": "", "stream_interval_ms": 1, "deadline_ms": 1, "priority": 1, "n": 1}
    flags = dict.fromkeys(["return_logprobs", "return_cumulative_logprob", "return_usage"], True)
    sent = {}
    for prompt in ({"text_input": "a"}, {"messages": []}, {"input_ids": [1, 2]}):
        message = encode_request(build_request(stream=True, **prompt, **options, **flags))
        for tensor in message.inputs:
            sent[tensor.name] = (tensor.datatype, list(tensor.shape))
    declared = {own.name: own for own in INPUTS if own.part is not Part.SAMPLING}
    assert set(sent) == set(declared) - NEVER_SENT
    for name, (datatype, shape) in sent.items():
        assert datatype == declared[name].type.replace("STRING", "BYTES"), name
        assert shape == [1, 2 if declared[name].many else 1], name


def test_the_client_understands_every_output():
    assert {own.name.replace("text_output", "text") for own in OUTPUTS} <= {
        name for name in dir(Chunk) if not name.startswith("_")
    }
    content = {"STRING": b"\x02\0\0\0[]", "FP32": b"\0\0\x80?", "INT32": b"\1\0\0\0", "UINT32": b"\1\0\0\0"}
    message = service_pb2.ModelStreamInferResponse()
    for own in OUTPUTS:
        message.infer_response.outputs.add(name=own.name, datatype=own.type.replace("STRING", "BYTES"))
        message.infer_response.raw_output_contents.append(content[own.type])
    chunk = decode_response(message).chunk
    assert (chunk.text, chunk.token_ids, chunk.logprobs, chunk.cumulative_logprob) == ("[]", (1,), [], 1.0)


# metrics


def test_every_figure_of_the_engine_is_shown():
    shown = [(figure, own.kind == "histogram") for own in FAMILIES for figure in own.figures.values()]
    # `finished` has a metric by reason
    assert sorted([figure for figure, observed in shown if not observed] + ["finished"]) == sorted(
        Stats.__dataclass_fields__
    )
    assert sorted(figure for figure, observed in shown if observed) == sorted(typing.get_args(Name))


def test_a_readme_names_no_metric_that_is_none():
    parts = {f"{own.name}_{part}" for own in FAMILIES if own.kind == "histogram" for part in ("bucket", "sum", "count")}
    packages = {"kvloom_client", "kvloom_load", "kvloom_gpu"}
    for path in READMES:
        named = re.findall(r"\bkvloom_[a-z0-9_]*[a-z0-9]", path.read_text(encoding="utf-8"))
        assert set(named) <= {own.name for own in FAMILIES} | parts | packages, path
