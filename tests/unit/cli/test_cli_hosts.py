"""The machines of a launch: hostfile, filters, and the environment variables of schedulers."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroaccel.cli.launch.hostfile import Host, cluster_environment, expand_nodelist, read_hostfile, select_hosts
from zeroaccel.errors import ConfigError

HOSTS = [Host("node1", (0, 1, 2, 3)), Host("node2", (0, 1, 2, 3)), Host("me@node3", (0, 1, 2, 3))]


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# a comment\nnode1 slots=4\n\n  node2\tslots=4   # another\nme@node3 slots=4\n")
    assert read_hostfile(str(path)) == HOSTS
    path.write_text("single\n")
    assert read_hostfile(str(path)) == [Host("single", (0,))]
    assert HOSTS[2].address == "node3"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("node1 slots=4\nnode2 slot=4", r"hosts:2: expected a machine and its number .*, got 'node2 slot=4'"),
        ("node1 slots=0", "hosts:1: expected"),
        ("-oProxyCommand=x slots=1", "hosts:1: expected"),
        ("x@", "hosts:1: expected"),
        ("@x slots=1", "hosts:1: expected"),
        ("node1\nnode1", "hosts:2: node1 appears twice; give each machine one line"),
        ("# nothing", "names no machine: expected a line per machine"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "hosts").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(str(tmp_path / "hosts"))


def test_a_missing_file_and_a_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_hostfile(str(tmp_path / "hosts"))
    with pytest.raises(ConfigError, match="expected a file, got a folder"):
        read_hostfile(str(tmp_path))


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, {"node1": (0, 1, 2, 3), "node2": (0, 1, 2, 3), "me@node3": (0, 1, 2, 3)}),
        ("node2@node1", None, {"node1": (0, 1, 2, 3), "node2": (0, 1, 2, 3)}),
        ("node1:0,2@me@node3:1,3", None, {"node1": (0, 2), "me@node3": (1, 3)}),
        (None, "node1@me@node3", {"node2": (0, 1, 2, 3)}),
        (None, "node1:0@node2:3@me@node3:1", {"node1": (1, 2, 3), "node2": (0, 1, 2), "me@node3": (0, 2, 3)}),
    ],
)
def test_filters_select_hosts_and_slots(
    include: str | None, exclude: str | None, left: dict[str, tuple[int, ...]]
) -> None:
    kept = select_hosts(HOSTS, include, exclude)
    assert {host.name: host.slots for host in kept} == left
    assert list(left) == [host.name for host in kept]
    assert [host.all_slots for host in kept] == [len(slots) == 4 for slots in left.values()]


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("node4", None, "--inclusion_filter: expected machines of the hostfile, got 'node4'; did you mean node"),
        ("node1:4", None, "--inclusion_filter: expected slots 0 to 3 of node1, got 4"),
        ("node1:a", None, "expected the form node1@node2:0,2, got 'node1:a'"),
        (None, "node1@node2@me@node3", "--exclusion_filter: leaves no machine"),
        (None, "node1:0", "has 4 processes and node1 3, but all machines must have the same number"),
    ],
)
def test_wrong_filters_are_refused(include: str | None, exclude: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        select_hosts(HOSTS[:2] if include else HOSTS, include, exclude)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
    ],
)
def test_node_lists_of_slurm_are_expanded(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


def _variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


SLURM = _variables(
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=gpu[3-4] SLURM_NODEID=1 SLURM_JOB_ID=123456"
)
MPI = _variables("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=1")
PET = "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=job-0 PET_MASTER_PORT=29400"
KUBERNETES = "KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=0 WORLD_SIZE=3 MASTER_ADDR=job-0"
PLACE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "num_processes")


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ()),
        (_variables("SLURM_JOB_ID=1 SLURM_NNODES=2 SLURM_NODEID=0"), ()),  # a batch script without srun
        (SLURM | {"LOCAL_RANK": "0"}, ()),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, ()),
        (SLURM, (2, 1, "gpu3", 23456)),
        (MPI, (4, 3)),
        (_variables(PET), (2, 1, "job-0", 29400, 16)),
        (_variables(KUBERNETES), (3, 0, "job-0")),
    ],
)
def test_variables_of_schedulers_give_the_place_of_a_machine(
    environ: dict[str, str], place: tuple[object, ...]
) -> None:
    found = cluster_environment(environ)
    assert found.values == dict(zip(PLACE, place, strict=False))
    assert found.sources.keys() == found.values.keys()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (SLURM | {"SLURM_STEP_NUM_TASKS": "16"}, "srun has started 16 launchers on 2 machines; .*--ntasks-per-node=1"),
        (
            MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun has started 2 launchers on this machine",
        ),
    ],
)
def test_several_launchers_on_a_machine_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_environment(environ)
