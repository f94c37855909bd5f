"""transformers' ``generate``: one batch of prompts of the same length, no cache between calls."""

import os
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.engines.protocol import Prompts, serve


class Transformers:
    """The model alone."""

    def __init__(self, model: str, options: dict[str, Any]):
        torch.set_num_threads(int(options["threads"]))
        dtype = getattr(torch, options["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.versions = {name: version(name) for name in ("transformers", "torch")}
        self.pid = os.getpid()

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """See ``Engine``."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            answers = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return answers[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        """See ``Engine``."""


if __name__ == "__main__":
    serve(Transformers)
