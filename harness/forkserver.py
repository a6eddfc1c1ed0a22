"""A process that has imported torch once and forks a fresh process for each job.

Importing torch takes a job 2 to 4 seconds, several times longer than measuring. The server never touches
CUDA and runs nothing itself: a job forked from it is as fresh as one that imported torch. Jobs find it
by an environment variable; without it (by hand, on a cluster) a script simply imports torch itself.

The server ends with the process that started it, a job with the script that asked for it, and all jobs
end with the server, however each of them ends.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.process import die_with_parent

ADDRESS_VARIABLE = "ATTENTION_BENCH_FORK_SERVER"
STREAMS = (0, 1, 2)
STARTED = b" "  # what a script hears when its job runs; its exit code follows (int() ignores the blank)
SECONDS_TO_END = 10.0


class ForkServer:
    """Starts a server for the jobs of this process, whose address goes into their environment."""

    def __init__(self, root: Path, modules: Sequence[str] = ("torch",)) -> None:
        self._root = root
        self._modules = modules
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; where that fails it says so, and the jobs do without."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            self._start(listener)
        except OSError as fault:  # a full temporary folder, or one with too long a name for a socket
            os.environ.pop(ADDRESS_VARIABLE, None)
            self.stop()
            print(f"no fork server ({fault}): each job imports torch itself", file=sys.stderr, flush=True)
        finally:
            listener.close()

    def _start(self, listener: socket.socket) -> None:
        self._folder = tempfile.mkdtemp(prefix="attention-bench-")  # mode 0700: nobody else's jobs
        address = os.path.join(self._folder, "socket")
        listener.bind(address)
        listener.listen(64)
        os.environ[ADDRESS_VARIABLE] = address
        # Snakemake gives its jobs one thread; numpy, which torch imports, reads this once.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # This checkout's harness, whatever lies in the folder of the run: hence -P, and no PYTHONPATH,
        # which could not name a folder with a colon in it.
        program = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from harness.forkserver import main; main()"
        )
        numbers = [str(listener.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, str(self._root), *numbers, *self._modules],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:  # it was stopped, or does not get to its signals
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def run_in_fork_server(script: str) -> None:
    """Have the server run this script and exit with its code; return at once where there is no server.

    A server that ends before it has started the job is none; one that ends after that takes the job along.
    """
    address = os.environ.pop(ADDRESS_VARIABLE, None)
    if address is not None:
        answer = _ask_server(address, script)
        if answer.endswith("\n"):
            sys.exit(int(answer))
        if answer:
            sys.exit("the fork server ended before the job did; run the same command again")
    if importlib.util.find_spec("torch") is None:
        sys.exit(
            f"torch is not installed for {sys.executable}: `make` installs all there is in requirements.lock;"
            " then run the same command again"
        )


def _ask_server(address: str, script: str) -> str:
    """What the server says of the job: nothing, that it has STARTED, or then the code that it ended with."""
    request = {
        "script": os.path.abspath(script),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    streams = array.array("i", STREAMS)
    message = json.dumps(request).encode() + b"\n"
    answer = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        sent = connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(message[sent:])
        while chunk := connection.recv(64):
            answer += chunk
    return answer.decode()


# ---- in the server ----


def serve(listener: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Import the modules, then accept requests and fork jobs, until this process is terminated."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as fault:
            sys.exit(f"no fork server: {module} does not import ({type(fault).__name__}: {fault})")

    jobs: dict[int, socket.socket] = {}
    wake_reading, wake_writing = os.pipe()
    os.set_blocking(wake_writing, False)
    signal.set_wakeup_fd(wake_writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake_reading, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                pid = _accept_job(connection, listener)
                if pid is not None:
                    jobs[pid] = connection
                    selector.register(connection, selectors.EVENT_READ)
            elif key.fileobj == wake_reading:
                os.read(wake_reading, 4096)
                for pid, code in _ended():
                    connection = jobs.pop(pid)
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    with contextlib.suppress(OSError):
                        connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
                    connection.close()
            else:  # the asking script is gone: nobody waits for this job any more
                with contextlib.suppress(KeyError, ValueError):  # both may have ended by now
                    selector.unregister(key.fileobj)
                for pid in [pid for pid, connection in jobs.items() if connection is key.fileobj]:
                    os.kill(pid, signal.SIGTERM)


def _accept_job(connection: socket.socket, listener: socket.socket) -> int | None:
    """Fork the job that a connection asks for; its process id, or None if it asks for nothing."""
    message, streams = _receive(connection)
    if not message.endswith(b"\n"):
        for received in streams:
            os.close(received)
        connection.close()
        return None
    request = json.loads(message)
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # no further process: the script may have more luck
        for received in streams:
            os.close(received)
        connection.close()
        return None
    if pid == 0:
        code = 1
        try:
            die_with_parent(server, signal.SIGTERM)
            listener.close()
            connection.close()
            for stream, received in zip(STREAMS, streams, strict=True):
                os.dup2(received, stream)
                os.close(received)
            code = _run(request)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for received in streams:
        os.close(received)
    with contextlib.suppress(OSError):
        connection.sendall(STARTED)
    return pid


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    streams = array.array("i")
    message, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_LEN(len(STREAMS) * streams.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            streams.frombytes(data[: len(data) - len(data) % streams.itemsize])
    while message and not message.endswith(b"\n"):
        chunk = connection.recv(1 << 20)
        if not chunk:
            break
        message += chunk
    return message, list(streams)


def _run(request: dict[str, Any]) -> int:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # As a script that Snakemake started would end: whatever it holds is let go of on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _ended() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def main() -> NoReturn:
    """Serve on the socket with the number that is the first argument; the others as `ForkServer` has them."""
    die_with_parent(int(sys.argv[2]), signal.SIGTERM)
    # A terminal's Ctrl-C is for Snakemake, which then ends its jobs, and so this server's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:])
