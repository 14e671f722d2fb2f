"""Several hosts: network namespaces of one machine, joined by a bridge, with a launcher in each.

Needs root. K lies inside a host, R across; a host may die, be cut off, or be slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, Report
from test_faults import expected
from test_restarts import check, run_job
from training_runs import assert_same_training

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

    def launch(self, host: int, processes: int) -> list[str]:
        return [
            *("ip", "netns", "exec", self.names[host], "env", "GLOO_SOCKET_IFNAME=eth0"),
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.names)}"),
            *(f"--nproc_per_node={processes}", "--max_restarts=2", "--rdzv-backend=c10d", "--rdzv-id=test"),
            *(f"--rdzv-endpoint={self.address(0)}:{PORT}", f"--rdzv-conf=is_host={int(host == 0)},join_timeout=60"),
            f"--local-addr={self.address(host)}",
        ]


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """As many as the test's parameter says."""
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


@pytest.mark.parametrize(("hosts", "processes"), [(2, 2), (4, 1)], indirect=["hosts"], ids=["2x2", "4x1"])
def test_several_hosts_train_as_one(hosts: Hosts, processes: int, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("none")
    commands = [hosts.launch(host, processes) for host in range(len(hosts.names))]
    run_job(commands, tmp_path, Fault("kill", 0, "none", 0), timeout=200)
    assert_same_training([torch.load(tmp_path / "final.pt", weights_only=False).outcome], expected())


@pytest.mark.parametrize("hosts", [2], indirect=True)
@pytest.mark.parametrize(
    "fault", [Fault("kill", 3, "step", 4), Fault("kill", 0, "move", 5), Fault("stop", 2, "save", 5)]
)
def test_two_hosts_restart_once(
    hosts: Hosts, fault: Fault, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    output = run_job([hosts.launch(host, 2) for host in range(2)], tmp_path, fault, timeout=250)
    check(tmp_path, output, fault, record_property, "torchrun, 2 hosts")


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_slow_host_changes_nothing(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("none")
    limit = ["root", "tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms"]
    subprocess.run(["ip", "netns", "exec", hosts.names[1], "tc", "qdisc", "add", "dev", "eth0", *limit], check=True)
    run_job([hosts.launch(host, 2) for host in range(2)], tmp_path, Fault("kill", 0, "none", 0), timeout=250)
    assert_same_training([torch.load(tmp_path / "final.pt", weights_only=False).outcome], expected())


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_a_host_that_is_cut_off_is_named_and_the_job_goes_on_when_it_is_back(hosts: Hosts, tmp_path: Path) -> None:
    fault = Fault("cut", 3, "step", 4)

    def mend() -> None:
        while not (tmp_path / "fault").exists():
            time.sleep(0.1)
        time.sleep(8)
        hosts.run(1, "ip", "link", "set", "eth0", "up")

    mender = threading.Thread(target=mend, daemon=True)
    mender.start()
    output = run_job([hosts.launch(host, 2) for host in range(2)], tmp_path, fault, timeout=280)
    # each host says it of the other
    assert re.search(r"\[rank [01]\] rank [23].* could not be reached for", output)
    assert re.search(r"\[rank [23]\] rank [01].* could not be reached for", output)
    report: Report = torch.load(tmp_path / "final.pt", weights_only=False)
    assert_same_training([report.outcome], expected())
    assert report.resumed_step == 4
