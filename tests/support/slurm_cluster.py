"""A private, real Slurm on this machine: munged, slurmctld and three slurmd, in a temporary folder.

Three slurmd with different names and ports stand for three nodes (``slurmd -N``): a test can ask for
``srun -N 2``. Each node claims 8 CPUs and 8 GPUs whatever the machine has. Nothing outside the temporary
folder is written, and Debian's own configuration and services are neither used nor needed. The
daemons are children of the test process, and the kernel kills them if that dies.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import process_tree
from waiting import PATIENCE_S

NODES = ("node1", "node2", "node3")
CPUS_PER_NODE = 8
GPUS_PER_NODE = 8
_START_LIMIT_S = 30.0
_SLURM_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "scancel")

_CONFIGURATION = """\
ClusterName=hvd_trainer_test
# Job numbers of two clusters on one machine should differ: ports and files are named by them.
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# No control groups, no accounting, no mail: none of them exists in a container.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
# CPUs=8 on a machine that has fewer is accepted, and jobs may share them.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
# A batch job starts when it is submitted; by default Slurm lets three seconds of them gather.
SchedulerParameters=batch_sched_delay=0
GresTypes=gpu
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str | None:
    """Return why Slurm cannot be started here, with what to do about it; None where it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root: run the tests as root"
    for program, package in (("munged", "munge"), *((p, "slurm-wlm") for p in _SLURM_PROGRAMS)):
        if _find(program) is None:
            return f"no {program} on this machine: apt-get install {package}"
    return None


def _find(program: str) -> str | None:
    """Return a daemon's path; they lie in /usr/sbin, which is not on every PATH."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


def _program(name: str) -> str:
    path = _find(name)
    if path is None:
        raise FileNotFoundError(f"no {name} on this machine: {missing()}")
    return path


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago; all are held while searching, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class SlurmCluster:
    """The daemons and their folder, from :meth:`start` to :meth:`stop`.

    The thread that calls ``start`` must live as long as the cluster is wanted.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hvd-slurm-"))
        self._mark = f"slurm-{secrets.token_hex(8)}"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environ(self) -> dict[str, str]:
        """Variables that a Slurm command needs to reach this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle: well under a second.

        Raises:
            RuntimeError: a daemon ended, or they are not ready in time; it has the logs' ends.
        """
        # munged refuses a folder that others cannot enter, and mkdtemp makes one.
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        self._write_configuration()
        try:
            self._start_munged()
            self._start_daemon(_program("slurmctld"), "-D", "-i")
            self._wait_for("slurmctld", "scontrol", "ping", expect="UP")
            for node in NODES:
                self._start_daemon(_program("slurmd"), "-D", "-N", node)
            nodes_idle = "\n".join(["idle"] * len(NODES))
            self._wait_for("the nodes", "sinfo", "-h", "-N", "-o", "%T", expect=nodes_idle)
        except BaseException:
            self.stop()
            raise

    def _write_configuration(self) -> None:
        controller_port, *node_ports = _free_ports(1 + len(NODES))
        configuration = _CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            folder=self.folder,
            first_job=1 + secrets.randbelow(1_000_000),
            controller_port=controller_port,
            nodes=",".join(NODES),
            node_ports=",".join(map(str, node_ports)),
            cpus=CPUS_PER_NODE,
            gpus=GPUS_PER_NODE,
        )
        (self.folder / "slurm.conf").write_text(configuration)
        # Slurm hands out any devices of these names, and sets CUDA_VISIBLE_DEVICES as it does for real ones.
        for number in range(GPUS_PER_NODE):
            (self.folder / f"gpu{number}").symlink_to("/dev/null")
        devices = f"Name=gpu AutoDetect=off File={self.folder}/gpu[0-{GPUS_PER_NODE - 1}]"
        (self.folder / "gres.conf").write_text(f"{devices}\n")

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        socket_path = self.folder / "munge.socket"
        # --force: a temporary folder that the group may write to is good enough for this key.
        self._start_daemon(
            _program("munged"),
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={socket_path}",
            f"--pid-file={self.folder / 'munged.pid'}",
            f"--seed-file={self.folder / 'munged.seed'}",
            f"--log-file={self.folder / 'munged.log'}",
        )
        self._wait_for("munged", "munge", "-n", "-S", str(socket_path), expect="MUNGE")

    def _start_daemon(self, *command: str) -> None:
        # setpriv asks the kernel to kill the daemon when this thread ends, however it ends.
        with (self.folder / f"{Path(command[0]).name}.out").open("ab") as output:
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={**os.environ, **self.environ, process_tree.MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _wait_for(self, what: str, *command: str, expect: str) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            asked = self.client(*command, check=False)
            if expect in asked.stdout:
                return
            if any(daemon.poll() is not None for daemon in self._daemons):
                raise RuntimeError(f"a Slurm daemon ended at start\n{self.logs()}")
            if time.monotonic() > deadline:
                said = f"{command[0]} says: {asked.stdout}{asked.stderr}"
                raise RuntimeError(f"{what} not up in {_START_LIMIT_S:g} s; {said}\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the last lines of every daemon's log."""
        parts = []
        for file in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            lines = file.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n  ".join([f"{file.name}:", *lines]))
        return "\n".join(parts)

    def client(
        self, *command: str, check: bool = True, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's short commands (squeue, scontrol ...) against this cluster."""
        return subprocess.run(
            [_program(command[0]), *command[1:]],
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
            timeout=timeout_s,
        )

    def cancel(self, job_name: str) -> None:
        """End the jobs of that name at once, without Slurm's half minute of patience."""
        self.client("scancel", "--signal=KILL", "--full", f"--name={job_name}", check=False)
        self.client("scancel", f"--name={job_name}", check=False)

    def stop(self) -> None:
        """Cancel all jobs, end the daemons, remove the folder. Safe to call twice."""
        if self._daemons and self._daemons[-1].poll() is None:
            self.client("scancel", "--signal=KILL", "--full", "--state=RUNNING", check=False)
        # Newest first: the nodes, then the controller, then munged, which the others need.
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        process_tree.kill_all_marked(self._mark)
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def shared() -> SlurmCluster:
    """Return the cluster of this test session, which the first call starts; see :func:`stop_shared`."""
    cluster = SlurmCluster()
    cluster.start()
    return cluster


def stop_shared() -> None:
    """Stop the shared cluster if anything started it."""
    if shared.cache_info().currsize:
        shared().stop()
        shared.cache_clear()
