"""What a command was asked for: its options, the model that they name, and what it prints."""

import ast
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import Parameter, signature
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NamedTuple, cast, get_args, get_type_hints

import typer
from typer import Argument, Option

import crate_interp as ci
from crate_interp.core import checks
from crate_interp.core.run_options import Pass, Run, RunOptions

POSITIONAL = ("source", "a", "b")


class Field(NamedTuple):
    """What an option takes: a type, or a function that reads a text."""

    kind: Any
    default: Any
    text: str  # of --help


def names(text: str) -> list[str]:
    """Returns the parts of a text with commas."""
    return [word.strip() for word in text.split(",") if word.strip() or "," not in text]


def answers(text: str) -> Any:
    """Returns an answer, or a pair of answers, that a text gives by number or name."""
    words = names(text) if text.count(",") == 1 else [text]
    found = [int(word) if word.isascii() and word.isdigit() else word for word in words]
    return found[0] if len(found) == 1 else tuple(found)


# annotation -> what its option takes; a parameter with another annotation has no option
KINDS: dict[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "Sequence[int]": list[int],
    "Sequence[str]": names, "Probes": names, "Target": answers, "Twins": int,
    "int | Sequence[int]": int,
}  # fmt: skip


def of_function(name: str) -> dict[str, Field]:
    """Returns the options of a public function such as "circuits.concentration"."""
    room, _, verb = name.rpartition(".")
    place = Path(ci.__file__).parents[1] / ci._MODULE_OF[room or verb].replace(".", "/")
    paths = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    parts = (path.read_text(encoding="utf-8").partition(f"\ndef {verb}(") for path in paths)
    text = next(text.partition("\n\n\n")[0] for _, found, text in parts if found)
    function: Any = ast.parse(f"def {verb}({text}").body[0]
    lines = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", ast.get_docstring(function) or "", re.M)
    helps = {name: " ".join(words.split()) for name, words in lines}
    options = {}
    for item, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        kind = KINDS.get(ast.unparse(item.annotation).removesuffix(" | None"))
        if kind is not None:
            options[item.arg] = Field(kind, ast.literal_eval(default), helps.get(item.arg, ""))
    if function.args.kwarg is not None:
        run = Run if ast.unparse(function.args.kwarg.annotation) == "Unpack[Run]" else Pass
        options |= of_annotations(run, RunOptions)
    return options


def of_annotations(thing: Callable, call: Callable | None = None) -> dict[str, Field]:
    """Returns the options that a class or function names by Annotated[type, help].

    call: what has the defaults, if `thing` has none.
    """
    options, items = {}, signature(call or thing).parameters
    for name, hint in get_type_hints(thing, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            kind, text, *typed = get_args(hint)
            options[name] = Field(typed[0] if typed else kind, items[name].default, text)
    return options


def typed(name: str) -> str:
    """Returns a parameter as it is typed: --data, or SOURCE."""
    return name.upper() if name in POSITIONAL else f"--{name.replace('_', '-')}"


def parameters(options: Mapping[str, Field], required: Iterable[str]) -> list[Parameter]:
    """Returns what typer reads of options.

    A required option is optional for typer, which would name one missing option after another. A
    bool that is off by default has no --no-NAME.
    """
    items = []
    for name, (kind, default, text) in options.items():
        if isinstance(default, tuple) and default:  # left to the function that has it
            text += f" Default: {', '.join(map(str, default))}."
        how: dict[str, Any] = {"help": text + " [required]" * (name in required)}
        if kind in (names, answers):
            how = {"parser": kind, "help": f"{how['help']} Separate several with commas."}
            kind = str
        if default is None or name in required or isinstance(default, tuple):
            kind, default = kind | None, None
        flags = [typed(name)] if default is not True else []
        positional = name in POSITIONAL
        info = Argument(metavar=typed(name), **how) if positional else Option(*flags, **how)
        kind = Annotated[kind, info]
        items.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return items


LOADING = ("source", "family", "file", "revision", "config", "rename", "weights")
LOOKING = ("source", "data", "out", *LOADING[1:], "device", "dtype", "threads")
MEASURING = (*LOOKING, "verbose", "dry_run")
ONE_INPUT = (*LOOKING, "text", "image")
CHUNKED = ("address", "restart", "format")
SESSION = ("quiet", "debug")
GROUPS = {  # sections of the help -> their options
    "The model": (*LOADING[1:], "device", "dtype", "threads", "precision"),
    "The samples": ("batch_size", "limit", "workers", "skip_bad", "groups"),
    "Runs in pieces": ("chunk_size", "shard", "engine", "address", "tag", "restart", "dry_run"),
    "What is printed": ("verbose", "format", *SESSION, "help"),
}
FORMATS = ("csv", "markdown")
DTYPES = ("float32", "float64", "bfloat16", "float16")
_MODEL = "A name of `crate-interp models`, NAME@step-N, a weight file or a saved folder."
_OUT = "The folder to write into. Default: runs/COMMAND-MODEL."
_DATA = (
    '"embedded:fashion", "embedded:pictures", "embedded:held-out-text", "embedded:repeats", a '
    'folder, "imagefolder:DIR" or "hf:owner/name:split"; with masks "cutouts:DIR", "voc:DIR" or '
    '"coco:FILE". To compare saved sweeps, give no data.'
)
_JSON = {"true": True, "false": False, "null": None}


def say(text: str) -> None:
    """Prints a text. On a terminal sentences wrap at its width; rows of tables stay whole."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        wrap = partial(fill, width=width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(line if "  " in line else wrap(line) for line in text.splitlines())
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass
class Request:
    """The options of a command. Those that are annotated with a help text belong to no function."""

    options: dict[str, Any] = field(default_factory=dict)  # of the function that measures
    source: Annotated[str, _MODEL] = ""
    data: Annotated[str, _DATA] = cast(str, None)
    out: Annotated[Path, _OUT] = cast(Path, None)
    text: Annotated[str | None, "A text to look at, in place of a sample of --data."] = None
    image: Annotated[Path | None, "An image to look at, in place of a sample of --data."] = None
    family: Annotated[str | None, "Model family. Default: inferred from the keys."] = None
    file: Annotated[str | None, "A file of a repo on the Hub."] = None
    revision: Annotated[str | None, "A commit on the Hub, or step-N of an embedded model."] = None
    config: Annotated[list[str] | None, "A field of the config: n_heads=6. Repeat for more."] = None
    rename: Annotated[str | None, r"Renames keys of the weights, as sed: 's/^net\.//'."] = None
    weights: Annotated[str | None, "ema: the averaged weights of a file."] = None
    device: Annotated[str | None, "cpu, cuda or cuda:1. Default: the GPU of this rank."] = None
    dtype: Annotated[str | None, f"{', '.join(DTYPES)}. Default: float32."] = None
    threads: Annotated[int | None, "Threads of torch in each process."] = None
    verbose: Annotated[bool, "Print what each column means, and further tables."] = False
    dry_run: Annotated[bool, "Measure one chunk, say how long all would take, and stop."] = False
    address: Annotated[str | None, "A Ray cluster, such as auto. Default: start one here."] = None
    restart: Annotated[bool, "Start over; remove the earlier chunks."] = False
    format: Annotated[str | None, "Print the main table as csv or markdown."] = None
    quiet: Annotated[bool, "Show no progress."] = False
    debug: Annotated[bool, "Show the traceback of an error."] = False

    def __post_init__(self) -> None:
        """Checks what needs no model, and sets what is read when torch or Ray start."""
        if self.format is not None:
            checks.one_of("format", self.format, FORMATS)
        if self.dtype is not None:
            checks.one_of("dtype", self.dtype, DTYPES)
        if self.threads is not None:
            checks.count("threads", self.threads)
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                os.environ[name] = str(self.threads)
        if self.address is not None:
            if self.options.get("engine") != "ray":
                raise ValueError(f"--address {self.address} works with --engine ray only.")
            os.environ["RAY_ADDRESS"] = self.address

    @property
    def looked_at(self) -> Any:
        """Returns the data of a command that looks at one input: --text, --image or --data."""
        if self.text is self.image is self.data is None:
            raise ValueError("give --text TEXT, --image FILE, or --data with --sample NUMBER.")
        wrong, taken = self.text, "images: --image"
        if self.model.unit == "windows":
            wrong, taken = self.image, "texts: --text"
        if wrong is not None:
            raise ValueError(f"{self.source} reads {taken}.")
        if self.text is self.image is None:
            return self.data
        return [str(self.text if self.image is None else self.image)]

    def checkpoint(self, source: str) -> tuple[str, dict[str, Any]]:
        """Returns a source without its @step, and the arguments of `ci.load` that were given."""
        arguments = {name: getattr(self, name) for name in LOADING[1:] if name != "config"}
        name, at, step = source.rpartition("@")
        if at and name and self.revision is None and not Path(source).exists():
            source, arguments["revision"] = name, step
        given = {name: value for name, value in arguments.items() if value is not None}
        return source, given | config_fields(self.config)

    def load(self, source: str) -> Any:
        """Returns the model of this name, on the device of this process."""
        import torch

        source, arguments = self.checkpoint(source)
        arguments["dtype"] = None if self.dtype is None else getattr(torch, self.dtype)
        device = self.device or "cpu"
        if self.device is None and torch.cuda.is_available():  # without torchrun, LOCAL_RANK is 0
            rank = int(os.environ.get("LOCAL_RANK", "0"))
            device = f"cuda:{rank % torch.cuda.device_count()}"
        return ci.bridge.load(source, device=device, **arguments)

    @cached_property
    def model(self) -> Any:
        """Returns the model that the command names."""
        return self.load(self.source)

    def networks(self, text: str) -> tuple[list[Any], str]:
        """Returns the networks that a text with commas names, and one name for all of them.

        A part is the folder of a saved sweep, or a model's name, file or folder.
        """
        words = [text] if Path(text).exists() else names(text)
        if not words:
            raise ValueError(f"{text!r} names no network: give models or saved sweeps.")
        swept = {word for word in words if Path(word, "meta.json").is_file()}
        parts = [ci.SweepResult.load(word) if word in swept else self.load(word) for word in words]
        name = Path(words[0]).name if Path(words[0].partition("@")[0]).exists() else words[0]
        return parts, name + (f" and {len(words) - 1} more" if words[1:] else "")

    def measured(self, verb: Callable[..., Any], **options: bool) -> Any:
        """Returns the verb's result; ends the command while chunks of other shards are missing."""
        result = verb(self.model, self.data, out=self.out, **options, **self.options)
        if result is None:
            raise typer.Exit
        return result

    def show(self, result: Any, write: Callable[..., Any], table: str, line: str = "") -> None:
        """Writes the page of a result, while no other process does, and prints the result."""
        from crate_interp.questions.run_folder import alone

        with alone(self.out):
            page = write(result, self.out)
        self.print(result, f"The page: {page}", table, line)

    def print(self, result: Any, place: str, table: str, line: str = "") -> None:
        """Prints a finding and where it is, a table, and with --verbose what explains it.

        result: a result, or a finding as text. With --format, only the result's main table goes to
        stdout, so that a program can read it.
        """
        words = result if isinstance(result, str) else f"{result.headline()} {result.caution()}"
        if self.format is not None:
            say(getattr(result, f"to_{self.format}")())
            sys.stderr.write(f"{words.strip()}\n{place}\n")
            return
        answer = words if isinstance(result, str) else result.sentences()[0]  # a line for itself
        words = words.replace(f"{answer} ", f"{answer}\n", 1)
        hint = "" if self.verbose or not line else "\n--verbose says what the columns mean."
        parts = [f"{words.strip()}\n{place}", f"{table}{hint}" if table else ""]
        say("\n\n".join(part for part in [*parts, line.strip() * self.verbose] if part))


def config_fields(pairs: list[str] | None) -> dict[str, Any]:
    """Returns the fields of --config: n_heads=6 becomes {"n_heads": 6}.

    A value is written as in Python or JSON; anything else is a string.
    """
    fields: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--config {pair!r}: write NAME=VALUE, such as n_heads=6.")
        if name == "family":
            raise ValueError(f"--config {pair!r}: write --family {value}.")
        if name in inspect.signature(ci.load).parameters:
            raise ValueError(f"--config {pair!r}: CrateConfig has no field {name!r}.")
        try:
            fields[name] = _JSON[value] if value in _JSON else ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            fields[name] = value
    return fields
