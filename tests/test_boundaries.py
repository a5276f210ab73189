"""What is public, which room imports which, and that importing does nothing."""

import ast
import inspect
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import crate_hooks
import crate_interp as ci

PACKAGE, HOOKS = Path(ci.__file__).parent, Path(crate_hooks.__file__).parent
HERE = Path(__file__).parent
# each room may import the rooms in the lines above its own
LEVELS = [
    {"core"},
    {"config", "measures", "crate_hooks", "stats"},
    {"results"},
    {"models"},
    {"checkpoints", "data"},
    {"probes"},
    {"questions"},
    {"sweeps"},
    {"audits", "segmentation", "circuits", "surgeries"},
    {"comparisons", "saes", "training"},
    {"bridge"},
    {"viz"},
    {"reports"},
    {"cli"},
]
# the imports that look back when they are called: from_pretrained is ci.load with another name, and
# what notebooks show asks for its drawing
LOOKS_BACK = {
    ("models/cache.py", "_repr_html_", "crate_interp.viz.page"),
    ("config/base.py", "_repr_html_", "crate_interp.viz.page"),
    ("models/saving.py", "from_pretrained", "crate_interp.checkpoints.load"),
    ("circuits/circuit.py", "svg", "crate_interp.viz.circuit_figures"),
    ("circuits/circuit.py", "svg", "crate_interp.viz.page"),
}
FREE_OF_TRANSFORMERLENS = set().union(*LEVELS[:3], {"data"})
MOST_FILES = 20  # of a folder

FUNCTIONS = [name for name in ci.__all__ if inspect.isfunction(getattr(ci, name))]


def sources():
    for root in (PACKAGE, HOOKS):
        yield from sorted(root.rglob("*.py"))


def room_of(path):
    if HOOKS in path.parents:
        return "crate_hooks"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path):
    root = HOOKS if HOOKS in path.parents else PACKAGE
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sources()}


def imports(node, function=None):
    """(module, function) of every import of this library, but those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"a relative import of {child.module}"
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                yield name if name in MODULES else child.module, function
        else:
            inner = child.name if isinstance(child, ast.FunctionDef) else function
            yield from imports(child, inner)


@cache
def imports_of(path):
    at = f"{path.relative_to(PACKAGE.parent)}" if HOOKS not in path.parents else path.name
    at, found = at.removeprefix("crate_interp/"), imports(ast.parse(path.read_text()))
    return [name for name, function in found if (at, function, name) not in LOOKS_BACK]


def test_imports_flow_one_way():
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    for path in sources():
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        assert room in level, f"{path}: a room that LEVELS does not list"
        for name in imports_of(path):
            if room in FREE_OF_TRANSFORMERLENS:
                assert name.split(".")[0] != "transformer_lens", path
            target = room_of(MODULES[name]) if name in MODULES else room
            assert (room, target) != ("data", "models"), path  # what reads data knows no model
            if target not in (room, "__init__"):
                assert level[target] < level[room], f"{path} imports {name}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        module: {name for name in imports_of(path) if name in MODULES}
        for module, path in MODULES.items()
    }
    done = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_every_file_stands_in_a_room_and_no_folder_is_crowded():
    loose = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert loose == {"__init__.py", "__main__.py", "py.typed"}
    for root in (PACKAGE, HOOKS):
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        for folder in (path for path in folders if path.name != "__pycache__"):
            files = [path for path in folder.iterdir() if path.is_file()]
            assert len(files) <= MOST_FILES, f"{folder} has {len(files)} files"
            assert folder.name not in FUNCTIONS, f"{folder} bears the name of a function"


def test_public_names():
    """What type checkers read, and what loads when it is first used, are the names of __all__."""
    assert ci.__all__ == sorted(ci._MODULE_OF)
    assert all(getattr(ci, name) is not None for name in ci.__all__)
    assert set(dir(ci)) == {*ci.__all__, "__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'sweeep'; it has Atlas"):
        _ = ci.sweeep


def test_a_figure_loads_no_question(tmp_path):
    model = ci.load("crate-tiny-fashion")
    ci.sweep(model, "embedded:fashion", limit=2, progress=False).save(tmp_path)
    code = f"""import sys, crate_interp as ci
ci.viz.layers(ci.SweepResult.load({str(tmp_path)!r}), "compression.rate_mid")
print([m for m in sys.modules if m.startswith(("crate_interp.questions", "crate_interp.circuits"))])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["crate-tiny-fashion", "crate-tiny-lm"])
def test_slow_modules_load_when_they_are_needed(name):
    """Loading, caching and sweeping import none of them, a figure matplotlib alone."""
    code = f"""import sys, crate_interp as ci
slow = ("sympy", "torch._dynamo", "scipy.stats", "sklearn", "matplotlib", "ray")
model, text, data = ci.load({name!r}), "In the beginning", "embedded:held-out-text"
if model.unit == "images":
    text, data = model.preprocess(ci.data.embedded("fashion")[:1]["image"]), "embedded:fashion"
model.run_with_cache(text)
print([each for each in slow if each in sys.modules])
result = ci.sweep(model, data, limit=1, progress=False)
print([each for each in slow if each in sys.modules])
ci.viz.layers(result, "compression.official_rate")
print([each for each in slow if each in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["[]", "[]", "['matplotlib']"]


def test_importing_does_nothing():
    code = (
        "import sys; before = set(sys.modules); import crate_interp\n"
        "heavy = ('torch', 'numpy', 'pandas', 'importlib_metadata', 'crate_hooks')\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & set(heavy)))\n"
        "print('importlib.metadata' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "False"] and out.stderr == ""


def test_nothing_is_executed():
    for path in sources():
        text = path.read_text()
        for word in ("trust_remote_code", "set_num_threads", "exec("):
            assert word not in text, f"{path}: {word}"


def test_no_file_and_no_function_is_long():
    for path in [*sources(), *HERE.rglob("*.py")]:
        lines, described = path.read_text().splitlines(), 0
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = node.body[0] if ast.get_docstring(node) is not None else None
                described += text.end_lineno - text.lineno + 1 if text else 0
            if isinstance(node, ast.FunctionDef):
                first = text.end_lineno if text else node.lineno
                assert node.end_lineno - first < 60, f"{path}: {node.name}"
        assert len(lines) - described <= 400, path


def test_versions_are_pinned_and_ranges_hold_them():
    from packaging.requirements import Requirement

    pyproject = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==")
        for line in (HERE.parent / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pins = {name.lower().replace("_", "-"): number for name, number in pins.items()}
    extras = pyproject["optional-dependencies"]
    assert set(extras["docs"]) <= set(extras["dev"])
    for text in [*pyproject["dependencies"], *extras["dev"]]:
        requirement = Requirement(text)
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), f"{text} does not hold the tested {pin}"
    assert pins["torch"] == "2.13.0"


# words that say nothing of what they name when they stand alone
ALONE = """
about asked found given held here kept known left made more own seen shown taken told wanted
""".split()
KEPT_NAMES = {("result.py", "kept")}  # the column and property that graphs have had from the start


def test_no_name_is_an_adjective_or_participle_alone():
    alone = []
    for path in sources():
        names = [(path.stem, 1)]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append((node.name, node.lineno))
            elif isinstance(node, ast.arg):
                names.append((node.arg, node.lineno))
        alone += [
            f"{path}:{line} {name}"
            for name, line in names
            if name.strip("_") in ALONE and (path.name, name) not in KEPT_NAMES
        ]
    assert not alone, "\n".join(alone)
