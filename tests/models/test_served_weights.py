"""The setting ``weights``: what is taken from files as it is, what is refused, what it costs in quality and memory."""

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from transformers import AutoModelForCausalLM

from bench.weights_quality import measure, text_windows
from kvloom.errors import SettingsError
from kvloom.models import gpu_footprint
from kvloom.models.decoder import Decoder
from kvloom.models.fetch import default_model
from kvloom.models.footprint import weights_bytes
from kvloom.models.smoothing import MAX_TOKENS, NORM_ALPHA, TEXT, UP_ALPHA, smoothing
from kvloom.models.spec import tensor_shapes
from kvloom.models.weight_conversion import ServedWeights, converted_weights
from kvloom.models.weights import open_model
from kvloom.ops.linear_groups import GROUP, GroupedWeight
from kvloom.ops.linear_int8 import WIDE_GROUP, Int8Weight
from kvloom.ops.native import stop_using_native
from kvloom.text.tokenizer import Tokenizer
from support.compiled import use_compiled
from support.engine_driver import Driver
from support.tiny_models import make_tiny, to_gguf

WEIGHTS = ("fp32", "bf16", "int8", "int4", "w8a8")
WIDE = {"heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate_size": 96}
"""Widths that are multiples of a group, so that every matrix of a GGUF file is quantized."""


@pytest.fixture(autouse=True)
def _native():
    use_compiled()
    yield
    stop_using_native()


@pytest.mark.parametrize("kind", [GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q8_0])
def test_groups_of_a_file_are_taken_as_they_are(tmp_path, kind):
    files = open_model(to_gguf(make_tiny(tmp_path, **WIDE), tmp_path / "m.gguf", kind))
    weights = "int8" if kind is GgmlType.Q8_0 else "int4"
    served = ServedWeights(files, weights, torch.float32)
    for name, shape in tensor_shapes(files.spec).items():
        # the gguf library's own way from the file to fp32, the halves of heads put in order
        theirs, ours = files.tensor(name, torch.float32), served.pop(name)
        if len(shape) == 1:
            assert torch.equal(ours, theirs)
            continue
        assert isinstance(ours, GroupedWeight)
        if name != "embed_tokens.weight" or weights == "int8":
            assert ours.bits == (8 if weights == "int8" else 4)
            assert torch.equal(ours.dequantize(), theirs), name
    assert len(served) == 0


def test_int4_takes_only_what_is_in_groups_of_4_bits(tmp_path):
    folder = make_tiny(tmp_path, **WIDE)
    for path, kind in ((folder, "F32"), (to_gguf(folder, tmp_path / "m.gguf", GgmlType.Q8_0), "Q8_0")):
        with pytest.raises(SettingsError, match=rf"weights='int4'.*Q4_0 or Q4_1.*layers\.0.*{kind}.*choose int8"):
            Driver(path, weights="int4")


def reference_peaks(folder, ids: list[int]) -> dict[str, torch.Tensor]:
    """Largest sizes of products' inputs in transformers, by our name of the norm or the product that makes them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peaks = {}
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            note = name.removeprefix("model.") + ".weight"
            module.register_forward_hook(lambda _, __, out, note=note: peaks.update({note: out[0].abs().amax(0)}))
        if name.endswith("down_proj"):
            note = name.removeprefix("model.").replace("down", "up") + ".weight"
            module.register_forward_pre_hook(lambda _, x, note=note: peaks.update({note: x[0][0].abs().amax(0)}))
    with torch.inference_mode():
        model(torch.tensor([ids]))
    return peaks


def test_smoothing_evens_out_what_transformers_sees(tmp_path):
    folder = make_tiny(tmp_path, heads=4, kv_heads=2)
    files = open_model(folder)
    ids = Tokenizer.from_folder(folder).encode(TEXT)[:MAX_TOKENS]
    factors = smoothing(files.spec, lambda name: files.tensor(name, torch.float32), ids)
    peaks = reference_peaks(folder, ids)
    assert set(factors) == set(peaks)
    served = ServedWeights(files, "w8a8", torch.float32, factors)

    def plain(name: str) -> torch.Tensor:
        return files.tensor(name, torch.float32)

    def check_rounded(name: str, exact: torch.Tensor) -> None:
        weight = served.pop(name)
        assert isinstance(weight, Int8Weight) and weight.groups.group == WIDE_GROUP
        groups = torch.nn.functional.pad(exact, (0, -exact.shape[1] % WIDE_GROUP)).view(len(exact), -1, WIDE_GROUP)
        step = groups.abs().amax(-1).repeat_interleave(WIDE_GROUP, 1)[:, : exact.shape[1]] / 127
        # scales are fp16: 127 steps are off by 2^-11 of themselves at most
        assert ((weight.groups.dequantize() - exact).abs() <= 0.6 * step).all(), name

    for i in range(files.spec.n_layers):
        layer = f"layers.{i}"
        up, down = f"{layer}.mlp.up_proj.weight", f"{layer}.mlp.down_proj.weight"
        factor = peaks[up] ** UP_ALPHA / plain(down).abs().amax(0) ** (1 - UP_ALPHA)
        assert torch.allclose(factors[up], factor, rtol=1e-3)
        check_rounded(down, plain(down) * factor)
        makers = (("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),)
        makers += (("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),)
        for norm, products in makers:
            norm, names = f"{layer}.{norm}.weight", [f"{layer}.{product}.weight" for product in products]
            largest = torch.cat([plain(name) for name in names]).abs().amax(0)
            given_up = peaks[norm] ** NORM_ALPHA / largest ** (1 - NORM_ALPHA)
            assert torch.allclose(factors[norm], given_up, rtol=1e-3)
            # the norm gives up what the weights take on, and up what down does
            assert torch.allclose(served.pop(norm) * given_up, plain(norm), rtol=1e-3)
            for name in names:
                check_rounded(name, plain(name) * given_up / (factor[:, None] if name == up else 1))
        check_rounded(f"{layer}.self_attn.o_proj.weight", plain(f"{layer}.self_attn.o_proj.weight"))
    head = served.pop("embed_tokens.weight")
    assert isinstance(head, Int8Weight) and head.groups.group == GROUP
    assert torch.equal(head.groups.values, GroupedWeight.quantize(plain("embed_tokens.weight")).values)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_take_what_was_planned(tmp_path, weights, tied):
    # multiples of panels and groups, so that nothing is padded
    folder = make_tiny(tmp_path, **WIDE, tied=tied, vocab_size=384)
    files = open_model(to_gguf(folder, tmp_path / "m.gguf", GgmlType.Q4_1) if weights == "int4" else folder)
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    tokenizer = Tokenizer.from_folder(folder)
    decoder = Decoder(files.spec, converted_weights(files, weights, dtype, tokenizer), dtype)
    assert held_bytes(decoder) == weights_bytes(files.spec, weights, dtype)


@pytest.mark.parametrize("weights", ["int8", "w8a8"])
def test_an_embedding_that_fills_no_panel_takes_what_was_planned(tmp_path, weights):
    folder = make_tiny(tmp_path, **WIDE, tied=False, vocab_size=410)
    files = open_model(folder)
    decoder = Decoder(
        files.spec, converted_weights(files, weights, torch.bfloat16, Tokenizer.from_folder(folder)), torch.bfloat16
    )
    assert held_bytes(decoder) == weights_bytes(files.spec, weights, torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_of_a_gpu_take_what_was_planned(tmp_path, monkeypatch, weights, tied):
    # as a GPU's products keep them; the hidden size fills no block of theirs
    monkeypatch.setattr("kvloom.ops.gpu._everywhere", True)
    sizes = {**WIDE, "hidden_size": 160}
    folder = make_tiny(tmp_path, **sizes, tied=tied, vocab_size=384)
    files = open_model(to_gguf(folder, tmp_path / "m.gguf", GgmlType.Q4_1) if weights == "int4" else folder)
    decoder = Decoder(files.spec, ServedWeights(files, weights, torch.bfloat16), torch.bfloat16)
    assert held_bytes(decoder) == gpu_footprint.weights_bytes(files.spec, weights, torch.bfloat16)


def held_bytes(root: object) -> int:
    """Bytes of all tensors that an object reaches, each memory once."""
    found, seen, todo = {}, set(), [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.data_ptr()] = thing.numel() * thing.itemsize
        elif isinstance(thing, list | tuple):
            todo += thing
        elif hasattr(thing, "func"):
            todo += thing.args
        elif hasattr(thing, "__self__"):
            todo.append(thing.__self__)
        elif type(thing).__module__.startswith("kvloom"):
            slots = getattr(type(thing), "__slots__", ())
            todo += [getattr(thing, name) for name in slots] + list(getattr(thing, "__dict__", {}).values())
    return sum(found.values())


def test_without_a_compiler_the_log_says_what_is_served_instead(tmp_path, caplog):
    stop_using_native()
    folder = make_tiny(tmp_path, **WIDE)
    files = open_model(to_gguf(folder, tmp_path / "m.gguf", GgmlType.Q4_1))
    ServedWeights(files, "int4", torch.bfloat16)
    assert "weights=int4: there are no C++ ops" in caplog.text


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_engine_answers_alike_alone_and_in_company(tmp_path, weights):
    folder = make_tiny(tmp_path, **WIDE)
    path = to_gguf(folder, tmp_path / "m.gguf", GgmlType.Q4_1)
    prompts = [[5, 9, 200, 31], [7] * 40, list(range(20, 75)), [100, 3]]
    alone = [Driver(path, weights=weights).answer(prompt, max_tokens=12).ids for prompt in prompts]
    driver = Driver(path, weights=weights)
    answers = [driver.submit(prompt, max_tokens=12)[1] for prompt in prompts]
    driver.run()
    assert [answer.ids for answer in answers] == alone


LIMITS = {"bf16": (1e-3, 0.96), "int8": (3e-3, 0.92), "int4": (1e-3, 0.96), "w8a8": (8e-3, 0.9)}
"""Of the mean divergence from fp32 in nats, and of the share of equal likeliest tokens: over 256 tokens of this
repository's text, so that one token is 0.4 %."""


@pytest.mark.slow
def test_quality_of_the_default_model():
    files = open_model(default_model())
    tokenizer = Tokenizer.from_gguf(files.metadata)
    windows = text_windows(tokenizer, 256, 256)
    for row in measure(files, tokenizer, list(LIMITS), windows):
        kl, top1 = LIMITS[row.weights]
        print(row)
        # exact but for rounding, where the activations are fp32 and the weights the file's own
        assert -1e-6 < row.kl < kl
        assert row.top1 > top1
