"""The model families that kvloom serves, one row each. To add a family, add a row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf

from kvloom.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the files of one family differ from those of another.

    Attributes:
        name: the family's name, as in ``ModelSpec.family`` and in Hugging Face's ``model_type``.
        hf_architecture: the class that ``architectures`` in config.json must name, in any capitalization (the first
            Llama checkpoints said ``LLaMAForCausalLM``).
        hf_defaults: values for keys that config.json omits.
        hf_serves: options of config.json that change the computation, each with the values that are supported.
        hf_ignored: suffixes of tensor names that the model does not need.
        gguf_arch: the architecture in the gguf library.
        gguf_permutes_qk: whether the GGUF converter interleaves the two halves of every head in the q and k
            projections. Loading puts the rows back in order, since the rotary embedding works on halves.
        gguf_serves: like ``hf_serves``, for metadata keys ``ARCH.KEY``.
        gguf_ignored: like ``hf_ignored``.
    """

    name: str
    hf_architecture: str
    hf_defaults: Mapping[str, Any]
    hf_serves: Mapping[str, tuple[Any, ...]]
    hf_ignored: tuple[str, ...]
    gguf_arch: gguf.MODEL_ARCH
    gguf_permutes_qk: bool
    gguf_serves: Mapping[str, tuple[Any, ...]]
    gguf_ignored: tuple[str, ...]

    @property
    def gguf_name(self) -> str:
        """The value of GGUF's ``general.architecture``, which is also the prefix of its metadata keys."""
        return gguf.MODEL_ARCH_NAMES[self.gguf_arch]


FAMILIES = (
    Family(
        name="llama",
        hf_architecture="LlamaForCausalLM",
        hf_defaults={
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
        },
        hf_serves={
            # "swish" is the older name of the same function
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "quantization_config": (),
            "compression_config": (),
        },
        # old checkpoints saved these buffers
        hf_ignored=("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
        gguf_arch=gguf.MODEL_ARCH.LLAMA,
        gguf_permutes_qk=True,
        gguf_serves={
            "expert_count": (0,),
            "use_parallel_residual": (False,),
            "attention.causal": (True,),
            "attention.sliding_window": (0,),
            "attention.scale": (0,),
            "attention.clamp_kqv": (0,),
            "attention.max_alibi_bias": (0,),
            "attn_logit_softcapping": (0,),
            "final_logit_softcapping": (0,),
            "logit_scale": (0, 1),
            "residual_scale": (0, 1),
            "embedding_scale": (0, 1),
            "rope.scaling.attn_factor": (0, 1),
            "rope.dimension_sections": (),
        },
        gguf_ignored=("attn_rot_embd.weight",),  # old converters copied the same buffer
    ),
)


def hf_family(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config.json.

    Raises:
        ModelError: the architecture or an option is not supported. The message names it.
    """
    model_type = config.get("model_type")
    family = next((row for row in FAMILIES if row.name == model_type), None)
    if family is None:
        raise _unsupported(model_type)
    architectures = config.get("architectures") or [family.hf_architecture]
    if [str(name).lower() for name in architectures] != [family.hf_architecture.lower()]:
        raise _unsupported(architectures)
    _refuse(config, family.hf_serves)
    return family


def gguf_family(metadata: Mapping[str, Any]) -> Family:
    """The family of a GGUF file's metadata.

    Raises:
        ModelError: the architecture or an option is not supported. The message names it.
    """
    architecture = metadata.get("general.architecture")
    family = next((row for row in FAMILIES if row.gguf_name == architecture), None)
    if family is None:
        raise _unsupported(architecture)
    _refuse(metadata, {f"{family.gguf_name}.{key}": values for key, values in family.gguf_serves.items()})
    return family


def _unsupported(architecture: object) -> ModelError:
    supported = ", ".join(row.name for row in FAMILIES)
    return ModelError(f"architecture {architecture!r} is not supported; kvloom serves: {supported}")


def _refuse(data: Mapping[str, Any], serves: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in serves.items():
        value = data.get(key)
        if value is not None and value not in values:
            served = " or ".join(map(repr, values)) or "only models without it"
            raise ModelError(f"{key}={value!r} is not supported; kvloom serves {served}")
