"""Installs kvloom from this clone into .venv and shows the progress.

Run: python3 .ci/setup.py SIZE EXTRAS
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(".venv")
LOG = FOLDER / "setup.log"
TAIL_LINES = 20
LOOK_S = 0.5
LINE_EVERY_S = 20
"""Seconds between two progress lines if the output is not a terminal."""


def main():
    """Check this Python, create the environment and install kvloom."""
    size, extras = sys.argv[1:]
    version = sys.version_info[:2]
    if not (3, 11) <= version < (3, 14):
        sys.exit(
            f"kvloom needs Python 3.11 to 3.13, but {sys.executable} is {version[0]}.{version[1]}; "
            "run make PYTHON=/path/to/python3.11"
        )
    start = time.monotonic()
    FOLDER.mkdir(exist_ok=True)
    LOG.write_bytes(b"")
    print(f"creating {FOLDER}", flush=True)
    run(sys.executable, "-m", "venv", str(FOLDER))
    print(f"installing kvloom[{extras}]: {size} with torch's CPU build; the first time takes minutes", flush=True)
    pip = [str(FOLDER / "bin" / "python"), "-u", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    run(*pip, "-c", ".ci/constraints.txt", "-e", "./client", "-e", f".[{extras}]")
    print(f"set up in {time.monotonic() - start:.0f} s", flush=True)


def run(*command):
    """Run a command with its output in the log. If it fails, exit with the end of the output."""
    with LOG.open("ab") as log:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        follow(running)
    finally:
        running.kill()
    if running.returncode:
        failed = f"{' '.join(command[:5])} ... failed; the end of {LOG.resolve()}:"
        sys.exit("\n  | ".join([failed, *said()[-TAIL_LINES:]]))


def follow(running):
    """Show the last line of the log until the command ends. On a terminal the line is updated in place."""
    start = shown = time.monotonic()
    terminal = sys.stdout.isatty()
    while running.poll() is None:
        time.sleep(LOOK_S)
        now = time.monotonic()
        # Skip pip's indented lines about packages that it replaces
        steps = [step for step in said() if not step.startswith(("    ", "  Attempting"))]
        line = f"  {now - start:3.0f} s  {steps[-1].strip() if steps else ''}"
        if terminal:
            print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif now - shown >= LINE_EVERY_S:
            print(line[:120], flush=True)
            shown = now
    if terminal:
        print("\r\033[K", end="", flush=True)


def said():
    """The lines of the log."""
    return [line for line in LOG.read_text(errors="replace").splitlines() if line.strip()]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
