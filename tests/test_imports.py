"""Dependencies point one way: what each part of the package may import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "backend_src" / "kvloom"

NOUNS = {
    "admin",
    "config",
    "control_groups",
    "cores",
    "errors",
    "faults",
    "paths",
    "private",
    "progress",
    "request",
    "secret",
}
"""Modules at the top, which every department but ops may import."""

MAY_IMPORT = {
    "ops": "",
    "text": "",
    "kv": "",
    "scheduling": "kv",
    "models": "kv ops text",
    "decoding": "ops",
    "executor": "kv ops models decoding",
    "conversation": "scheduling text",
    "planning": "kv models",
    "engine": "kv ops models text scheduling conversation executor planning",
    "serving": "text scheduling conversation engine",
    "launcher": "models planning",
}
"""By department: the others that it may import. All of them stand above it, so that no two import each other."""

USE_TORCH = {"ops", "kv", "models", "decoding", "executor", "planning", "engine"}
PLAIN = {"kvloom.kv.blocks", "kvloom.kv.cache", "kvloom.kv.prefix_index", "kvloom.engine.observations"}
"""As plain as the scheduler and the nouns, though their departments use torch."""


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
BASE = {f"kvloom.{name}" for name in NOUNS}


def ours(module: str) -> set[str]:
    return {name for name in MODULES[module] if name.split(".")[0] == "kvloom"}


def department(module: str) -> str:
    """The folder that a module lies in; "" for what lies at the top."""
    inner = module.split(".")[1:]
    return inner[0] if len(inner) > 1 or FILES[module].name == "__init__.py" and inner else ""


def users_of(library: str) -> set[str]:
    """The modules that import a library or a part of it."""
    found = {module for module, names in MODULES.items() if library in {name.split(".")[0] for name in names}}
    assert found
    return found


def reached(module: str) -> set[str]:
    """Every module of the package that a module needs, directly or not."""
    seen, todo = set(), [module]
    while todo:
        new = ours(todo.pop()) - seen
        seen |= new
        todo += new
    return seen


def test_every_import_of_ours_is_a_module():
    assert {name for module in MODULES for name in ours(module)} <= set(MODULES)


def test_every_module_is_a_noun_or_in_a_department():
    assert {name for name in MODULES if not department(name)} == BASE | {"kvloom"}
    assert {department(name) for name in MODULES} - {""} == set(MAY_IMPORT)


def test_the_table_goes_one_way():
    above = set()
    for name, others in MAY_IMPORT.items():
        assert set(others.split()) <= above, name
        above.add(name)
    # nothing inside knows who serves it or who starts it
    assert not {"serving", "launcher"} & {other for others in MAY_IMPORT.values() for other in others.split()}


@pytest.mark.parametrize("module", sorted(BASE))
def test_nouns_need_only_nouns(module):
    assert ours(module) <= BASE


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_department_imports_what_it_may(name):
    allowed = {"", name, *MAY_IMPORT[name].split()}
    for module in MODULES:
        if department(module) == name:
            assert {department(used) for used in ours(module)} <= allowed, (module, ours(module))


def test_torch_stays_where_tensors_are():
    # `kvloom plan` asks torch what device there is
    assert {department(module) for module in users_of("torch") - {"kvloom.launcher.cli"}} <= USE_TORCH


@pytest.mark.parametrize("module", sorted(BASE | PLAIN | {name for name in FILES if department(name) == "scheduling"}))
def test_scheduling_and_what_it_stands_on_is_plain_python(module):
    needed = reached(module)
    assert {name for name in needed if department(name) != "scheduling"} <= BASE | PLAIN
    for name in needed | {module}:
        assert not {used for used in MODULES[name] if used.split(".")[0] in ("torch", "triton", "numpy")}, name


def test_ops_know_nothing_of_ours():
    assert not {name for module in MODULES if department(module) == "ops" for name in ours(module) & BASE}


def test_models_know_codecs_and_tokenizers_only():
    known = {name for module in MODULES if department(module) == "models" for name in ours(module)}
    assert {name for name in known if department(name) in ("kv", "text")} <= {
        "kvloom.kv.codec",
        "kvloom.text.tokenizer",
    }


def test_only_serving_sees_tritons_backend():
    assert {department(module) for module in users_of("triton_python_backend_utils")} == {"serving"}


def test_only_the_launcher_is_a_client():
    assert {department(module) for module in users_of("kvloom_client")} == {"launcher"}


def test_client_never_imports_the_server():
    files = list((ROOT / "client" / "kvloom_client").rglob("*.py"))
    assert files
    for path in files:
        assert not {name for name in imports_of(path) if name.split(".")[0] == "kvloom"}, path


def test_a_server_without_a_gpu_never_imports_triton():
    assert all(module.startswith("kvloom.ops.gpu.") for module in users_of("triton"))


@pytest.mark.parametrize(
    "module", ["kvloom.executor.gpu_step", "kvloom.executor.graphs", "kvloom.executor.step_buffers"]
)
def test_a_step_on_a_gpu_needs_no_settings(module):
    """So that the GPU check runs with little more than torch and triton."""
    assert not {name for used in reached(module) | {module} for name in MODULES[used]} & {"pydantic", "gguf"}


def test_generate_loads_no_engine_and_no_tokenizer(tmp_path):
    (tmp_path / "triton_python_backend_utils.py").touch()
    code = "import sys; sys.path.append(sys.argv[1]); import kvloom.serving.generate; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert {"kvloom", "numpy"} <= loaded
    assert not loaded & {"torch", "triton", "transformers", "tokenizers", "jinja2", "tritonclient"}
