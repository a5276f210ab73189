"""Our reader of torch files against torch's own, on damaged files and on shuffled pickles.

What ours accepts, torch.load(weights_only=True) has to accept (with argparse.Namespace and paths
added to what it admits), and every tensor has to have the same bytes, dtype and shape.
tests/fuzz.py runs this on its torch layouts.
"""

import argparse
import io
import pickletools
import random
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from crate_interp.checkpoints.formats import zip_archives
from crate_interp.checkpoints.formats.pickles import Bag
from crate_interp.checkpoints.formats.torch_files import read_archive, read_legacy, read_tensors
from crate_interp.checkpoints.formats.torch_names import Number, StoredTensor
from crate_interp.core.errors import CheckpointError

NAMES = (
    b"torch\nTensor\n", b"torch\nSize\n", b"torch\ndevice\n", b"torch\nfloat16\n", b"torch\nbool\n",
    b"torch\nFloatStorage\n", b"torch\nLongStorage\n", b"torch\nBoolStorage\n",
    b"torch\nBFloat16Storage\n", b"torch.storage\nUntypedStorage\n",
    b"torch\nComplexFloatStorage\n",
    b"torch._utils\n_rebuild_tensor\n", b"torch._utils\n_rebuild_tensor_v2\n",
    b"torch._utils\n_rebuild_tensor_v3\n", b"torch._utils\n_rebuild_parameter\n",
    b"torch._utils\n_rebuild_parameter_with_state\n", b"torch.nn.parameter\nParameter\n",
    b"collections\nOrderedDict\n", b"collections\nCounter\n", b"collections\ndefaultdict\n",
    b"argparse\nNamespace\n", b"builtins\nset\n", b"builtins\nbytearray\n", b"os\nsystem\n",
)  # fmt: skip
SPARE = (
    b"N", b"\x88", b"\x89", b")", b"]", b"}", b"(", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e",
    b"s", b"u", b"R", b"\x81", b"b", b"Q", b".", b"0", b"\x8f", b"K\x00", b"K\x02", b"M\xff\xff",
    b"J\xff\xff\xff\xff", b"G\x3f\xf0\x00\x00\x00\x00\x00\x00", b"\x8a\x09" + b"\xff" * 8 + b"\x7f",
    b"X\x01\x00\x00\x000", b"U\x01a", b"h\x00", b"q\x00", b"\x80\x02",
)  # fmt: skip


def training_dict(folder, zipped):
    """Everything that training scripts keep: weights, two optimisers, a schedule, plain values."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    optimiser = torch.optim.AdamW(model.parameters(), foreach=False)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [1, 5, 5])
    model(torch.randn(7, 3)).sum().backward()
    optimiser.step()
    base = torch.arange(24.0)
    path = folder / ("training.pth" if zipped else "training_legacy.pth")
    content = {
        "model": model.state_dict(),
        "optimizer": optimiser.state_dict(),
        "scheduler": schedule.state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "views": [base, base[2:], base.view(4, 6).T, base.view(4, 6)[:, 1:3], base[:1].expand(3)],
        "others": [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.half, torch.bool)],
        "empty": [torch.ones(0), torch.ones(2, 0, 3), torch.tensor(1.5)],
        "plain": [torch.Size([2, 3]), torch.device("cpu"), torch.float16, (1, -2, 2**40), None],
        "args": argparse.Namespace(lr=0.1, size=[1, 2], name="a"),
        "paths": [Path("/a/b"), Path("c"), Path()],
        "epoch": 3,
    }
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def ours(path):
    """Returns what our reader finds, every tensor read; CheckpointError is let through."""
    with open(path, "rb") as file:
        where = str(path)
        if zip_archives.read_at(file, 0, 4) == zip_archives.MAGIC:
            found = read_archive(file, zip_archives.read_directory(file, where), where)
        else:
            found = read_legacy(file, where)

    def tensor(stored):
        with open(path, "rb") as file:
            return read_tensors(file, {"": stored}, found.places, where)[""]

    return found.content, tensor


def theirs(path):
    """Returns what torch's restricted reader finds."""
    admitted = [argparse.Namespace, type(Path())]
    with torch.serialization.safe_globals(admitted), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True)


def as_bytes(tensor):
    """Returns the bytes of a tensor."""
    tensor = tensor.contiguous()  # which leaves the stride of a single number as it is
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def unwrapped(key):
    """Returns the key of a dict as torch's reader has it."""
    if isinstance(key, tuple):
        return tuple(map(unwrapped, key))
    return key.value if isinstance(key, Number) else key


def differ(mine, other, tensor, left=2000):
    """Returns where two contents differ, or None. Looks at 2000 values in breadth, no deeper."""
    todo = [(mine, other, "")]
    for _ in range(left):
        if not todo:
            break
        mine, other, where = todo.pop()
        if isinstance(mine, Number):
            mine = mine.value
        if isinstance(mine, Bag):
            mine, other = mine.values or {}, vars(other)
        if isinstance(mine, StoredTensor):
            try:
                mine = tensor(mine)
            except CheckpointError:
                continue
            same = isinstance(other, torch.Tensor) and mine.dtype == other.dtype
            other = other.detach() if same else other
            if not same or mine.shape != other.shape:
                return where
            strides = torch.empty_like(other, memory_format=torch.contiguous_format).stride()
            if mine.stride() != strides:
                return where
            if not torch.equal(as_bytes(mine), as_bytes(other)):
                return where
        elif isinstance(mine, Mapping):
            keys = {unwrapped(key): key for key in mine}
            held = {
                key for key, value in other.items() if not isinstance(value, argparse.Namespace)
            }
            if not set(keys) <= set(other) or not held <= set(keys):
                return where
            todo += [(mine[keys[key]], other[key], f"{where}/{key}") for key in keys]
        elif isinstance(other, Path):
            if type(mine) is not tuple or Path(*mine) != other:
                return where
        elif isinstance(mine, (list, tuple)):
            if len(mine) != len(other):
                return where
            todo += [
                (a, b, f"{where}/{i}") for i, (a, b) in enumerate(zip(mine, other, strict=True))
            ]
        elif isinstance(mine, (str, int, float, bool, type(None), torch.dtype, torch.device)):
            if type(mine) is not type(other) or (mine != other and mine == mine):
                return where
    return None


def compared(path):
    """Returns "refused" (by ours), "both" or, as a text, what is wrong."""
    try:
        mine, tensor = ours(path)
    except CheckpointError:
        return "refused"
    try:
        other = theirs(path)
    except Exception as error:
        return f"ours alone: {type(error).__name__} {str(error)[:300]}"
    where = differ(mine, other, tensor)
    return "both" if where is None else f"differs: {where}"


def pieces(content, start=0):
    """Returns the operations of a pickle, each as its bytes, and where the pickle ends."""
    places = [place for _, _, place in pickletools.genops(content[start:])]
    end = places[-1] + 1
    content, start = content[start:], start + end
    return [content[a:b] for a, b in zip(places, [*places[1:], end], strict=True)], start


def shuffled(parts, rng):
    """Returns the operations of a pickle after one to three changes."""
    parts = list(parts)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place, other = rng.randrange(1, len(parts)), rng.randrange(1, len(parts))
        kind = rng.randrange(16)  # half of them change a number, a reference or a text
        if kind == 0:
            del parts[place]
        elif kind == 1:
            parts.insert(place, parts[other])
        elif kind == 2:
            parts[place], parts[other] = parts[other], parts[place]
        elif kind == 3:
            parts[place] = parts[other]
        elif kind == 4:
            parts.insert(place, rng.choice(SPARE))
        elif kind == 5:
            parts[place] = rng.choice(SPARE)
        elif kind == 6:
            stretch = parts[place : place + rng.randrange(2, 40)]
            parts[other:other] = stretch
        elif kind == 7:
            named = [index for index, part in enumerate(parts) if part[:1] == b"c"]
            if named:
                parts[rng.choice(named)] = b"c" + rng.choice(NAMES)
        else:
            held = [index for index, part in enumerate(parts) if part[:1] in b"KMhJGX"]
            index = rng.choice(held)
            part = bytearray(parts[index])
            where = -1 if part[:1] in (b"J", b"G", b"X") else 1
            part[where] = (part[where] + rng.choice((-1, 1, 2, 7, 255))) % 256
            parts[index] = bytes(part)
    return parts


class Shuffler:
    """Makes torch files whose pickle is a shuffled one of a real file."""

    def __init__(self, path):
        content = path.read_bytes()
        self.zipped = content[:4] == zip_archives.MAGIC
        if self.zipped:
            with zipfile.ZipFile(path) as archive:
                self.items = [(info.filename, archive.read(info)) for info in archive.infolist()]
            self.parts, _ = pieces(self.items[0][1])
        else:
            start = 0
            for _ in range(3):
                _, start = pieces(content, start)
            self.parts, end = pieces(content, start)
            self.before, self.after = content[:start], content[end:]

    def write(self, path, rng):
        """Writes one."""
        pickled = b"".join(shuffled(self.parts, rng) if rng.random() < 0.8 else self.parts)
        if rng.random() < 0.3:
            flipped = bytearray(pickled)
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            pickled = bytes(flipped)
        if not self.zipped:
            path.write_bytes(self.before + pickled + self.after)
            return
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in self.items:
                archive.writestr(name, pickled if name.endswith("/data.pkl") else content)
        path.write_bytes(buffer.getvalue())


def against_torch(path, mutate, count, seed=0):
    """Returns the counts of both kinds of mutation of a torch file: refused, or read by both.

    mutate: damages bytes, given the content, the generator and the suffix. Anything wrong is
    counted under its own text.
    """
    content, rng, counts = path.read_bytes(), random.Random(f"{path.name} {seed}"), {}
    assert compared(path) == "both", compared(path)
    shuffler = Shuffler(path)
    for kind in ("bytes", "pickle"):
        seen = counts[kind] = Counter()
        for _ in range(count):
            if kind == "bytes":
                path.write_bytes(mutate(content, rng, path.suffix))
            else:
                shuffler.write(path, rng)
            seen[compared(path)] += 1
    path.write_bytes(content)
    return counts


def every_layout(folder, originals, mutate, count, seed=0):
    """Returns the counts of every layout in `originals` that is a torch file, and of two more.

    originals: layout -> (file, ...), as tests/fuzz.py makes them.
    """
    files = {name: found[0] for name, found in originals.items()}
    files = {name: path for name, path in files.items() if path.suffix in (".pth", ".pt")}
    files |= {
        "training dict": training_dict(folder, True),
        "training dict legacy": training_dict(folder, False),
    }
    return {name: against_torch(path, mutate, count, seed) for name, path in files.items()}
