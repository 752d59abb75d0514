"""Records: one JSON object a line, appended as soon as it is known, so that nothing is lost when a run is stopped.

Every run begins with a line of kind `run`: what ran, on what. A run that is taken up again adds another one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pyramidsd import __version__
from pyramidsd.types import UsageError

Line = dict[str, Any]

FORMAT = 1


def facts(argv: Sequence[str]) -> Line:
    """Where and with what something runs: arguments, commit, versions, device, threads."""
    return {
        "argv": list(argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "pyramidsd": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
        "machine": {
            "device": _device_name(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def _commit() -> str | None:
    """The commit of the source tree, `+changes` where it was edited; None for an installed package."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    tracked = ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name]
    try:
        if subprocess.run(tracked, capture_output=True, check=False).returncode:
            return None  # some other project's repository around an installed package
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = torch.cpu.get_capabilities().get("cpu_name") if hasattr(torch.cpu, "get_capabilities") else None
    return str(name or platform.processor() or platform.machine())


class Record:
    """A file of lines that is taken up again where a run of the same kind stopped; without a path, a list in memory.

    Args:
        path: where it is kept.
        run: what the run is, apart from `facts`: only a record of the same run is taken up.

    Raises:
        UsageError: the file cannot be read or written, is no record, or belongs to another run.
    """

    def __init__(self, path: Path | None, run: Mapping[str, Any]) -> None:
        self._path = path
        self.lines: list[Line] = []
        run = json.loads(json.dumps(run))
        if path is not None and path.exists():
            whole = repaired(path)
            self.lines = list(whole)
            _refuse_another(path, self.lines, run)
        self.add("run", {**run, "format": FORMAT, **facts(sys.argv[1:])})

    def add(self, kind: str, values: Mapping[str, Any]) -> Line:
        """Append one line, and see to it that it is on the disk.

        Raises:
            UsageError: it cannot be written; all lines before it are kept.
        """
        line = {"kind": kind, **values}
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise UsageError(
                    f"cannot write {self._path}: {error.strerror or error}; make room or choose another file, then "
                    "run the same command again: what it measured until now is kept"
                ) from error
        self.lines.append(line)
        return line

    def of_kind(self, kind: str) -> list[Line]:
        """The lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]


def _refuse_another(path: Path, lines: Sequence[Line], run: Mapping[str, Any]) -> None:
    for old in [line for line in lines if line["kind"] == "run"][-1:]:
        changed = sorted(key for key in run if old.get(key) != run[key])
        if changed:
            raise UsageError(
                f"{path} was made with other settings ({', '.join(changed)}); repeat them, or choose another file"
            )


def read_record(path: Path) -> list[Line]:
    """All lines of a record, the last one only where it is whole.

    Raises:
        UsageError: the file cannot be read, or a line is no record; the message names it.
    """
    return list(_lines(path, _read(path)))


def repaired(path: Path) -> list[Line]:
    """As `read_record`, and a half-written last line is cut off the file, so that it can be appended to.

    Raises:
        UsageError: as `read_record`.
    """
    data = _read(path)
    lines = list(_lines(path, data))
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        try:
            os.truncate(path, len(whole))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; check its permissions") from error
    return lines


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check the path") from error


def _lines(path: Path, data: bytes) -> Iterator[Line]:
    *whole, _half_written = data.split(b"\n")
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            raise UsageError(f"{path}, line {number} is no record of pyramidsd; remove the line, or name another file")
        if number == 1 and (line["kind"] != "run" or line.get("format") != FORMAT):
            raise UsageError(f"{path} does not begin with a run of format {FORMAT}; make the record again")
        yield line
