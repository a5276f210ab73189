"""Torch files, without running what they hold: tensors, plain Python values, and nothing else."""

import argparse
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints.errors import CheckpointError

_MAX_MEMBERS = 200_000
_NAMESPACE = "argparse.Namespace"  # what the trainer of the masked autoencoder keeps its command line in


def read_torch(path: Path) -> tuple[Any, bool]:
    """What a torch file holds, memory-mapped where it is a zip, and whether it needed argparse.Namespace.

    That one class, a bag of values without code, is admitted where it is the only one the file asks for, and what it
    holds is left out of the answer.
    """
    mapped = zipfile.is_zipfile(path)
    if mapped:
        _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped), False
    except Exception:
        if not mapped or torch.serialization.get_unsafe_globals_in_checkpoint(path) != [_NAMESPACE]:
            raise
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, wanted a state dict: names and tensors.")
    return {key: value for key, value in loaded.items() if not isinstance(value, argparse.Namespace)}, True


def _check_archive(path: Path) -> None:
    """Torch stores its members as they are; one that is compressed or larger than the file was made to harm."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise CheckpointError(f"{path} has {len(members)} entries: no checkpoint has so many.")
    size = path.stat().st_size
    if sum(info.file_size for info in members) > size or any(info.compress_type for info in members):
        raise CheckpointError(f"{path} claims entries larger than the file: it is damaged or was made to harm.")
