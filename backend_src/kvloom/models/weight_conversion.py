"""Converts a model's weights to the form that the setting ``weights`` asks for: plain or quantized."""

import logging
import math
from collections.abc import Mapping

import torch

from kvloom.errors import SettingsError
from kvloom.models.smoothing import TEXT, smoothing
from kvloom.models.spec import tensor_shapes
from kvloom.models.weights import ModelFiles
from kvloom.ops.linear import Weight
from kvloom.ops.linear_groups import GROUP, GroupedWeight
from kvloom.ops.linear_int8 import WIDE_GROUP, Int8Weight
from kvloom.ops.native import library
from kvloom.progress import Progress, phase
from kvloom.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TABLES = ("embed_tokens.weight", "lm_head.weight")
"""The embedding and the head."""

QUANTIZED = ("int8", "int4", "w8a8")
"""Values of the setting ``weights`` that quantize every matrix to integers."""

CPU = torch.device("cpu")


class ServedWeights:
    """Reads and converts each weight when it is taken, so that only packed weights stay in memory.

    - ``fp32`` and ``bf16`` are plain.
    - ``int4`` takes groups of 4-bit integers from a GGUF file as they are.
    - ``int8`` takes groups of 8-bit integers from the file, or quantizes to such groups.
    - ``w8a8`` smooths the weights (see ``smoothing``) and quantizes them to wider groups of 8-bit integers. The
      activations are quantized in the same groups.

    Whenever the layers are quantized, the embedding and the head are in groups of 8 bits. These groups have the usual
    width and are not smoothed.

    Args:
        files: the model.
        weights: fp32, bf16, int8, int4 or w8a8.
        dtype: dtype of the activations and of plain weights.
        smoothing: the result of ``smoothing``, for w8a8.
        device: where the products run.

    Raises:
        SettingsError: the file's types do not fit int4.
    """

    def __init__(
        self,
        files: ModelFiles,
        weights: str,
        dtype: torch.dtype,
        smoothing: Mapping[str, torch.Tensor] | None = None,
        device: torch.device = CPU,
    ):
        self._files = files
        self._weights = weights
        self._dtype = dtype
        self._smoothing = smoothing or {}
        self._left = {name: math.prod(shape) for name, shape in tensor_shapes(files.spec).items()}
        self._taken = 0
        self._progress = Progress(
            f"loading and packing the weights as {weights}", sum(self._left.values()), "million parameters"
        )
        if weights == "int4":
            self._check_int4()
        if weights in QUANTIZED and device.type == "cpu" and library() is None:
            log.warning("weights=%s: there are no C++ ops, so the weights are kept and computed in %s", weights, dtype)

    def __len__(self) -> int:
        """See ``WeightSource``."""
        return len(self._left)

    def pop(self, name: str, /) -> Weight:
        """See ``WeightSource``."""
        parameters = self._left.pop(name)
        # The weights taken before this one have been packed by now
        self._progress.at(self._taken)
        self._taken += parameters
        if self._weights not in QUANTIZED or len(tensor_shapes(self._files.spec)[name]) == 1:
            return self._plain(name).to(self._dtype)
        if self._weights == "w8a8":
            return Int8Weight(self._grouped(name, 8, GROUP if name in TABLES else WIDE_GROUP))
        return self._grouped(name, 4 if self._weights == "int4" and name not in TABLES else 8)

    def _plain(self, name: str) -> torch.Tensor:
        """The weight in fp32, smoothed."""
        tensor = self._files.tensor(name, torch.float32)
        if name in self._smoothing:
            factors = self._smoothing[name]
            tensor = tensor / (factors if tensor.ndim == 1 else factors[:, None])
        maker = input_maker(name)
        return tensor * self._smoothing[maker] if maker in self._smoothing else tensor

    def _grouped(self, name: str, bits: int, group: int = GROUP) -> GroupedWeight:
        stored = self._files.groups(name)
        if stored is not None and (stored.bits, stored.group) == (bits, group):
            return stored
        assert bits == 8, "int4 was accepted for a file with other types"
        return GroupedWeight.quantize(self._plain(name), group)

    def _check_int4(self) -> None:
        for name, shape in tensor_shapes(self._files.spec).items():
            if len(shape) == 1 or name in TABLES:
                continue
            kind = self._files.stored_as(name)
            if kind not in ("Q4_0", "Q4_1"):
                raise SettingsError(
                    f"setting weights='int4' needs a GGUF file with its layers in Q4_0 or Q4_1, but "
                    f"{self._files.path} has {name} in {kind}; choose int8, which takes any file"
                )


def converted_weights(
    files: ModelFiles, weights: str, dtype: torch.dtype, tokenizer: Tokenizer, device: torch.device = CPU
) -> ServedWeights:
    """A model's weights as the setting ``weights`` asks for. For w8a8 it first computes the smoothing factors.

    Args:
        files: the model.
        weights: fp32, bf16, int8, int4 or w8a8.
        dtype: dtype of the activations.
        tokenizer: the model's tokenizer.
        device: where the products run.

    Raises:
        SettingsError: the file's types do not fit int4.
        ModelError: a weight can't be read.
    """
    if weights != "w8a8":
        return ServedWeights(files, weights, dtype, device=device)
    phase("smoothing the weights for w8a8")
    with torch.inference_mode():
        factors = smoothing(files.spec, lambda name: files.tensor(name, torch.float32), tokenizer.encode(TEXT))
    return ServedWeights(files, weights, dtype, factors)


def input_maker(name: str) -> str:
    """The name of the weight whose output channels are the inputs of the product ``name``; empty if there is none.

    It is a norm's weight. For an MLP's second product, which reads silu(gate) * up, it is up's weight.
    """
    for product, maker in (
        ("self_attn.q_proj", "input_layernorm"),
        ("self_attn.k_proj", "input_layernorm"),
        ("self_attn.v_proj", "input_layernorm"),
        ("mlp.gate_proj", "post_attention_layernorm"),
        ("mlp.up_proj", "post_attention_layernorm"),
        ("mlp.down_proj", "mlp.up_proj"),
    ):
        if product in name:
            return name.replace(product, maker)
    return ""
