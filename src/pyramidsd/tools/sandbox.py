"""Runs a program that a model wrote, in processes of its own under limits: a guard against accidents, not attackers.

This file is both sides: `run_program` starts it as a script, which then runs the program. It imports nothing but the
standard library, because the script's interpreter sees nothing else.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may take.

    Attributes:
        cpu_seconds: of processor time, per process.
        wall_seconds: from start to end, for all of it; generous, so that a busy machine fails no program.
        memory: bytes of address space, per process.
        file_size: bytes, per file; where the file system can be locked, of all files together.
        processes: at a time; without namespaces none beside the program itself. Does not bind root.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    memory: int = 1 << 30
    file_size: int = 16 << 20
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a program ended.

    Attributes:
        status: `passed`; `failed`, by an exception; `timeout`, of either clock; `memory`; `crashed`, where it ended
            without a report: by a signal, or of its own will before its last line.
        detail: the name of the exception or of the signal.
    """

    status: str
    detail: str = ""


_DEFAULTS = Limits()
_INTERPRETER = ("-P", "-s", "-S", "-B", "-X", "utf8")
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # nothing of the user's; sets are walked in the same order every time
_LONGEST_REPORT = 4096
_NAMESPACES = ("--user", "--map-root-user", "--net", "--pid", "--mount", "--fork", "--kill-child")


def run_program(sources: Sequence[str], limits: Limits = _DEFAULTS) -> Verdict:
    """Run sources one after the other in one namespace; `passed` where the last one ran to its end.

    The program gets an empty folder that is deleted afterwards, no input, no environment, and its output is thrown
    away. Every process it starts is killed. Where Linux allows an ordinary user new namespaces, it sees no network and
    can write nowhere but in that folder.

    Raises:
        OSError: no process can be started.
    """
    token = secrets.token_hex(16)
    job = json.dumps({"sources": list(sources), "limits": asdict(limits), "apart": bool(_namespaces())})
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                exit_status = _finished(folder, f"{len(job.encode())}\n{job}{token}".encode(), writer, limits)
            finally:
                os.close(writer)
        report = _read_at_most(reader, _LONGEST_REPORT)
    finally:
        os.close(reader)
    return _verdict(exit_status, report, token)


def _finished(folder: str, job: bytes, report: int, limits: Limits) -> int | None:
    """The exit status of the script once it and all that it started are gone; None where its time was up."""
    process = subprocess.Popen(
        [*_namespaces(), sys.executable, *_INTERPRETER, __file__],
        stdin=subprocess.PIPE,
        stdout=report,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=_ENVIRONMENT,
        start_new_session=True,
    )
    try:
        process.communicate(job, timeout=limits.wall_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):  # nobody left; macOS says the latter of zombies
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def _read_at_most(reader: int, size: int) -> bytes:
    with suppress(BlockingIOError):
        return os.read(reader, size)
    return b""


def _verdict(exit_status: int | None, report: bytes, token: str) -> Verdict:
    told, _, rest = report.decode("utf-8", "replace").partition("\n")[0].partition(" ")
    if told == token:
        status, _, detail = rest.partition(" ")
        return Verdict(status, detail)
    if exit_status is None:
        return Verdict("timeout", "wall clock")
    number = exit_status - 128 if exit_status > 128 else -exit_status
    if number == signal.SIGXCPU:
        return Verdict("timeout", "processor time")
    known = number in set(signal.Signals)
    return Verdict("crashed", signal.Signals(number).name if known else "ended before its tests did")


@cache
def _namespaces() -> tuple[str, ...]:
    """The command that gives a process no network, process ids of its own, so that all its children die with it, and
    mounts of its own; empty where the system has or allows none."""
    unshare = shutil.which("unshare")
    if not unshare:
        return ()
    command = (unshare, *_NAMESPACES)
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [*command, sys.executable, "-I", "-S", "-c", ""], capture_output=True, env={}, timeout=10, check=False
        )
        return () if done.returncode else command
    return ()


# What follows runs in the script.


def _script() -> NoReturn:
    """Read the job, run it in a child, and end as the child did. The child's death is no surprise to anybody."""
    # Far from the numbers that programs close or write to, and not handed to what the program may start.
    job_file, report_file = _set_aside(0), _set_aside(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    job = json.loads(_read_job(job_file))
    limits = Limits(**job["limits"])
    if job["apart"]:
        _lock_files(limits.file_size)
    child = os.fork()
    if child == 0:
        _limit(limits, job["apart"])
        _run(job["sources"], lambda report: os.write(report_file, os.read(job_file, 64) + report + b"\n"))
    os.close(job_file)
    os.close(report_file)
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _set_aside(number: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 200)


def _read_job(file: int) -> bytes:
    """The job, and no byte more: the token behind it stays in the pipe until the program has run."""
    size, job = b"", b""
    while not size.endswith(b"\n"):
        size += os.read(file, 1)
    while len(job) < int(size):
        job += os.read(file, int(size) - len(job))
    return job


def _lock_files(size: int) -> None:
    """Make everything read-only, and the working folder a small file system in memory, as far as the system can: Linux
    5.12 or newer, in mounts of our own."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    here = os.fsencode(Path.cwd())
    read_only = struct.pack("QQQQ", 1, 0, 0, 0)  # struct mount_attr: attr_set = MOUNT_ATTR_RDONLY
    mount_setattr, at_fdcwd, at_recursive = 442, -100, 0x8000
    libc.syscall(mount_setattr, at_fdcwd, b"/", at_recursive, read_only, len(read_only))
    if libc.mount(b"tmpfs", here, b"tmpfs", 0, b"size=%d,nr_inodes=4096" % size) == 0:
        os.chdir(here)


def _limit(limits: Limits, apart: bool) -> None:
    import resource

    bounds = {
        "RLIMIT_CPU": (limits.cpu_seconds, limits.cpu_seconds + 1),  # first SIGXCPU, which says why, then SIGKILL
        "RLIMIT_AS": (limits.memory,) * 2,
        "RLIMIT_FSIZE": (limits.file_size,) * 2,
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NPROC": (limits.processes if apart else 0,) * 2,
    }
    for name, bound in bounds.items():
        with suppress(ValueError, OSError, AttributeError):  # macOS has no limit of memory
            resource.setrlimit(getattr(resource, name), bound)


def _run(sources: Sequence[str], report: Callable[[bytes], object]) -> NoReturn:
    """Run the program and report. Only what stands behind its last line, or an exception, leads to a report."""
    module = ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses and pickle look a class's module up
    reserve = bytearray(1 << 20)  # to be able to tell that no memory was left
    try:
        for source in sources:
            exec(compile(source, "<answer>", "exec", dont_inherit=True), module.__dict__)
        told = b" passed"
    except MemoryError:
        del reserve
        told = b" memory"
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are failures here too
        told = b" failed " + type(error).__name__[:80].encode("utf-8", "replace")
    report(told)
    os._exit(0)


if __name__ == "__main__":
    _script()
