"""The GPU's step on the CPU: the same buffers, padding and sampling; recorded work is plain functions here."""

import random
from pathlib import Path

import pytest
import torch

from kvloom.config import Settings
from kvloom.engine import build
from kvloom.errors import Internal, SettingsError
from kvloom.executor.gpu_runner import GpuRunner
from kvloom.executor.graphs import DecodeGraphs, graph_sizes
from kvloom.executor.next_step import NextStep
from kvloom.executor.step_buffers import SamplingTensors, StepBuffers
from kvloom.models.decoder import Batch
from kvloom.planning.placement import with_device
from kvloom.scheduling.scheduler import Costs
from support.engine_driver import Answer, Driver
from support.gpu_on_cpu import Recorder, runner_factory
from support.talks import Talks
from support.tiny_models import make_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", heads=6, kv_heads=2)


def draws(rows: int) -> SamplingTensors:
    ones = torch.ones(rows)
    return SamplingTensors(ones, 0 * ones, torch.full((rows,), 5), ones, 0.5 * ones.double())


def decode_batch(lengths: list[int], width: int = 3) -> Batch:
    """A token of each of some sequences; numbers that tell where they went wrong."""
    rows = len(lengths)
    return Batch(
        tokens=torch.arange(100, 100 + rows),
        positions=torch.tensor(lengths) - 1,
        slots=torch.arange(200, 200 + rows),
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.arange(1, rows * width + 1, dtype=torch.int32).view(rows, width),
        logit_rows=torch.arange(rows),
        max_queries=1,
        max_length=max(lengths),
    )


# --- buffers ---


def test_a_step_arrives_as_it_was_sent():
    buffers = StepBuffers(tokens=32, sequences=8, blocks=20, device=CPU)
    sent, drawn = decode_batch([7, 1, 40]), draws(3)
    buffers.send(sent, drawn)
    got = buffers.batch(3, 3, 3, 1, 40)
    for name in ("tokens", "positions", "slots", "query_starts", "seq_lens", "logit_rows"):
        assert torch.equal(getattr(got, name), getattr(sent, name)), name
    assert torch.equal(got.block_tables[:, :3], sent.block_tables)
    for name in SamplingTensors.__slots__:
        assert torch.equal(getattr(buffers.draws(3), name), getattr(drawn, name)), name


def test_addresses_and_strides_suit_the_kernels():
    buffers = StepBuffers(tokens=33, sequences=7, blocks=21, device=CPU)
    before = buffers.batch(7, 7, 7, 1, 40)
    buffers.send(decode_batch([5] * 7), draws(7))
    after = buffers.batch(7, 7, 7, 1, 40)
    for name in ("tokens", "positions", "slots", "query_starts", "seq_lens", "logit_rows", "block_tables"):
        address = getattr(after, name).data_ptr()
        assert address == getattr(before, name).data_ptr()
        assert address % 16 == 0
    assert after.block_tables.stride(0) % 16 == 0


def test_padding_writes_nothing_and_has_no_length():
    buffers = StepBuffers(tokens=32, sequences=8, blocks=20, device=CPU)
    buffers.send(decode_batch([9] * 8), draws(8))
    buffers.send(decode_batch([7, 1, 40]), draws(3), sequences=8)
    got = buffers.batch(8, 8, 8, 1, 64)
    assert got.seq_lens.tolist() == [7, 1, 40, 0, 0, 0, 0, 0]
    assert got.slots.tolist() == [200, 201, 202, -1, -1, -1, -1, -1]
    assert got.tokens.tolist() == [100, 101, 102, 0, 0, 0, 0, 0]
    assert got.query_starts.tolist() == list(range(9))
    assert got.logit_rows.tolist() == list(range(8))
    assert buffers.draws(8).temperature.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


# --- graphs ---


@pytest.mark.parametrize(
    "most, sizes",
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (16, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
        (64, [1, 2, 4, 8, 16, 32, 48, 64]),
    ],
)
def test_sizes_reach_from_one_to_all(most, sizes):
    assert graph_sizes(most) == sizes


def test_the_smallest_graph_that_fits_is_replayed_and_the_largest_recorded_first():
    log: list[int] = []

    def record(work):
        work()
        return work

    graphs = DecodeGraphs([1, 2, 4, 8], log.append, record)
    assert log == [8, 4, 2, 1]
    assert [graphs.padded(count) for count in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]
    graphs.replay(4)
    assert log[-1] == 4


# --- the engine ---


@pytest.mark.parametrize("record", [Recorder(), None], ids=["graphs", "eager"])
def test_answers_are_those_of_the_cpus_runner(model, monkeypatch, record):
    monkeypatch.setattr(build, "measure_costs", lambda *_: Costs(copy_block_s=0.0, compute_token_s=1.0))
    expected = answers(model)
    monkeypatch.setattr(build, "Runner", runner_factory(64, 5, 128, record))
    assert answers(model) == expected
    assert record is None or record.replays > 20


def test_a_server_of_one_sequence_at_a_time(model, monkeypatch):
    def answer() -> list[int]:
        driver = Driver(model, kv_blocks=14, block_size=8, max_running=1, max_batch_tokens=64, context_length=128)
        got = driver.submit([5, 6, 7], max_tokens=8)[1]
        driver.run()
        return got.ids

    expected = answer()
    monkeypatch.setattr(build, "Runner", runner_factory(64, 1, 128, Recorder()))
    assert len(expected) == 8
    assert answer() == expected


def answers(model: Path) -> list[object]:
    """Greedy, drawn, edited and logged rows side by side, in a pool that is too small for them all."""
    driver = Driver(model, kv_blocks=14, block_size=8, max_running=5, max_batch_tokens=64, context_length=128)
    rng = random.Random(3)
    fields: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 4},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"temperature": 0.7, "seed": 5, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
        {"logprobs": 3},
        {"temperature": 1e-45},
    ]
    asked = [
        driver.submit([rng.randrange(3, 300) for _ in range(rng.choice([1, 9, 30]))], max_tokens=24, **more)[1]
        for more in fields
    ]
    driver.run()
    assert driver.engine.stats().swaps > 0
    return [(answer.ids, [[i for i, _ in token.top] for delta in answer for token in delta.tokens]) for answer in asked]


def test_what_was_prepared_is_what_would_be_built(model, monkeypatch):
    hits = []
    inputs = GpuRunner._inputs

    def checked(runner, slices, sampled):
        batch, drawn = inputs(runner, slices, sampled)
        prepared = runner._next is not None and runner._next.inputs(slices) is not None
        hits.append(prepared)
        runner._next = None
        built = inputs(runner, slices, sampled)
        for ours, theirs in ((batch, built[0]), (drawn, built[1])):
            for name in type(ours).__slots__:
                a, b = getattr(ours, name), getattr(theirs, name)
                assert torch.equal(a, b) and a.dtype is b.dtype if isinstance(a, torch.Tensor) else a == b, name
        return batch, drawn

    monkeypatch.setattr(build, "measure_costs", lambda *_: Costs(copy_block_s=0.0, compute_token_s=1.0))
    monkeypatch.setattr(build, "Runner", runner_factory(64, 5, 128, Recorder()))
    monkeypatch.setattr(GpuRunner, "_inputs", checked)
    answers(model)
    # prompts, swaps and endings in between
    assert len(hits) / 2 < sum(hits) < len(hits) - 3


def test_the_host_works_while_the_device_computes(model, monkeypatch):
    """A step's deltas are delivered, and the next one's inputs prepared, between a launch and the wait for it."""
    log: list[str] = []

    def noting(name, method):
        def noted(*args):
            log.append(name)
            return method(*args)

        return noted

    monkeypatch.setattr(build, "Runner", runner_factory(64, 5, 128, Recorder()))
    driver = Driver(model, kv_blocks=64, max_running=5, max_batch_tokens=64, context_length=128)
    step = driver.engine._runner._step
    monkeypatch.setattr(step, "launch", noting("launch", step.launch))
    monkeypatch.setattr(step, "finish", noting("finish", step.finish))
    monkeypatch.setattr(NextStep, "__init__", noting("prepare", NextStep.__init__))
    monkeypatch.setattr(Answer, "append", noting("deliver", Answer.append))
    driver.submit([5, 6, 7], max_tokens=3)
    driver.run()
    first, middle, last = ["launch", "prepare", "finish"], ["launch", "prepare", "deliver", "finish"], ["deliver"]
    assert log == [*first, *middle, *middle, *last]

    # whatever ends an answer between two steps comes after what was held back
    sequence, answer = driver.submit([5, 6, 7], max_tokens=30)
    for _ in range(3):
        driver.engine.step()
    assert len(answer) == 2
    driver.engine.cancel(sequence)
    assert [len(delta.tokens) for delta in answer] == [1, 1, 1, 0]
    assert answer.reason == "cancelled"
    driver.assert_idle()


def test_nobody_hears_of_an_end_before_the_last_delta(model, monkeypatch):
    monkeypatch.setattr(build, "Runner", runner_factory(64, 5, 128, Recorder()))
    driver = Talks(model, kv_blocks=64, max_running=5, max_batch_tokens=64, context_length=128)
    log: list[str] = []
    append, end = Answer.append, driver.triton.end

    def noted(answer, delta):
        append(answer, delta)
        if delta.final:
            log.append("final")

    monkeypatch.setattr(Answer, "append", noted)
    monkeypatch.setattr(driver.triton, "end", lambda conversation: log.append("triton") or end(conversation))
    # somebody else runs on: so there is a next step to wait for
    driver.submit([5, 6, 7], max_tokens=30)
    first = driver.turn(7, [8, 9], start=True, max_tokens=3)
    driver.turns.manager.end(7, lambda: log.append("ended"))
    while 7 in driver.turns.manager.registry._live:
        driver.engine.step()
    assert len(first) == 2 and not log
    # a start that comes now is not undone by the end that is still on its way
    driver.turn(7, [8, 9], start=True, max_tokens=3)
    assert log == ["final", "triton", "ended"]
    assert [told for told in driver.triton.told if told[1] == 7] == [("taken", 7), ("end", 7), ("taken", 7)]
    driver.run_all()
    driver.end_all()


def test_rows_whose_logits_are_not_finite_fail_alone(model, monkeypatch):
    monkeypatch.setattr(build, "Runner", runner_factory(64, 5, 128, Recorder()))
    driver = Driver(model, kv_blocks=64, max_running=5, max_batch_tokens=64, context_length=128)
    step = driver.engine._runner._step
    forward = step._decoder.forward

    def broken(batch, layers):
        logits = forward(batch, layers)
        logits[batch.tokens[batch.logit_rows] == 299] = torch.nan
        return logits

    monkeypatch.setattr(step._decoder, "forward", broken)
    good, bad = driver.submit([5, 6], max_tokens=4)[1], driver.submit([5, 299], max_tokens=4)[1]
    driver.run()
    assert isinstance(bad.error, Internal)
    assert len(good.ids) == 4


# --- the setting ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_advice():
    with pytest.raises(SettingsError, match=r"setting device='cuda:0': .*install a CUDA build.*or set device=cpu"):
        with_device(Settings(device="cuda:0"))
    assert with_device(Settings()).device == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:x", "cuda:-1"])
def test_devices_that_are_none_are_refused(device):
    with pytest.raises(SettingsError, match="setting device=.*cuda:0"):
        Settings.parse({"device": device})
