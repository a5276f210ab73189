"""TransformerLens' source distribution: its tests and its notebooks are in it, and in no wheel."""

import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

VERSION = "4.3.0"
SHA256 = "a2adcad2daf3dcc000ab5ca3acc6883a1f602410fe47e794a853c754705783db"


def unpacked(given: Path | None, folder: Path) -> Path:
    """Returns the folder of the source distribution.

    given: that folder, or the archive; None downloads the archive into `folder`. Raises
    ValueError if the archive is not the published one.
    """
    if given is not None and given.is_dir():
        return given
    archive = given or _downloaded(folder)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{archive} has the SHA-256 {digest}, the published one {SHA256}.")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"transformer_lens-{VERSION}"


def _downloaded(folder: Path) -> Path:
    options = ["--no-deps", "--no-binary", "transformer-lens", "--dest", str(folder)]
    asked = f"transformer-lens=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", *options, asked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"cannot download {asked}: {done.stderr.strip().splitlines()[-1]}")
    return folder / f"transformer_lens-{VERSION}.tar.gz"


def tokenizer(paths: Iterable[Path], size: int = 50257) -> str:
    """Returns a tokenizer.json of GPT-2's kind and size, trained on source files and notebooks.

    GPT-2's own vocabulary is on the Hub alone. In this one, too, a word that the tests use is one
    token, " Mary" for example; ids that no word takes have names, so that every id has a text, and
    the last one is <|endoftext|>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(map(_text, paths), trainer)
    content = json.loads(core.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {f"<unused {index}>": index for index in range(len(vocab), size - 1)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = {"id": size - 1, "content": "<|endoftext|>", "special": True}
    content["added_tokens"] = [end | flags]
    return json.dumps(content)


def _text(path: Path) -> str:
    return "\n".join(cells(path)) if path.suffix == ".ipynb" else path.read_text("utf-8")


def words(source: Path) -> list[Path]:
    """Returns the tests and notebooks, in which the words of the tests occur."""
    return sorted([*source.glob("tests/**/*.py"), *source.glob("demos/*.ipynb")])


def cells(notebook: Path) -> list[str]:
    """Returns the code cells of a notebook."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
