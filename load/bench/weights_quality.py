"""Measures the loss of quality of each setting of ``weights``: compares its logits of a text with those of fp32.

    python load/bench/weights_quality.py --tokens 4096 --report build/reports/weights.json

The text is the English text of this repository, READMEs and source files. The calibration of w8a8 does not use it.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvloom.config import Settings
from kvloom.executor.runner import build_batch
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Decoder
from kvloom.models.fetch import cache_folder, default_model
from kvloom.models.footprint import weights_bytes
from kvloom.models.weight_conversion import converted_weights
from kvloom.models.weights import ModelFiles, open_model
from kvloom.ops.native import use_native
from kvloom.planning.dtypes import DTYPES, activations_name, weights_name
from kvloom.request import Request, SamplingParams, Sequence, Slice
from kvloom.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
WINDOW = 512
"""Tokens that are computed together. Each window is a separate prompt."""

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Quality:
    """The comparison of a setting with fp32, over all positions.

    Attributes:
        weights: the setting.
        mib: size of the weights.
        kl: mean Kullback-Leibler divergence of the next token's distribution, in nats.
        kl_99: its 99th percentile.
        top1: share of positions with the same most likely token.
        loss: mean negative log likelihood of the text, minus that of fp32.
    """

    weights: str
    mib: float
    kl: float
    kl_99: float
    top1: float
    loss: float


def text_windows(tokenizer: Tokenizer, tokens: int, window: int = WINDOW) -> list[list[int]]:
    """The repository's English text, in windows of token ids."""
    paths = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *sorted((ROOT / "backend_src").rglob("*.py"))]
    text = "\n".join(path.read_text() for path in paths)
    ids = tokenizer.encode(text[: tokens * 8])[:tokens]
    return [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]


class Model:
    """A decoder with a cache of one sequence."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer, weights: str):
        settings = Settings.parse({"weights": weights})
        dtype = DTYPES[activations_name(settings)]
        spec = files.spec
        self.bytes = weights_bytes(spec, weights_name(settings), dtype)
        self._decoder = Decoder(spec, converted_weights(files, weights_name(settings), dtype, tokenizer), dtype)
        geometry = BlockGeometry(spec.n_layers, spec.n_kv_heads, spec.head_dim, BLOCK_SIZE)
        self._storage = Storage(PlainCodec(dtype), geometry, WINDOW // BLOCK_SIZE, torch.device("cpu"))

    @torch.inference_mode()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """The log probabilities of each position's next token, fp32 [T, vocab]."""
        sequence = Sequence(Request(id="", prompt_ids=tuple(ids), params=SamplingParams(), arrival=0.0))
        sequence.blocks = list(range(WINDOW // BLOCK_SIZE))
        batch = build_batch([Slice(sequence, 0, len(ids))], BLOCK_SIZE)
        batch = replace(batch, logit_rows=torch.arange(len(ids)))
        return self._decoder.forward(batch, self._storage.layers).log_softmax(-1)


class Comparison:
    """Accumulates the differences between one setting and fp32."""

    def __init__(self) -> None:
        self._kl: list[torch.Tensor] = []
        self._same: list[torch.Tensor] = []
        self._loss: list[torch.Tensor] = []

    def add(self, ids: list[int], truth: torch.Tensor, ours: torch.Tensor) -> None:
        """Add a window's log probabilities, fp32 [T, vocab]."""
        self._kl.append((truth.exp() * (truth - ours)).sum(-1))
        self._same.append(truth.argmax(-1) == ours.argmax(-1))
        self._loss.append((truth - ours)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])

    def result(self, weights: str, size: int) -> Quality:
        """The figures. ``size`` is the size of the weights in bytes."""
        kl = torch.cat(self._kl)
        return Quality(
            weights=weights,
            mib=round(size / 2**20, 1),
            kl=kl.mean().item(),
            kl_99=kl.quantile(0.99).item(),
            top1=torch.cat(self._same).float().mean().item(),
            loss=torch.cat(self._loss).mean().item(),
        )


def measure(files: ModelFiles, tokenizer: Tokenizer, settings: list[str], windows: list[list[int]]) -> list[Quality]:
    """Compare settings with fp32."""
    reference = Model(files, tokenizer, "fp32")
    models = {name: Model(files, tokenizer, name) for name in settings}
    comparisons = {name: Comparison() for name in settings}
    for ids in windows:
        truth = reference.log_probs(ids)
        for name, model in models.items():
            comparisons[name].add(ids, truth, model.log_probs(ids))
    return [comparisons[name].result(name, model.bytes) for name, model in models.items()]


def main() -> None:
    """Measure, print the figures and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or a Hugging Face folder; default: the default model")
    parser.add_argument("--weights", default="bf16,int8,int4,w8a8", help="settings to compare with fp32")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text")
    parser.add_argument("--report", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    use_native(cache_folder("ops"))
    files = open_model(options.model or default_model())
    tokenizer = Tokenizer.from_gguf(files.metadata) if files.kind == "gguf" else Tokenizer.from_folder(files.path)
    windows = text_windows(tokenizer, options.tokens)
    rows = measure(files, tokenizer, options.weights.split(","), windows)
    table = Table("weights", "MiB", "KL", "KL, 99 %", "same top 1", "loss")
    for row in rows:
        table.add_row(
            row.weights, f"{row.mib}", f"{row.kl:.5f}", f"{row.kl_99:.4f}", f"{row.top1:.4f}", f"{row.loss:+.4f}"
        )
    Console().print(table)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        meta = {"model": str(files.path), "tokens": len(windows) * WINDOW, "reference": "fp32"}
        options.report.write_text(json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
