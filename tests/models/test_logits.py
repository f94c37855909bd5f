"""Logits against a float64 forward: kvloom in fp32 is as exact as transformers in fp32, however it is computed."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from kvloom.executor.runner import build_batch
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Decoder
from kvloom.models.fetch import default_model
from kvloom.models.weights import open_model
from kvloom.ops.native import stop_using_native
from kvloom.request import Request, SamplingParams, Sequence, Slice
from kvloom.text.tokenizer import Tokenizer
from support.compiled import use_compiled
from support.float64_llama import Float64Llama
from support.some_tokenizers import default_metadata, default_tokenizer
from support.tiny_models import HEADS, LLAMA3_ROPE, edit_config, edit_tensors, make_tiny, to_gguf

TEXTS = [
    "  two spaces, and the dog did not mind it in the least: it was asleep  and   kept dreaming of a quick brown fox.",
    "Crème brûlée, naïve façades and Übergröße: what is a café without crème?",
    "emoji 😀 👩‍👩‍👧 🏳️‍🌈, one after the other 🎉🎉, and 天气!",
    "def cached(key, size=16):\n    if key in kept:\n        return kept[key]  # hit\n    for i in range(size):\n"
    "        kept[key] = i ** 2\n\n    return None\n\n\nprint(cached('a'), cached('b'))\n",
    "12 times 34 is 408; 3.14159265358979 is not 22/7, 2026-07-31 is a date and 1,000,000 is a million.",
]
SHORT = 0
"""The text that is also computed token by token."""

BLOCK_SIZE = 16
CHUNKS = (1, 7, 16)
"""Uneven chunks: none ends where a block does; the rest of the text is the last one."""

TINY = {f"{heads}-{kv_heads}": {"heads": heads, "kv_heads": kv_heads} for heads, kv_heads in HEADS}
TINY["llama3"] = {"heads": 9, "kv_heads": 3, "tied": False, "rope_parameters": LLAMA3_ROPE}


@dataclass(frozen=True)
class Reference:
    """What a model's logits should be.

    Attributes:
        folder: the model, as a Hugging Face folder.
        ids: token ids of TEXTS.
        exact: float64 logits of each.
        errors: the largest error of transformers' fp32 logits of each.
    """

    folder: Path
    ids: list[list[int]]
    exact: list[torch.Tensor]
    errors: list[float]

    @classmethod
    @torch.inference_mode()
    def of(cls, folder: Path, ids: list[list[int]]) -> "Reference":
        theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        truth = Float64Llama(theirs.config, load_file(folder / "model.safetensors"))
        exact = [truth.logits(text) for text in ids]
        errors = [
            _largest_error(theirs(torch.tensor([text])).logits[0], logits)
            for text, logits in zip(ids, exact, strict=True)
        ]
        return cls(folder, ids, exact, errors)

    def check(self, text: int, logits: torch.Tensor) -> None:
        """Hold kvloom's logits of a text against the truth; the printed ratio shows with ``pytest -rP``."""
        exact = self.exact[text]
        ratio = _largest_error(logits, exact) / self.errors[text]
        print(f"text {text}, {len(exact)} tokens: {ratio:.2f} times transformers' error of {self.errors[text]:.1e}")
        assert ratio <= 2
        best, second = exact.topk(2).values.T
        clear = best - second > 1e-3
        assert clear.sum() > len(exact) / 2  # else there was nothing to see
        assert torch.equal(logits.argmax(-1)[clear], exact.argmax(-1)[clear])


def _largest_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    assert logits.shape == exact.shape
    return (logits.double() - exact).abs().max().item()


def open_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    files = open_model(path)
    return Decoder(files.spec, files.load(dtype), dtype)


@torch.inference_mode()
def paged_logits(
    decoder: Decoder, texts: list[list[int]], chunks: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Logits of every position of every text, computed side by side: step i takes the i-th chunk of each text."""
    spec = decoder.spec
    needed = [-(-len(text) // BLOCK_SIZE) for text in texts]
    total = sum(needed) + 5
    geometry = BlockGeometry(spec.n_layers, spec.n_kv_heads, spec.head_dim, BLOCK_SIZE)
    storage = Storage(PlainCodec(dtype), geometry, total, torch.device("cpu"))
    # what earlier sequences left behind; large, so that reading any of it shows
    storage.memory.view(dtype).uniform_(-100, 100)
    free = random.Random(3).sample(range(total), total)
    sequences = []
    for text, count in zip(texts, needed, strict=True):
        sequence = Sequence(Request(id="", prompt_ids=tuple(text), params=SamplingParams(), arrival=0.0))
        sequence.blocks = [free.pop() for _ in range(count)]
        sequences.append(sequence)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(map(len, chunks))):
        running = [i for i, counts in enumerate(chunks) if step < len(counts)]
        slices = [Slice(sequences[i], sum(chunks[i][:step]), chunks[i][step]) for i in running]
        batch = build_batch(slices, BLOCK_SIZE)
        logits = decoder.forward(replace(batch, logit_rows=torch.arange(len(batch.tokens))), storage.layers)
        for i, part in zip(running, logits.split([piece.count for piece in slices]), strict=True):
            rows[i].append(part)
    return [torch.cat(parts) for parts in rows]


def uneven(lengths: list[int]) -> list[list[int]]:
    """Chunks for each length, in an order that differs between neighbours: a step holds decodes beside prefills."""
    chunks = []
    for i, length in enumerate(lengths):
        first = i % len(CHUNKS)
        sizes = [*CHUNKS[first:], *CHUNKS[:first]]
        assert length > sum(sizes)
        chunks.append([*sizes, length - sum(sizes)])
    return chunks


def check_all_ways(decoder: Decoder, reference: Reference) -> None:
    ids = reference.ids
    for i, text in enumerate(ids):
        print("whole", end=" ")
        reference.check(i, paged_logits(decoder, [text], [[len(text)]])[0])
    for i, logits in enumerate(paged_logits(decoder, ids, uneven(list(map(len, ids))))):
        print("chunks", end=" ")
        reference.check(i, logits)
    print("decode", end=" ")
    reference.check(SHORT, paged_logits(decoder, [ids[SHORT]], [[1] * len(ids[SHORT])])[0])


# The default model


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The GGUF file's weights as a folder, by the reader, the dequantization and the row order of others."""
    folder = tmp_path_factory.mktemp("default") / "model"
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(folder)
    undo = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3}).process
    by_gguf_name = {
        tensor.name: undo(gguf.dequantize(tensor.data, tensor.tensor_type), name=tensor.name).weights
        for tensor in gguf.GGUFReader(default_model()).tensors
    }
    tensors = {_hf_name(name): torch.from_numpy(weights.copy()) for name, weights in by_gguf_name.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    yield Reference.of(folder, [default_tokenizer().encode(text) for text in TEXTS])
    shutil.rmtree(folder)  # pytest would keep half a gigabyte for each of the last runs


def _hf_name(gguf_name: str) -> str:
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in outside:
        return outside[gguf_name]
    _, layer, part, _ = gguf_name.split(".")
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    return f"model.layers.{layer}.{parts[part]}.weight"


@pytest.mark.parametrize("kind", [pytest.param("gguf", marks=pytest.mark.slow), "folder"])
def test_default_model(default, kind):
    decoder = open_decoder(default_model() if kind == "gguf" else default.folder)
    check_all_ways(decoder, default)


@pytest.fixture
def _native() -> Iterator[None]:
    use_compiled()
    yield
    stop_using_native()


@pytest.mark.usefixtures("_native")
def test_default_model_in_cpp(default):
    check_all_ways(open_decoder(default_model()), default)


@pytest.mark.usefixtures("_native")
@pytest.mark.slow
def test_default_model_in_cpp_and_bf16(default):
    """What bf16 costs: the weights' rounding, which is the same in every engine, and next to nothing beside it."""
    decoder = open_decoder(default_model(), torch.bfloat16)
    logits = paged_logits(decoder, default.ids, uneven(list(map(len, default.ids))), torch.bfloat16)
    ours = torch.cat(logits).double().log_softmax(-1)
    exact = torch.cat(default.exact).log_softmax(-1)
    divergence = (exact.exp() * (exact - ours)).sum(-1).mean().item()
    agreement = (exact.argmax(-1) == ours.argmax(-1)).double().mean().item()
    theirs = LlamaForCausalLM.from_pretrained(default.folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        reference = torch.cat([theirs(torch.tensor([ids])).logits[0] for ids in default.ids]).double().log_softmax(-1)
    usual = (exact.exp() * (exact - reference)).sum(-1).mean().item()
    print(f"KL divergence {divergence:.1e} (transformers {usual:.1e}), the same token {agreement:.1%}")
    assert divergence < usual
    assert agreement > 0.95


def test_default_model_ids(default):
    metadata = default_metadata()
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    assert default.ids == [tokenizer.encode(text).ids for text in TEXTS]


# Tiny random models


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = make_tiny(tmp_path_factory.mktemp(request.param) / "model", **TINY[request.param])
    tokenizer = Tokenizer.from_folder(folder)
    return Reference.of(folder, [tokenizer.encode(text) for text in TEXTS])


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_tiny_model(tiny, kind, tmp_path):
    path = tiny.folder if kind == "folder" else to_gguf(tiny.folder, tmp_path / "f32.gguf", GgmlType.F32)
    check_all_ways(open_decoder(path), tiny)


def test_tiny_model_ids(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder)
    assert tiny.ids == [tokenizer(text).input_ids for text in TEXTS]


def test_f16_gguf_is_the_folder_within_fp16_noise(tiny, tmp_path):
    """H24: that its matrices are rounded is the whole difference; rows left interleaved would be another model."""
    decoder = open_decoder(to_gguf(tiny.folder, tmp_path / "f16.gguf", GgmlType.F16))
    folder = Path(shutil.copytree(tiny.folder, tmp_path / "rounded"))
    edit_tensors(folder, lambda all_: all_.update({name: t.half().float() for name, t in all_.items() if t.ndim == 2}))
    rounded = Reference.of(folder, tiny.ids)
    for i, text in enumerate(tiny.ids):
        logits = paged_logits(decoder, [text], [[len(text)]])[0]
        rounded.check(i, logits)
        noise = ((logits - tiny.exact[i]).norm() / tiny.exact[i].norm()).item()
        print(f"{noise:.1e} of the logits' size away from the folder's")
        # a weight moves by at most 2^-11 of its size; two layers of products add up to some more
        assert 0 < noise < 4 * 2**-11


@torch.inference_mode()
def test_heads_that_do_not_share_the_hidden_size_out(tmp_path):
    folder = make_tiny(tmp_path, heads=4, kv_heads=2, head_dim=16, hidden_size=64)
    config = LlamaConfig.from_pretrained(folder)
    # not from the beginning: transformers' own check overlooks head_dim; its model does not
    config.num_attention_heads = 6
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config).eval()
    weights = {name: weight for name, weight in theirs.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, num_attention_heads=6)
    decoder = open_decoder(folder)
    assert (decoder.spec.n_heads, decoder.spec.head_dim, decoder.spec.hidden_size) == (6, 16, 64)
    text = list(range(5, 60))
    torch.testing.assert_close(
        paged_logits(decoder, [text], [[7, len(text) - 7]])[0], theirs(torch.tensor([text])).logits[0]
    )
