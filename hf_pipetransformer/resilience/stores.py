"""A separate TCP store for each attempt of a job, through which its processes connect to each other.

`torchrun` and `accelerate launch` keep one store for all attempts of a job. When they restart the job, the processes
read the addresses of the previous attempt in that store, and never connect. Therefore rank 0 creates a new store in
each attempt, and only its address is exchanged through the launcher's store.
"""

from __future__ import annotations

import ipaddress
import socket
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

ADDRESS = "hf_pipetransformer/store"
"""Key of rank 0's address in the launcher's store. Its value may still be an earlier attempt's address."""
CONNECTED, ALL_CONNECTED = "connected", "all connected"

_kept: list[dist.TCPStore] = []  # a store lives as long as its object


def use_fresh_store(environ: MutableMapping[str, str], timeout: timedelta) -> None:
    """Make the process group use a store of this attempt only. Call `wait_for_connections` once the group exists.

    Has no effect if a process group exists already, or if no launcher keeps a store. Collective over all processes.

    Args:
        environ: environment of the process; `MASTER_ADDR` and `MASTER_PORT` are changed.
        timeout: time for which the other processes wait for rank 0.

    Raises:
        ValueError: the launcher has set port 0.
        TimeoutError: rank 0 could not be reached in time; torch raises its own store error if rank 0 never started.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    if "RANK" in environ and environ.get("MASTER_PORT") == "0":
        raise ValueError(
            "MASTER_PORT=0 is not supported, because the processes could not find each other. Pass a free port to"
            " torchrun (--master_port 29501), or let it choose one (--standalone, or --rdzv-backend=c10d"
            " --rdzv-endpoint=localhost:0)."
        )
    is_launched = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) and environ.get("WORLD_SIZE", "1") != "1"
    if not is_launched or _kept:  # called before; the process group has been destroyed since
        return
    launchers = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if environ["RANK"] == "0":
        store, address = _create(environ, timeout)
        attempt = uuid.uuid4().hex
        store.set(attempt, "1")
        launchers.set(ADDRESS, f"{address} {store.port} {attempt}")
    else:
        store, address = _find(launchers, timeout)
    _kept.append(store)
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = address, str(store.port)


def _create(environ: MutableMapping[str, str], timeout: timedelta) -> tuple[dist.TCPStore, str]:
    """Create a store on this host's external address and a free port. Returns the store and its address.

    The external address is the local end of the route to the launcher's store.
    """
    launchers = environ["MASTER_ADDR"]
    with socket.create_connection((launchers, int(environ["MASTER_PORT"])), timeout.total_seconds()) as route:
        family, own = route.family, str(route.getsockname()[0])
    address = listen_on = own
    if ipaddress.ip_address(own).is_loopback:
        # a host's own name often resolves to its loopback here, and to its external address on other hosts
        address = launchers
        listen_on = own if environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"] else ""
    listener = socket.create_server((listen_on, 0), family=family)
    port, fd = listener.getsockname()[1], listener.detach()
    store = dist.TCPStore(own, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)
    return store, address


def _find(launchers: dist.TCPStore, timeout: timedelta) -> tuple[dist.TCPStore, str]:
    """Find rank 0's store and its address. Connecting to a store of an earlier attempt fails."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        address, port, attempt = launchers.get(ADDRESS).decode().split()
        with suppress(OSError, RuntimeError):  # no server, or not a store
            socket.create_connection((address, int(port)), timeout=1).close()  # a `TCPStore` retries longer, and logs
            store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
            if store.check([attempt]):
                return store, address
        if time.monotonic() > deadline:
            raise TimeoutError(f"Rank 0's store was not found: the last address was {address}:{port}.")
        time.sleep(0.05)


def wait_for_connections(timeout: timedelta) -> None:
    """Make rank 0 wait after it has created the process group, until all other processes have created theirs.

    They read rank 0's store for this. If a user's error ended rank 0 earlier, they would report a different error.
    """
    if _kept and dist.is_initialized():
        if dist.get_rank() == 0:
            _kept[0].wait([ALL_CONNECTED], timeout)
        elif _kept[0].add(CONNECTED, 1) == dist.get_world_size() - 1:
            _kept[0].set(ALL_CONNECTED, "1")
