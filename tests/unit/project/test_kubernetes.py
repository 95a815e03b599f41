"""The jobs for Kubernetes: pods follow its own schema, and jobs the operators' fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from launchers import REPOSITORY

from hvd_trainer.config.parser import parse
from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.rendezvous.endpoint import SECRET_FILE

FOLDER = REPOSITORY / "examples/kubernetes"
RUN_POLICY = {
    "activeDeadlineSeconds",
    "backoffLimit",
    "cleanPodPolicy",
    "managedBy",
    "schedulingPolicy",
    "suspend",
}
REPLICA = {"replicas", "restartPolicy", "template"}
MPI_JOB = {
    *("launcherCreationPolicy", "mpiImplementation", "mpiReplicaSpecs", "runLauncherAsWorker", "runPolicy"),
    *("slotsPerWorker", "sshAuthMountPath"),
}
PYTORCH_JOB = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
LATEST = kubernetes_validate.latest_version()


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text()))


def mpi_job() -> tuple[dict[str, Any], dict[str, Any]]:
    job = read("mpijob-horovod.yaml")
    return job, job["spec"]["mpiReplicaSpecs"]


def pytorch_job() -> tuple[dict[str, Any], dict[str, Any]]:
    job = read("pytorchjob-ddp.yaml")
    return job, job["spec"]["pytorchReplicaSpecs"]


def pods(*without: str) -> list[Any]:
    return [
        pytest.param(replica, id=f"{job['kind']}-{name}")
        for job, replicas in (mpi_job(), pytorch_job())
        for name, replica in replicas.items()
        if name not in without
    ]


@pytest.mark.parametrize("replica", pods())
def test_pods_follow_the_kubernetes_schema(replica: dict[str, Any]) -> None:
    assert replica.keys() <= REPLICA
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **replica["template"]}
    kubernetes_validate.validate(pod, LATEST, strict=True)


def test_volume_follows_the_kubernetes_schema() -> None:
    kubernetes_validate.validate(read("volume.yaml"), LATEST, strict=True)


def test_jobs_use_the_operators_fields() -> None:
    mpi, pytorch = mpi_job()[0], pytorch_job()[0]
    assert (mpi["apiVersion"], mpi["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert (pytorch["apiVersion"], pytorch["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert mpi["spec"].keys() <= MPI_JOB
    assert pytorch["spec"].keys() <= PYTORCH_JOB
    for job in (mpi, pytorch):
        assert job["spec"]["runPolicy"].keys() <= RUN_POLICY
    assert mpi_job()[1].keys() == {"Launcher", "Worker"}
    assert pytorch_job()[1].keys() == {"Master", "Worker"}


@pytest.mark.parametrize("replica", pods("Launcher"))
def test_training_pods_have_shared_memory_volume_and_user(replica: dict[str, Any]) -> None:
    pod = replica["template"]["spec"]
    (container,) = pod["containers"]
    assert "nvidia.com/gpu" in container["resources"]["limits"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    # A file that the pod's user may read, and nobody beside its group.
    secret = volumes[mounts["/etc/hvd_trainer"]]["secret"]
    assert (secret["secretName"], secret["defaultMode"]) == ("hvd-trainer", 0o440)
    claim = volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"]
    assert claim == read("volume.yaml")["metadata"]["name"]
    dockerfile = Path(REPOSITORY / "docker/Dockerfile").read_text()
    assert f"ARG USER_ID={pod['securityContext']['fsGroup']}\n" in dockerfile


def test_launchers_name_the_secret() -> None:
    """torchrun and horovodrun tell anybody who asks where a job's ranks meet."""
    containers = {
        f"{job['kind']}-{name}": replica["template"]["spec"]["containers"][0]
        for job, replicas in (mpi_job(), pytorch_job())
        for name, replica in replicas.items()
    }
    named = {
        name: {variable["name"]: variable["value"] for variable in container.get("env", [])}.get(SECRET_FILE)
        for name, container in containers.items()
        if "hvd_trainer.mnist" in container["args"]
    }
    starters = ("MPIJob-Launcher", "PyTorchJob-Master", "PyTorchJob-Worker")
    assert named == dict.fromkeys(starters, "/etc/hvd_trainer/secret")


def job_of(arguments: list[str]) -> MnistOptions:
    """Return the options that the job reads from a command line."""
    return parse(MnistOptions, arguments[arguments.index("hvd_trainer.mnist") + 1 :])


def test_mpi_job_starts_a_rank_per_slot() -> None:
    job, replicas = mpi_job()
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    words = container["args"]
    ranks = job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]
    assert words[: words.index("python")] == [
        *("horovodrun", "-np", str(ranks), "--hostfile", "/etc/mpi/hostfile", "-p", "2222")
    ]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(job["spec"]["slotsPerWorker"])
    assert job_of(words).save.resume == "auto"


def test_pytorch_job_starts_a_rank_per_gpu() -> None:
    job, replicas = pytorch_job()
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for it by this name"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
        options = job_of(container["args"])
        assert (options.engine.backend, options.save.resume) == ("ddp", "auto")
