"""Several hosts: network namespaces of one machine, joined by a bridge, with a launcher in each.

Needs root. K lies inside a host, R across; a host may die, be stopped, be cut off, or be slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from distributed import run_ranks
from faults import STORE, Fault, train
from test_faults import Recorder, assert_nothing_lost, expected
from test_restarts import ROOT, assert_named, check, final_report, run_job
from training_runs import WORLD, Outcome

from hf_pipetransformer.parts.prefix_cache.cache.writing import StoreWriting

PORT = 29500
"""Of the rendezvous; namespaces have ports of their own."""


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0:
        return False
    name = f"hfp{os.getpid()}x"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not _can_make_namespaces(), reason="network namespaces need root and iproute2"),
]


@dataclass
class Hosts:
    """Namespaces with one address each."""

    names: list[str]

    def address(self, host: int) -> str:
        return f"10.77.{os.getpid() % 250}.{host + 1}"

    def run(self, host: int, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.names[host], *command], check=True, capture_output=True)

    def torchrun(self, processes: int) -> list[list[str]]:
        """A `torchrun` command for each host. It starts this number of processes."""
        return [
            [
                *self._inside(host),
                *("torch.distributed.run", f"--nnodes={len(self.names)}", f"--nproc_per_node={processes}"),
                *("--max_restarts=2", "--rdzv-backend=c10d", "--rdzv-id=test", f"--local-addr={self.address(host)}"),
                f"--rdzv-endpoint={self.address(0)}:{PORT}",
                f"--rdzv-conf=is_host={int(host == 0)},join_timeout=60",
            ]
            for host in range(len(self.names))
        ]

    def accelerate(self, processes: int) -> list[list[str]]:
        """An `accelerate launch` command for each host, as in `docs/multi_node.md`."""
        return [
            [
                *self._inside(host),
                *("accelerate.commands.launch", f"--config_file={ROOT / 'accelerate_configs/cpu_4.yaml'}"),
                *(f"--num_machines={len(self.names)}", f"--num_processes={processes * len(self.names)}"),
                *(f"--machine_rank={host}", f"--main_process_ip={self.address(0)}", f"--main_process_port={PORT}"),
                "--max_restarts=2",
            ]
            for host in range(len(self.names))
        ]

    def _inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], "env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-m"]


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Network namespaces as hosts. The test's parameter is their number."""
    names = [f"hfp{os.getpid()}h{host}" for host in range(request.param)]
    bridge = f"hfp{os.getpid()}"
    made = Hosts(names)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for host, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{bridge}v{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{bridge}v{host}", "master", bridge, "up")
            made.run(host, "ip", "addr", "add", f"{made.address(host)}/24", "dev", "eth0")
            made.run(host, "ip", "link", "set", "eth0", "up")
            made.run(host, "ip", "link", "set", "lo", "up")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_several_hosts_train_as_one(hosts: Hosts, tmp_path: Path) -> None:
    """The first layout has a stage on each."""
    assert_trains(hosts.torchrun(1), tmp_path)


def assert_trains(commands: list[list[str]], folder: Path) -> None:
    """Train without a fault, and expect the usual outcome."""
    (folder / "fault").write_text("none")
    run_job(commands, folder, Fault("kill", 0, "none", 0), timeout=250)
    assert_nothing_lost([final_report(folder)], expected())


@pytest.mark.parametrize("hosts", [2], indirect=True)
@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        ("torchrun", Fault("kill", 3, "step", 4)),
        ("torchrun", Fault("stop", 2, "save", 5)),
        ("accelerate", Fault("kill", 0, "move", 5)),
    ],
)
def test_two_hosts_restart_once(
    hosts: Hosts, launcher: str, fault: Fault, tmp_path: Path, record_property: Recorder
) -> None:
    output = run_job(getattr(hosts, launcher)(2), tmp_path, fault, timeout=250)
    assert_named(output, fault)
    check(tmp_path, output, fault, record_property, f"{launcher}, 2 hosts")


def in_the_order_of_two_hosts(rank: int, world_size: int, folder: str) -> Outcome:
    """Each host gets its own samples again. (No outputs are stored here.)"""
    StoreWriting.put = lambda *_: False  # type: ignore[method-assign]
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    return train(rank, world_size, folder).outcome


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_each_host_has_a_store_of_its_own_that_outlives_a_fault(
    hosts: Hosts, tmp_path: Path, record_property: Recorder
) -> None:
    uncached = tmp_path / "uncached"
    uncached.mkdir()
    (uncached / STORE).mkdir()
    wanted = run_ranks(in_the_order_of_two_hosts, WORLD, str(uncached))[0]
    (tmp_path / STORE).mkdir()
    fault = Fault("kill", 2, "step", 10)
    output = run_job(hosts.torchrun(2), tmp_path, fault, timeout=250)
    check(tmp_path, output, fault, record_property, "torchrun, 2 hosts, cache", wanted)
    stores = [path for path in (tmp_path / STORE).iterdir() if path.is_dir()]
    assert len(stores) == 2
    for store in stores:
        generations = {path.name[:3] for path in store.iterdir() if path.is_dir()}
        assert "002" in generations, generations  # of two frozen layers
        assert sum(path.stat().st_size for path in store.glob("002-*/*")) > 0
    # of the epoch before the last, which the fault was in: what had been put was found by the next attempt
    assert final_report(tmp_path).hit_rates[-1] > 0.85


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_host_that_stands_still_is_named_and_the_job_goes_on(
    hosts: Hosts, tmp_path: Path, record_property: Recorder
) -> None:
    """The host's launcher lives: for a new attempt it asks its processes to end, and kills them after 30 s."""
    fault = Fault("stop_host", 3, "step", 4)
    output = run_job(hosts.torchrun(2), tmp_path, fault, timeout=280)
    assert re.search(r"\[rank ?[01]\]:? rank [23].* could not be reached for", output)
    check(tmp_path, output, fault, record_property, "torchrun, 2 hosts")


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_host_that_is_cut_off_is_named_and_the_job_goes_on_when_it_is_back(
    hosts: Hosts, tmp_path: Path, record_property: Recorder
) -> None:
    fault = Fault("cut", 3, "step", 4)

    def mend() -> None:
        while not (tmp_path / "fault").exists():
            time.sleep(0.1)
        time.sleep(8)
        hosts.run(1, "ip", "link", "set", "eth0", "up")

    mender = threading.Thread(target=mend, daemon=True)
    mender.start()
    output = run_job(hosts.torchrun(2), tmp_path, fault, timeout=280)
    # each host says it of the other
    assert re.search(r"\[rank ?[01]\]:? rank [23].* could not be reached for", output)
    assert re.search(r"\[rank ?[23]\]:? rank [01].* could not be reached for", output)
    check(tmp_path, output, fault, record_property, "torchrun, 2 hosts")
    assert final_report(tmp_path).resumed_step == 4
