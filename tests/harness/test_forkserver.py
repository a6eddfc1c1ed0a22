"""A job run by the fork server is like one run directly, and nothing outlives whom it works for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.forkserver import ADDRESS_VARIABLE, ForkServer

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds to wait for what should come at once

PREAMBLE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
STARTED = os.getpid()
from harness.forkserver import run_in_fork_server
run_in_fork_server(__file__)
"""
# Starts a server, says where and which, and then does as it is told.
STARTER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import os
from pathlib import Path
from harness.forkserver import ADDRESS_VARIABLE, ForkServer
server = ForkServer(Path({str(ROOT)!r}))
server.start()
print(os.environ[ADDRESS_VARIABLE], server._process.pid, flush=True)
sys.stdin.readline()
"""


def until(condition: Callable[[], Any]) -> Any:
    """Wait until the condition holds; its value."""
    give_up = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.01)
    return value


class Server:
    """A fork server, started by a process of its own."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != ADDRESS_VARIABLE}
        self.starter = subprocess.Popen(
            [sys.executable, "-c", STARTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.starter.stdout is not None
        self.address, pid = self.starter.stdout.readline().split()
        self.pid = int(pid)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.starter.kill()
        self.starter.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.end()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that a test may do away with."""
    running = Server()
    yield running
    running.end()


class Jobs:
    """Scripts that ask for the server, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, body: str, *arguments: str, address: str | None, **variables: str) -> Any:
        script = self.folder / "script.py"
        if not script.exists() or script.read_text() != PREAMBLE + body:
            script.write_text(PREAMBLE + body)
        environment = {name: value for name, value in os.environ.items() if name != ADDRESS_VARIABLE}
        if address is not None:
            environment[ADDRESS_VARIABLE] = address
        return subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=self.folder,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, body: str, *arguments: str, address: str | None, **variables: str) -> tuple[int, str, str]:
        job = self.start(body, *arguments, address=address, **variables)
        out, err = job.communicate(timeout=PATIENCE)
        return job.returncode, out, err

    def start_and_wait(self, body: str, *, address: str) -> tuple[Any, int]:
        """Start a job that writes its process id to the file `pid`; the asking script and that id."""
        report = self.folder / "pid"
        write = "open('.pid', 'w').write(str(os.getpid())); os.replace('.pid', 'pid')\n"
        script = self.start(write + body, address=address)
        until(report.exists)
        pid = int(report.read_text())
        report.unlink()
        return script, pid


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


class TestAJobInTheServer:
    def test_sees_its_own_arguments_folder_and_environment(self, server: Server, jobs: Jobs) -> None:
        body = """
import json
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("MINE"), sorted(os.environ), __name__, __file__]))
"""
        code, out, err = jobs.run(body, "--one", "zwei drei", "ü", address=server.address, MINE="yes")
        assert (code, err) == (0, "")
        argv, folder, mine, names, name, file = json.loads(out)
        assert argv == [str(jobs.folder / "script.py"), "--one", "zwei drei", "ü"]
        assert Path(folder) == jobs.folder
        assert mine == "yes"
        assert ADDRESS_VARIABLE not in names
        assert (name, file) == ("__main__", argv[0])

    def test_does_not_see_what_another_job_set(self, server: Server, jobs: Jobs) -> None:
        first = "os.environ['LEFT'] = '1'; sys.path.append('left'); os.chdir('/'); sys.argv.append('left')"
        assert jobs.run(first, address=server.address)[0] == 0
        _, out, _ = jobs.run(
            "print(os.environ.get('LEFT'), 'left' in sys.path, os.getcwd(), sys.argv[1:])",
            address=server.address,
        )
        assert out == f"None False {jobs.folder} []\n"

    def test_is_another_process_whose_torch_is_there_already_and_has_not_touched_cuda(
        self, server: Server, jobs: Jobs
    ) -> None:
        """So its own process never imported torch: the server's did."""
        body = """
assert "torch" in sys.modules
import torch
print(os.getppid(), torch.cuda.is_initialized(), STARTED == os.getpid())
"""
        _, out, err = jobs.run(body, address=server.address)
        assert (out, err) == (f"{server.pid} False True\n", "")

    def test_writes_to_the_streams_of_the_script(self, server: Server, jobs: Jobs) -> None:
        body = """
print("text")
os.write(1, b"bytes\\n")
print("a complaint", file=sys.stderr)
"""
        code, out, err = jobs.run(body, address=server.address)
        assert code == 0
        assert sorted(out.split()) == ["bytes", "text"]
        assert err == "a complaint\n"

    @pytest.mark.parametrize(
        ("body", "code", "complaint"),
        [
            ("sys.exit()", 0, ""),
            ("sys.exit(7)", 7, ""),
            ("sys.exit('this is wrong')", 1, "this is wrong\n"),
            ("os._exit(9)", 9, ""),
            ("os.kill(os.getpid(), 9)", 128 + 9, ""),
        ],
    )
    def test_ends_with_its_code(
        self, server: Server, jobs: Jobs, body: str, code: int, complaint: str
    ) -> None:
        assert jobs.run(body, address=server.address) == (code, "", complaint)

    def test_shows_the_traceback_of_an_exception(self, server: Server, jobs: Jobs) -> None:
        body = "def faulty():\n    raise KeyError('gone')\nfaulty()"
        code, out, err = jobs.run(body, address=server.address)
        assert (code, out) == (1, "")
        assert "in faulty\n    raise KeyError('gone')" in err
        assert err.endswith("KeyError: 'gone'\n")

    def test_takes_a_request_of_a_megabyte(self, server: Server, jobs: Jobs) -> None:
        """More than a socket's buffer, and than one read; an argument alone may have 128 KiB."""
        argument = "x" * 120_000
        many = [argument] * 9
        _, out, err = jobs.run("print(sum(map(len, sys.argv[1:])))", *many, address=server.address)
        assert (out, err) == (f"{9 * 120_000}\n", "")

    def test_many_at_once_each_get_their_own_answer(self, server: Server, jobs: Jobs) -> None:
        body = "print(sys.argv[1]); sys.exit(int(sys.argv[1]))"
        running = [jobs.start(body, str(number), address=server.address) for number in range(24)]
        for number, job in enumerate(running):
            out, err = job.communicate(timeout=PATIENCE)
            assert (job.returncode, out, err) == (number, f"{number}\n", "")

    def test_a_request_cut_off_disturbs_no_other(self, server: Server, jobs: Jobs) -> None:
        open_before = len(os.listdir(f"/proc/{server.pid}/fd"))
        for _ in range(3):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(server.address)
            socket.send_fds(connection, [b'{"script"'], [0, 1, 2])
            connection.close()
        assert jobs.run("print('well')", address=server.address) == (0, "well\n", "")
        until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= open_before)


class TestWithoutAServer:
    BODY = "print('torch' in sys.modules, os.getppid()); sys.exit(5)"

    def test_a_script_runs_directly(self, jobs: Jobs) -> None:
        assert jobs.run(self.BODY, address=None) == (5, f"False {os.getpid()}\n", "")

    def test_a_socket_that_is_gone_is_no_matter(self, jobs: Jobs, tmp_path: Path) -> None:
        assert jobs.run(self.BODY, address=str(tmp_path / "none")) == (5, f"False {os.getpid()}\n", "")

    def test_a_socket_that_nobody_listens_to_is_no_matter(self, own_server: Server, jobs: Jobs) -> None:
        own_server.end()
        until(lambda: not os.path.exists(f"/proc/{own_server.pid}"))
        assert os.path.exists(own_server.address)
        assert jobs.run(self.BODY, address=own_server.address) == (5, f"False {os.getpid()}\n", "")


class TestNothingOutlivesWhomItWorksFor:
    SLEEP = "import time\ntime.sleep(600)"

    def test_a_job_ends_with_the_script_that_asked_and_lets_go_of_what_it_holds(
        self, server: Server, jobs: Jobs, is_running: Callable[[int], bool]
    ) -> None:
        body = f"try:\n    {self.SLEEP.replace(chr(10), chr(10) + '    ')}\nfinally:\n    open('freed', 'w')"
        script, job = jobs.start_and_wait(body, address=server.address)
        script.send_signal(signal.SIGKILL)
        script.communicate()
        until(lambda: not is_running(job))
        assert (jobs.folder / "freed").exists()
        assert jobs.run("print('well')", address=server.address)[1] == "well\n"

    def test_a_job_and_its_script_that_end_at_once_do_not_take_the_server_with_them(
        self, server: Server, jobs: Jobs, is_running: Callable[[int], bool]
    ) -> None:
        """The server learns of both in one wake-up: while they end it reads another's half request."""
        for victims in (("script", "job"), ("job", "script")):
            script, job = jobs.start_and_wait(self.SLEEP, address=server.address)
            half = socket.socket(socket.AF_UNIX)
            half.connect(server.address)
            half.send(b"{")
            for victim in victims:
                os.kill(job if victim == "job" else script.pid, signal.SIGKILL)
                until(lambda pid=job if victim == "job" else script.pid: not is_running(pid))
            script.communicate()
            half.close()
            assert jobs.run("print('well')", address=server.address) == (0, "well\n", "")

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    def test_jobs_end_with_the_server_and_their_scripts_say_so(
        self, own_server: Server, jobs: Jobs, is_running: Callable[[int], bool], how: signal.Signals
    ) -> None:
        script, job = jobs.start_and_wait(self.SLEEP, address=own_server.address)
        os.kill(own_server.pid, how)
        _, err = script.communicate(timeout=PATIENCE)
        assert script.returncode == 1
        assert err == "the fork server ended before the job did; run the same command again\n"
        until(lambda: not is_running(job))

    def test_a_script_whose_request_was_never_read_runs_directly(
        self, own_server: Server, jobs: Jobs
    ) -> None:
        os.kill(own_server.pid, signal.SIGSTOP)
        script = jobs.start("print(STARTED == os.getpid())", address=own_server.address)
        until(lambda: _waits_for_an_answer(script.pid))
        os.kill(own_server.pid, signal.SIGKILL)
        out, err = script.communicate(timeout=PATIENCE)
        assert (script.returncode, out, err) == (0, "True\n", "")

    def test_the_server_and_its_jobs_end_with_the_process_that_started_it(
        self, own_server: Server, jobs: Jobs, is_running: Callable[[int], bool]
    ) -> None:
        script, job = jobs.start_and_wait(self.SLEEP, address=own_server.address)
        own_server.starter.send_signal(signal.SIGKILL)
        own_server.starter.wait()
        until(lambda: not is_running(own_server.pid))
        until(lambda: not is_running(job))
        script.communicate(timeout=PATIENCE)
        assert script.returncode == 1


def _waits_for_an_answer(pid: int) -> bool:
    """Whether a process sleeps with a socket open."""
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:  # a file was closed meanwhile
        return False
    return state == "S" and any(link.startswith("socket:") for link in links)


def test_the_socket_is_for_nobody_else_and_is_gone_after_stop(
    monkeypatch: pytest.MonkeyPatch, is_running: Callable[[int], bool]
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "")
    before = os.umask(0)
    try:
        server = ForkServer(ROOT)
        server.start()
    finally:
        os.umask(before)
    folder = Path(os.environ[ADDRESS_VARIABLE]).parent
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert server._process is not None
        assert is_running(server._process.pid)
    finally:
        server.stop()
    assert not folder.exists()
    assert not is_running(server._process.pid)
    server.stop()  # once more is no matter


def test_a_server_for_triton_has_hashed_it_once_for_all_jobs(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "")
    server = ForkServer(ROOT, ["torch", "harness.triton_ready"])
    server.start()
    body = """
import torch
from triton.runtime.cache import triton_key
print(triton_key.cache_info().currsize, torch.cuda.is_initialized())
"""
    try:
        assert jobs.run(body, address=os.environ[ADDRESS_VARIABLE]) == (0, "1 False\n", "")
    finally:
        server.stop()
