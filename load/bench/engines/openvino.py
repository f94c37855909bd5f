"""OpenVINO GenAI's continuous batching pipeline on the CPU."""

import os
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from bench.engines.protocol import Prompts, serve


class OpenVino:
    """The pipeline, in this process."""

    def __init__(self, model: str, options: dict[str, Any]):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = options["kv_gib"]
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": int(options["threads"]), **options["properties"]}
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.versions = {name: version(name) for name in ("openvino-genai", "openvino")}
        self.pid = os.getpid()

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """See ``Engine``."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        answers = self.pipeline.generate(tensors, [config] * len(prompts))
        return [list(answer.m_generation_ids[0]) for answer in answers]

    def close(self) -> None:
        """See ``Engine``."""


if __name__ == "__main__":
    serve(OpenVino)
