"""The shape of the library: what is public, which room imports which, and that importing does nothing."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import crate_hooks
import crate_interp as ci

PACKAGE, HOOKS = Path(ci.__file__).parent, Path(crate_hooks.__file__).parent
HERE = Path(__file__).parent
# each room may import the rooms in the lines above its own
LEVELS = [
    {"checks", "families", "files", "errors", "crate_hooks"},
    {"measures"},
    {"config"},
    {"models"},
    {"checkpoints", "data"},
    {"probes", "maps"},
    {"sweeps"},
    {"audits", "segmentation", "circuits"},
    {"viz"},
    {"cli"},
]
# the hooked models offer save_pretrained; the format lives with the other formats and is imported when it is called
EXCEPTIONS = {("models/sharing.py", "checkpoints")}
FREE_OF_TRANSFORMERLENS = {
    "checks",
    "errors",
    "families",
    "files",
    "config",
    "measures",
    "crate_hooks",
}

FUNCTIONS = (
    "atlas", "atoms", "audit", "linear_probe", "list_models", "load", "probe", "report", "segment", "sweep", "verify",
)  # fmt: skip


def sources():
    for root in (PACKAGE, HOOKS):
        yield from sorted(root.rglob("*.py"))


def room_of(path):
    if HOOKS in path.parents:
        return "crate_hooks"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [alias.name for alias in node.names]
            yield from (
                [f"{node.module}.{name}" for name in names]
                if node.module == "crate_interp"
                else [node.module]
            )


def test_imports_flow_one_way():
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    for path in sources():
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        assert room in level, f"{path}: a room that LEVELS does not list"
        for name in imports(path):
            parts = name.split(".")
            if room in FREE_OF_TRANSFORMERLENS:
                assert parts[0] != "transformer_lens", path
            target = (
                "crate_hooks"
                if parts[0] == "crate_hooks"
                else parts[1]
                if name.startswith("crate_interp.")
                else None
            )
            if target in (None, room, "__version__"):
                continue
            if path.parent != PACKAGE and (f"{path.relative_to(PACKAGE)}", target) in EXCEPTIONS:
                continue
            assert level[target] < level[room], f"{path} imports {name}"


def test_config_imports_neither_torch_nor_transformerlens():
    code = "import crate_interp.config, sys; print([m for m in ('torch', 'transformer_lens', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names():
    assert ci.__all__ == [
        "Atlas",
        "AtomResult", "AuditResult", "CheckpointError", "CrateConfig", "HookedCrate", "HookedCrateCLIP", "HookedCrateLM",
        "HookedCrateMAE", "Past", "Probe", "SegmentResult", "SparseAutoencoder", "SweepResult", "atlas", "atoms", "audit", "circuits",
        "data", "hooks",
        "linear_probe", "list_models", "load", "maps", "measures", "probe", "probes", "report", "segment", "sweep", "verify", "viz",
    ]  # fmt: skip
    for name in ci.__all__:
        assert getattr(ci, name) is not None
    assert set(dir(ci)) == {*ci.__all__, "__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'sweeep'; it has Atlas"):
        _ = ci.sweeep


def test_every_module_can_be_imported_by_its_own_name():
    """`import a.b.c as r` reads attributes, so that a function of a module's name would hide the module."""
    names = [
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for root in (PACKAGE, HOOKS)
        for path in sorted(root.rglob("*.py"))
        if path.name != "__main__.py"
    ]
    lines = ["from types import ModuleType"]
    for name in names:
        lines += [
            f"import {name} as r",
            f"assert isinstance(r, ModuleType) and r.__name__ == {name!r}, r",
        ]
    lines += ["import crate_interp as ci"]
    lines += [f"assert callable(ci.{name}), {name!r}" for name in FUNCTIONS]
    out = subprocess.run(
        [sys.executable, "-"], input="\n".join(lines), capture_output=True, text=True
    )
    assert not out.returncode, out.stderr.splitlines()[-1]


def test_importing_does_nothing():
    code = (
        "import sys; before = set(sys.modules); import crate_interp; print(sorted(m.split('.')[0] for m in "
        "set(sys.modules) - before if m.split('.')[0] in ('torch', 'numpy', 'pandas', 'importlib_metadata', 'crate_hooks')))\n"
        "print('importlib.metadata' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "False"] and out.stderr == ""


def test_importing_loads_few_modules():
    """29 of the standard library today. The count stands for a time, which no test can measure."""
    code = "import sys; n = len(sys.modules); import crate_interp; print(len(sys.modules) - n)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 60


def test_nothing_is_unpickled_or_executed():
    for path in sources():
        text = path.read_text()
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, path
        for word in (
            "weights_only=False",
            "trust_remote_code",
            "import pickle",
            "allow_pickle",
            "set_num_threads",
            "exec(",
        ):
            assert word not in text, f"{path}: {word}"


def test_no_file_and_no_function_is_long():
    for path in [*sources(), *HERE.rglob("*.py")]:
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_public_functions_have_docstrings():
    for path in sources():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree) or not tree.body, path
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"


def test_versions_are_pinned_and_ranges_hold_them():
    from packaging.requirements import Requirement

    pyproject = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==")
        for line in (HERE.parent / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pins = {name.lower().replace("_", "-"): number for name, number in pins.items()}
    for text in [*pyproject["dependencies"], *pyproject["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), f"{text} does not hold the tested {pin}"
    assert pins["torch"] == "2.13.0"
