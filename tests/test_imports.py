"""Dependencies point one way: what each part of the package may import."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "backend_src" / "kvloom"

BASE = {"kvloom.errors", "kvloom.config", "kvloom.request"}
SUBMODULES = {f"kvloom.{path.stem}" for path in PACKAGE.glob("*.py")}
SCHEDULING = ("waiting", "timers", "residency", "scheduler")
PLAIN = {
    f"kvloom.{name}"
    for name in ("kv.blocks", "kv.cache", "engine.observations", *map("scheduling.{}".format, SCHEDULING))
}
"""The scheduler and what it stands on: no torch, neither directly nor through what they import."""


def name_of(path: Path) -> str:
    """A file's module; an __init__.py is its package."""
    *folders, last = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(folders if last == "__init__" else [*folders, last])


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & set(FILES) or {node.module}
    return found


MODULES = {name: imports_of(path) for name, path in FILES.items()}


def ours(module: str) -> set[str]:
    return {name for name in MODULES[module] if name.split(".")[0] == "kvloom"}


def reached(module: str) -> set[str]:
    """Every module of the package that a module needs, directly or not."""
    seen, todo = set(), [module]
    while todo:
        new = ours(todo.pop()) - seen
        seen |= new
        todo += new
    return seen


def in_folder(folder: str) -> list[str]:
    found = [module for module in MODULES if module.startswith(f"kvloom.{folder}.")]
    assert found, f"no modules in {folder}"
    return found


def test_every_import_of_ours_is_a_module():
    assert {name for module in MODULES for name in ours(module)} <= set(MODULES)


@pytest.mark.parametrize("module", sorted(BASE))
def test_base_needs_only_base(module):
    assert ours(module) <= BASE


@pytest.mark.parametrize("module", sorted(PLAIN))
def test_scheduling_is_plain_python(module):
    needed = reached(module)
    assert needed <= BASE | PLAIN
    for name in needed | {module}:
        assert not {used for used in MODULES[name] if used.split(".")[0] in ("torch", "triton", "numpy")}, name


@pytest.mark.parametrize("module", in_folder("ops"))
def test_ops_know_nothing_of_ours(module):
    assert not {name for name in ours(module) if not name.startswith("kvloom.ops.")}


@pytest.mark.parametrize("module", in_folder("models"))
def test_models_stand_on_ops_and_codecs(module):
    assert all(
        name.startswith(("kvloom.models.", "kvloom.ops."))
        or name in BASE | {"kvloom.kv.codec", "kvloom.text.tokenizer"}
        for name in ours(module)
    ), ours(module)


def test_engine_does_not_know_who_serves_it():
    for module in MODULES:
        if not module.startswith("kvloom.serving."):
            assert not {name for name in ours(module) if name.startswith("kvloom.serving")}, module


def test_only_serving_sees_tritons_backend():
    users = {module for module, names in MODULES.items() if "triton_python_backend_utils" in names}
    assert users
    assert all(module.startswith("kvloom.serving.") for module in users)


def test_client_never_imports_the_server():
    files = list((ROOT / "client" / "kvloom_client").rglob("*.py"))
    assert files
    for path in files:
        assert not {name for name in imports_of(path) if name.split(".")[0] == "kvloom"}, path


def test_a_server_without_a_gpu_never_imports_triton():
    users = {module for module, names in MODULES.items() if "triton" in names}
    assert users
    assert all(module.startswith("kvloom.ops.gpu.") for module in users)


@pytest.mark.parametrize(
    "module", ["kvloom.executor.gpu_step", "kvloom.executor.graphs", "kvloom.executor.step_buffers"]
)
def test_a_step_on_a_gpu_needs_no_settings(module):
    """So that the GPU check runs with little more than torch and triton."""
    assert not {name for used in reached(module) | {module} for name in MODULES[used]} & {"pydantic", "gguf"}
