"""A real Slurm of one node, from Debian's packages, started for the tests and gone with them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.process import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
PLUGIN = "snakemake_executor_plugin_slurm"
INSTALL_LIMIT_S = 240.0
COMMAND_LIMIT_S = 20.0
PATIENCE_S = 150.0  # a run does two jobs, on a busy machine, before the one that is waited for


class NoCluster(Exception):
    """Why there can be no Slurm here, in one line."""


def install() -> None:
    """Install Slurm's packages where they are missing; raises NoCluster where that cannot be done."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if all(shutil.which(program, path=path) for program in PROGRAMS):
        return
    if os.geteuid() != 0:
        raise NoCluster("Slurm is not installed, and only root can install it")
    if shutil.which("apt-get") is None:
        raise NoCluster("Slurm is not installed, and there is no apt-get to install it with")
    with no_services():
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *PACKAGES)


def _apt_get(*arguments: str) -> None:
    # A package manager that is at work elsewhere is waited for, a mirror that does not answer is not.
    options = ["-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
    try:
        done = subprocess.run(
            ["apt-get", "-qq", *options, *arguments],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise NoCluster(f"apt-get {arguments[0]} did not end within {INSTALL_LIMIT_S:g} s") from None
    if done.returncode != 0:
        said = " ".join(done.stdout.split())[-300:]
        raise NoCluster(f"apt-get {arguments[0]} failed (no network?): {said}")


@contextlib.contextmanager
def no_services() -> Iterator[None]:
    """Have no package start a service of its own when it is installed, by Debian's means for that."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def plugin_path(folder: Path) -> str | None:
    """The folder that Snakemake's plugin for Slurm is in, installed there; None where Python finds it anyway.

    Raises NoCluster where it cannot be installed.
    """
    if importlib.util.find_spec(PLUGIN) is not None:
        return None
    # All that the plugin needs besides is in requirements.lock.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    try:
        done = subprocess.run(
            [*command, "--requirement", str(ROOT / "requirements-slurm.txt")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        raise NoCluster("pip did not install Snakemake's plugin for Slurm within 120 s") from None
    if done.returncode != 0:
        raise NoCluster(
            f"pip cannot install Snakemake's plugin for Slurm: {' '.join(done.stdout.split())[-300:]}"
        )
    return str(folder)


class Cluster:
    """munged, slurmctld and slurmd, with all their files in a folder of their own.

    Used in a `with`: at its end every daemon, job step and job is gone.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="attention-bench-slurm-"))
        self.folder.chmod(0o755)  # munged refuses a folder that others cannot pass through
        self.node = socket.gethostname().partition(".")[0]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def variables(self) -> dict[str, str]:
        """What makes Slurm's commands talk to this cluster."""
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder}/bin:{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "-D", "-f", self.variables["SLURM_CONF"])
            self.start_node()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _configure(self) -> None:
        controller, node = free_ports(2)
        memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        (self.folder / "slurm.conf").write_text(f"""
ClusterName=bench
SlurmctldHost={self.node}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=0
SchedulerParameters=sched_interval=1
SlurmdTimeout=10
KillWait=3
InactiveLimit=0
MinJobAge=300
NodeName={self.node} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory={memory_mib // 2} Gres=gpu:1
PartitionName=main Nodes={self.node} Default=YES MaxTime=INFINITE State=UP
""")
        # To Slurm a GPU is a file; what a job then finds is another matter.
        (self.folder / "gres.conf").write_text("Name=gpu Count=1 File=/dev/null\n")
        for name in ("state", "spool", "bin"):
            (self.folder / name).mkdir()
        # Snakemake's job steps drop SLURM_CONF, and /etc may hold the configuration of a cluster in use.
        step = self.folder / "bin" / "srun"
        srun = shutil.which("srun", path=self.variables["PATH"])
        step.write_text(f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {srun} "$@"\n')
        step.chmod(0o755)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{ending}" for option, ending in files.items()]
        self._start("munged", "--foreground", f"--key-file={key}", *options)
        self.until(lambda: (self.folder / "munge.socket").exists())

    def start_node(self) -> None:
        """Start the node's daemon, and wait until the cluster has taken it up."""
        self._start("slurmd", "-D", "-N", self.node, "-f", self.variables["SLURM_CONF"])

        def taken_up() -> bool:
            state = self.node_state()
            if state.startswith(("down", "drain")):
                self.command("scontrol", "update", f"nodename={self.node}", "state=resume", check=False)
            return state in ("idle", "mixed", "allocated")

        self.until(taken_up)

    def node_state(self) -> str:
        return self.command("sinfo", "--noheader", "--format=%T", check=False).strip()

    def take_node_down(self) -> None:
        """As when a node loses its power: the daemon and all jobs on it are gone, and it is marked down."""
        self._end("slurmd", signal.SIGKILL)
        # Before its jobs end: one that is killed first may still live to report that it failed by itself.
        self.command("scontrol", "update", f"nodename={self.node}", "state=down", "reason=test")
        self._end_jobs()

    def command(self, *words: str, check: bool = True) -> str:
        """What a Slurm command prints."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout if done.returncode == 0 else ""

    def jobs(self, state: str) -> list[str]:
        """The numbers of the jobs in a state, as squeue calls it."""
        return self.command("squeue", "--noheader", f"--states={state}", "--format=%i").split()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition holds; its value. Fails with the daemons' logs."""
        give_up = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            assert time.monotonic() < give_up, f"waited {PATIENCE_S:g} s in vain\n{self.logs()}"
            time.sleep(0.2)
        return value

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        texts = []
        for path in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out")):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()
                texts.append("\n".join([f"--- {path.name}", *lines[-25:]]))
        return "\n".join(texts)

    def stop(self) -> None:
        """End everything, job steps and jobs included, and remove the folder."""
        for name in ("slurmd", "slurmctld", "munged"):
            self._end(name, signal.SIGTERM)
            if name == "slurmd":
                self._end_jobs()
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> dict[int, str]:
        """The command lines of all processes that were started for this cluster or by it."""
        found = {}
        marker = str(self.folder).encode()
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != os.getpid():
                with contextlib.suppress(OSError):
                    state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    command = (process / "cmdline").read_bytes()
                    if state not in "ZX" and (
                        marker in command or marker in (process / "environ").read_bytes()
                    ):
                        found[int(process.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def _start(self, program: str, *arguments: str) -> None:
        parent = os.getpid()
        path = shutil.which(program, path=self.variables["PATH"])
        assert path is not None
        with (self.folder / f"{program}.out").open("ab") as output:
            self._daemons[program] = subprocess.Popen(
                [path, *arguments],
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Whatever becomes of the tests, no daemon outlives them.
                preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),
            )

    def _end(self, program: str, how: signal.Signals) -> None:
        daemon = self._daemons.pop(program, None)
        if daemon is None:
            return
        daemon.send_signal(how)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(10)

    def _end_jobs(self) -> None:
        """Kill job steps, and whatever has a job's number in its environment."""
        own = {daemon.pid for daemon in self._daemons.values()}
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up:
            found = {
                pid for pid in self.processes() if pid not in own and (_is_step(pid) or _has_job_number(pid))
            }
            if not found:
                return
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _is_step(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
    return False


def _has_job_number(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"SLURM_JOB_ID=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    listeners = [socket.socket() for _ in range(count)]
    try:
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
