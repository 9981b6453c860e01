"""Restricts a process before untrusted code runs in it. Imports no Penstock and no torch.

Each restriction protects something else, and may be unavailable (an old kernel) or too strict (for
a GPU driver): `probe` finds out which work together. `confine` applies those requested, in an order
in which none blocks the next, and describes those in force.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_ACCESS = 0b1101  # execute, read a file, list a folder
FILE_ACCESS = 0b111 | 1 << 14 | 1 << 15  # rights for files and devices, not folders
MAX_CAPABILITIES = 64
RESTRICTIONS = ("system calls", "files", "privileges", "file sizes")  # most valuable first
CPU_RESTRICTIONS = (*RESTRICTIONS, "addresses")  # a CUDA driver reserves huge address ranges


def confine(restrictions: Iterable[str], limits: Mapping[str, Any]) -> dict[str, str]:
    """Applies these restrictions permanently. Returns a description of each one in force."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _let_memory_be_locked()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_CPU, int(limits["seconds"] * (os.cpu_count() or 1)) + 1)
    wanted = set(restrictions)
    chosen = {name: apply for name, apply in _RESTRICTIONS.items() if name in wanted}
    in_force = {name: apply(libc, limits) for name, apply in chosen.items()}
    return {name: words for name, words in in_force.items() if words}


def _let_memory_be_locked() -> None:
    """Drivers pin memory. Root has no limit for that; without privileges, a limit would apply."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, 2 * (resource.RLIM_INFINITY,))


class _Ruleset(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("files", "network", "scoped"))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version(libc: Any) -> int:
    return int(libc.syscall(LANDLOCK_CREATE, None, 0, 1))


def _only_files(libc: Any, limits: Mapping[str, Any]) -> str:
    """A Landlock domain that allows only these paths. It also blocks access to the memory of
    processes outside; newer versions also block TCP (4), and signals and abstract sockets (6).
    """
    version = landlock_version(libc)
    if version < 1:
        return ""
    num_rights = 13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16
    everything = (1 << num_rights) - 1
    rules = _Ruleset(everything, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    ruleset = libc.syscall(
        LANDLOCK_CREATE, ctypes.byref(rules), 8 if version < 4 else 16 if version < 6 else 24, 0
    )
    readable, writable = limits["readable"], limits["writable"]
    doors = [(path, READ_ACCESS) for path in readable] + [(path, everything) for path in writable]
    for path, access in doors:
        with contextlib.suppress(OSError):  # a missing path needs no rule
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access &= ~0 if os.path.isdir(path) else FILE_ACCESS
            libc.syscall(LANDLOCK_ADD, ruleset, 1, ctypes.byref(_PathRule(access, opened)), 0)
            os.close(opened)
    if libc.syscall(LANDLOCK_RESTRICT, ruleset, 0):
        return ""
    os.close(ruleset)
    more = ", no TCP" * (version >= 4) + ", signals to itself only" * (version >= 6)
    return f"Landlock: reads below {_some(readable)}; writes below {_some(writable)}{more}"


def _some(paths: list[str]) -> str:
    rest = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + rest


def _no_privileges(libc: Any, limits: Mapping[str, Any]) -> str:
    """Root without capabilities owns its files and nothing else."""
    for capability in range(MAX_CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    return "no capabilities" if libc.capset(header, (ctypes.c_uint32 * 6)()) == 0 else ""


# The numbers of the architecture, of socket(2), and of calls that reach into other processes,
# namespaces, file systems or the kernel: ptrace, process_vm_readv and _writev, pidfd_getfd, setns,
# unshare, mount, umount2, open_by_handle_at, bpf, keyctl, kexec_load, io_uring_setup (no filter
# sees its sockets); and of setsid and setpgid, which leave the process group that is killed.
_X86 = (0xC000003E, 41, 101, 310, 311, 438, 308, 272, 165, 166, 304, 321, 250, 246, 425, 112, 109)
_ARM = (0xC00000B7, 198, 117, 270, 271, 438, 268, 97, 40, 39, 265, 280, 219, 104, 425, 157, 154)
_SYSTEM_CALLS = {"x86_64": _X86, "aarch64": _ARM}
_X32_CALLS = 0x40000000  # a second set of numbers for the calls of x86_64


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def _few_system_calls(libc: Any, limits: Mapping[str, Any]) -> str:
    """A seccomp filter: only Unix sockets, and no calls that reach into other processes."""
    if platform.machine() not in _SYSTEM_CALLS:
        return ""
    architecture, open_socket, *refused = _SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | errno.EPERM)
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, architecture),
        refuse,
        (load, 0, 0, 0),  # the number of the call
        (at_least, len(refused) + 4, 0, _X32_CALLS),
    ]
    program += [
        (equal, len(refused) - index + 3, 0, number) for index, number in enumerate(refused)
    ]
    program += [
        (equal, 1, 0, open_socket),
        allow,
        (load, 0, 0, 16),  # its first argument: the family
        (equal, 1, 0, socket.AF_UNIX),
        refuse,
        allow,
    ]
    instructions = (_Instruction * len(program))(*(_Instruction(*one) for one in program))
    filter_ = _Program(len(program), instructions)
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(filter_), 0, 0):
        return ""
    return "no sockets but Unix ones, no tracing or mounting, no other namespaces or process groups"


def _small_files(libc: Any, limits: Mapping[str, Any]) -> str:
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    size = limits["file_bytes"] >> 20
    return f"{size} MiB at most" if size else "nothing is written"


def _few_addresses(libc: Any, limits: Mapping[str, Any]) -> str:
    with open("/proc/self/statm") as file:
        already = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, already + limits["memory_bytes"])
    return f"{limits['memory_bytes'] >> 20} MiB of addresses"


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


_RESTRICTIONS: dict[str, Callable[[Any, Mapping[str, Any]], str]] = {
    "addresses": _few_addresses,  # first: it reads the memory in use
    "files": _only_files,
    "file sizes": _small_files,
    "privileges": _no_privileges,
    "system calls": _few_system_calls,  # last: it blocks calls that the others need
}
