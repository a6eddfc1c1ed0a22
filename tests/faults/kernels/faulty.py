"""Right, unless $FAULT names what is to happen in each call."""

import ctypes
import os
import signal
import sys
import time

import torch

from kernels import right

ODD_MESSAGE = b"caf\xe9 \xff".decode("utf-8", "surrogateescape")  # as of a file's name in Latin-1


def raise_(fault):
    raise fault


def hang():
    time.sleep(3600)


def hang_on_whatever_is_raised():
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            continue


def note(pid):
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{pid}\n")


def fork_one_that_lives_on():
    pid = os.fork()
    if pid == 0:
        hang()
    note(pid)


def become_a_daemon_beside():
    """As the book has it: fork, leave the session, fork again, so that init is the parent."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            hang()
        note(daemon)
        os._exit(0)
    os.waitpid(middle, 0)


def print_much():
    os.write(1, b"as many lines as you like\n" * 40_000)


def write_to_every_file():
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.write(int(name), b"mine\n")
            except OSError:
                continue


FAULTS = {
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda: ctypes.string_at(0),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "os_exit": lambda: os._exit(3),
    "exit_as_if_well": lambda: os._exit(0),
    "sys_exit": lambda: sys.exit(4),
    "abort": os.abort,
    "hang": hang,
    "hang_on": hang_on_whatever_is_raised,
    "memory_error": lambda: raise_(MemoryError()),
    "cuda_memory": lambda: raise_(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    "odd_message": lambda: raise_(ValueError(ODD_MESSAGE)),
    "lives_on": fork_one_that_lives_on,
    "comes_back_twice": os.fork,
    "daemon": become_a_daemon_beside,
    "prints_much": print_much,
    "prints": lambda: print("a line", flush=True),
    "chdir": lambda: os.chdir("/"),
    "closes_files": lambda: os.closerange(3, 256),
    "writes_to_files": write_to_every_file,
    "kills_its_job": lambda: (os.kill(os.getppid(), signal.SIGKILL), hang()),
}


def attention(q, k, v, *, causal, scale=None):
    fault = os.environ.get("FAULT")
    if fault == "swallows":
        try:
            raise RuntimeError("unspecified launch failure")
        except RuntimeError:
            return torch.zeros_like(q)
    if fault:
        FAULTS[fault]()
    return right.attention(q, k, v, causal=causal)
