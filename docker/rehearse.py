"""Tests the cpu image without Docker: builds it in a chroot, starts it, sends a request and stops it.

It executes the Dockerfile's lines on a minimal Debian with Debian's Python 3.11 instead of python:3.11-slim-bookworm.
The container is a set of namespaces: only a loopback network, 64 MiB of shared memory (Docker's default), a separate
process tree, user 1000. Needs root, and debootstrap from Debian. Run: python3 docker/rehearse.py FOLDER
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
PYTHON = "ca-certificates libpython3.11 python3-pip python3-venv"

START = """
set -eu
mount --make-rprivate /
mount -t proc proc "$ROOT/proc"
mount -t tmpfs -o size=64m shm "$ROOT/dev/shm"
ip link set lo up
inside() { chroot --userspec=1000:1000 "$ROOT" /usr/bin/env -i -C "$WORKDIR" $ENVIRONMENT "$@"; }
healthy() { inside sh -c "$HEALTHCHECK" 2>/dev/null; }
if healthy; then echo "healthy before the start"; exit 1; fi
chroot --userspec=1000:1000 "$ROOT" /usr/bin/env -i -C "$WORKDIR" $ENVIRONMENT $COMMAND >"$ROOT/tmp/out" &
for _ in $(seq 600); do healthy && break; kill -0 $! || exit 1; sleep 0.5; done
cat "$ROOT/tmp/out"
grep -q '^kvloom ready ' "$ROOT/tmp/out"
inside kvloom generate --temperature=0 --max-tokens=12 'What is the capital of France?'
df -k "$ROOT/dev/shm" | tail -n 1
kill -TERM $!
wait $!
echo "stopped with exit code 0"
if healthy; then echo "healthy after the stop"; exit 1; fi
test -z "$(ls -A "$ROOT/dev/shm")"
echo "no shared memory left"
"""


def instructions(stage: str) -> list[tuple[str, str]]:
    """The lines of a stage of the Dockerfile, as pairs (instruction, rest)."""
    lines = re.sub(r"(?m)^\s*#.*\n", "", (SOURCE / "docker" / "Dockerfile").read_text()).replace("\\\n", " ")
    [body] = re.findall(rf"(?ms)^FROM \S+ AS {stage}$(.*?)(?=^FROM|\Z)", lines)
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in body.splitlines() if line.strip()]


def copy_context(target: Path) -> None:
    """Copy the build context: all files that git does not ignore and .dockerignore allows."""
    kept = [line[1:] for line in (SOURCE / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    listing = ["git", "-C", str(SOURCE), "ls-files", "-co", "--exclude-standard", "--", *kept]
    for name in subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / name, target / name)


def in_chroot(root: Path, command: str, environment: dict[str, str], workdir: str, user: int = 0) -> None:
    """Run a shell command in the chroot."""
    variables = [f"{key}={value}" for key, value in environment.items()]
    full = ["chroot", f"--userspec={user}:{user}", str(root), "/usr/bin/env", "-i", "-C", workdir, *variables]
    subprocess.run([*full, "sh", "-c", command], check=True)


def build(root: Path, stage: str, environment: dict[str, str]) -> dict[str, str]:
    """Execute a stage. Returns its other instructions, such as CMD, by name."""
    said = {"WORKDIR": "/", "USER": "0"}
    for name, rest in instructions(stage):
        print(f"  {name} {rest}", flush=True)
        if name == "RUN":
            in_chroot(root, rest, environment, said["WORKDIR"], int(said["USER"]))
        elif name == "COPY" and rest == ". .":
            copy_context(root / said["WORKDIR"].lstrip("/"))
        elif name == "COPY":
            assert rest == "--from=wheels /wheels /wheels", rest  # already there, because all stages share one root
        elif name == "ENV":
            pairs = dict(pair.split("=", 1) for pair in shlex.split(rest))
            environment.update({key: value.replace("$PATH", environment["PATH"]) for key, value in pairs.items()})
        else:
            said[name] = rest
            if name == "WORKDIR":
                (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return said


def carry_pip_configuration(root: Path) -> dict[str, str]:
    """Copy this machine's pip and network configuration into the chroot. Returns its environment variables."""
    carried = [Path("/etc/resolv.conf"), Path("/etc/hosts"), Path("/etc/pip.conf")]
    carried += [Path(os.environ[name]) for name in ("PIP_CERT", "PIP_FIND_LINKS") if name in os.environ]
    for path in carried:
        if path.is_dir():
            shutil.copytree(path, root / path.relative_to("/"), dirs_exist_ok=True)
        elif path.is_file():
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to("/"))
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}


def main() -> None:
    """Build the image, start it, send a request and stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder to build in: empty, or of an earlier run")
    root = parser.parse_args().folder.resolve()
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
    finished = root / ".debian-for-kvloom"
    if not finished.exists():
        if root.exists() and any(root.iterdir()):
            parser.error(f"{root} is neither empty nor of an earlier run")
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True)
        in_chroot(root, f"apt-get update && apt-get install -y --no-install-recommends {PYTHON}", environment, "/")
        finished.touch()
    environment |= {"PIP_EXTRA_INDEX_URL": ""} | carry_pip_configuration(root)
    for folder in ("src", "wheels", "opt/kvloom", "cache"):
        shutil.rmtree(root / folder, ignore_errors=True)
    if "kvloom:" in (root / "etc/passwd").read_text():
        in_chroot(root, "userdel --remove kvloom", environment, "/")
    build(root, "wheels", environment)
    image = build(root, "cpu", environment)
    user = int(image["USER"])
    environment["HOME"] = "/home/kvloom"
    in_chroot(
        root,
        "python3 -c 'from kvloom.models.fetch import default_model; print(default_model())'",
        environment,
        "/",
        user,
    )
    used = subprocess.run(["du", "-sm", str(root / "opt/kvloom")], check=True, capture_output=True, text=True).stdout
    print(f"/opt/kvloom: {used.split()[0]} MiB")
    command = [part.replace("0.0.0.0", "127.0.0.1") for part in json.loads(image["CMD"])] + ["--set=threads=1"]
    check = json.loads(image["HEALTHCHECK"].split(" CMD ", 1)[1])
    variables = {
        "ROOT": str(root),
        "WORKDIR": image["WORKDIR"],
        "ENVIRONMENT": " ".join(f"{key}={environment[key]}" for key in ("PATH", "HOME", "XDG_CACHE_HOME")),
        "COMMAND": shlex.join(command),
        "HEALTHCHECK": shlex.join(check),
        "PATH": os.environ["PATH"],
    }
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    subprocess.run([*namespaces, "sh", "-c", START], check=True, env=variables)


if __name__ == "__main__":
    main()
