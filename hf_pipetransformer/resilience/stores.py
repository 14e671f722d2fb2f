"""Stores of a job's own, over which its processes find one another.

`torchrun` and `accelerate launch` keep one store for all attempts of a job. When they start it again, the processes
read in it where those of the attempt before could be reached, and never come together. So rank 0 keeps a new store in
each attempt, and only its address goes through the launcher's.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

ADDRESS = "hf_pipetransformer/store"
"""Where rank 0 writes the address, in the launcher's store. What an attempt before has left may be there, too."""
ATTEMPT = "attempt"
"""In the new store: which attempt it belongs to."""
CONNECTED, ALL_CONNECTED = "connected", "all connected"
TRY = timedelta(seconds=5)

_kept: list[dist.TCPStore] = []  # a store lives as long as its object


def own_address(towards: str | None) -> str:
    """The address that others reach this host by: the one it has on the way to `towards`, an address or a name."""
    towards = towards or "localhost"
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                own = str(probe.getsockname()[0])
                # a host's own name often leads to its loopback; by that name others reach it all the same
                return towards if own.startswith("127.") or own == "::1" else own
    return socket.getfqdn()


def keep_store(timeout: timedelta) -> dist.TCPStore:
    """A new store in this process, on a port of the system's choice."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def use_fresh_store(environ: MutableMapping[str, str], timeout: timedelta) -> None:
    """Let the process group be made over a store of this attempt alone; `wait_for_connections` when it has been.

    Collective over all processes of a launcher.

    Nothing is done if there is a process group already, or no launcher that keeps a store.

    Args:
        environ: of the process; `MASTER_ADDR` and `MASTER_PORT` are changed.
        timeout: how long the others wait for rank 0.

    Raises:
        ValueError: the launcher has given port 0.
        TimeoutError: rank 0 was not there in time; or torch's own error of a store, where it never was.
    """
    if "RANK" in environ and environ.get("MASTER_PORT") == "0" and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "MASTER_PORT=0: the processes cannot find one another by it, and would wait in vain. Give torchrun a free"
            " port (--master_port 29501), or let it choose one (--standalone, or --rdzv-backend=c10d"
            " --rdzv-endpoint=localhost:0)."
        )
    is_launched = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if not is_launched or int(environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_available() or dist.is_initialized():
        return
    if _kept:  # this process has been here, and its process group is gone
        return
    launchers = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if environ["RANK"] == "0":
        store, attempt = keep_store(timeout), uuid.uuid4().hex
        store.set(ATTEMPT, attempt)
        address = own_address(environ["MASTER_ADDR"])
        launchers.set(ADDRESS, f"{address} {store.port} {attempt}")
        port = str(store.port)
    else:
        store, address, port = _find_store(launchers, time.monotonic() + timeout.total_seconds())
    _kept.append(store)
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = address, port


def wait_for_connections(timeout: timedelta) -> None:
    """After the process group has been made: rank 0 does not go on before all others have made theirs.

    They read its store for that. If an error of the user's ended rank 0 first, they would have another one.
    """
    if not _kept or not dist.is_initialized():
        return
    (store,) = _kept
    if dist.get_rank() > 0 and store.add(CONNECTED, 1) == dist.get_world_size() - 1:
        store.set(ALL_CONNECTED, "1")
    elif dist.get_rank() == 0:
        store.wait([ALL_CONNECTED], timeout)


def _find_store(launchers: dist.TCPStore, deadline: float) -> tuple[dist.TCPStore, str, str]:
    """Rank 0's store: an address that an attempt before has left leads nowhere."""
    while True:
        address, port, attempt = launchers.get(ADDRESS).decode().split()
        try:
            socket.create_connection((address, int(port)), timeout=1).close()  # a store tries for longer, and aloud
            store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=TRY)
            if store.check([ATTEMPT]) and store.get(ATTEMPT).decode() == attempt:
                return store, address, port
        except (OSError, RuntimeError):  # nobody there, or no store
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"Rank 0's store was not found: the last address was {address}:{port}.")
        time.sleep(0.05)
