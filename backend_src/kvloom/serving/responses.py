"""Builds the output tensors of an answer's responses."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from kvloom.request import Delta, Sequence
from kvloom.serving.tensors import tensor
from kvloom.text.tokenizer import Tokenizer


def encoder(
    outputs: frozenset[str], tokenizer: Tokenizer, sequence: Sequence | None = None, echo: str = ""
) -> Callable[[Delta], list[Any]]:
    """Create a function that builds the output tensors of one answer's responses. Call it for each delta, in order.

    The tensors are ``pb_utils.Tensor`` of shape [1, n].

    Args:
        outputs: the names of the optional outputs that the request asks for.
        tokenizer: the model's tokenizer.
        sequence: the answer's sequence. Its prompt may be set later.
        echo: text that the answer begins with.
    """
    cumulative = 0.0
    # Making a tensor takes longer than sending it, so a tensor is reused while its value stays the same
    kept: dict[str, tuple[object, Any]] = {}

    def keep(name: str, value: object) -> Any:
        if name not in kept or kept[name][0] != value:
            kept[name] = (value, tensor(name, value))
        return kept[name][1]

    def encode(delta: Delta) -> list[Any]:
        nonlocal echo, cumulative
        tensors = [tensor("text_output", echo + delta.text)]
        echo = ""
        if "finish_reason" in outputs:
            tensors.append(keep("finish_reason", delta.finish_reason or ""))
        if "num_input_tokens" in outputs:
            tensors.append(keep("num_input_tokens", 0 if sequence is None else len(sequence.request.prompt_ids)))
        if "num_output_tokens" in outputs:
            tensors.append(keep("num_output_tokens", len(delta.tokens)))
        if "token_ids" in outputs:
            tensors.append(tensor("token_ids", *delta.token_ids))
        if "cumulative_logprob" in outputs:
            cumulative += sum(token.logprob or 0.0 for token in delta.tokens)
            tensors.append(tensor("cumulative_logprob", cumulative))
        if "logprobs" in outputs:
            tensors.append(tensor("logprobs", json.dumps(_logprobs(delta, tokenizer))))
        if "usage" in outputs and delta.usage is not None:
            tensors.append(tensor("usage", json.dumps(dataclasses.asdict(delta.usage))))
        return tensors

    return encode


def _logprobs(delta: Delta, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"id": token, "text": tokenizer.decode([token], skip_special_tokens=False), "logprob": logprob}

    return [entry(token.id, token.logprob) | {"top": [entry(*top) for top in token.top]} for token in delta.tokens]
