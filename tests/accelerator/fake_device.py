"""A device over the CPU's memory that shows what an accelerator would: `fake_device.cpp`, built and registered.

    library = fake_device.build()                       once, in the test's process
    fake_device.register(library)                       in a rank that has not used a device yet
    torch.ones(2, device="fake") + torch.ones(2)        RuntimeError: Expected all tensors to be on the same device

A rank chooses it as its device if `ACCELERATE_TORCH_DEVICE` is "fake:0" (`ENVIRONMENT`). Operations that would
make the program wait for an accelerator are counted, with the line that asked for each:

    item                  a value is read on the CPU: `.item()`, `bool(tensor)`, `float(tensor)`
    to_device             a blocking copy from the CPU
    from_device           a blocking copy to the CPU
    wait                  the size of a result depends on values: `nonzero`, `equal`, a mask
    mismatch              tensors of several devices in one operation, which is an error
    race                  a stream uses memory without having waited for the stream that used it last
    freed_in_use          memory is freed that another stream has used, without `record_stream`

Copies that do not block, from or to pinned memory, are counted as `to_device_asynchronously` and
`from_device_asynchronously`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("fake_device.cpp")
MODULE = "fake_device_library"  # as in the source
ENVIRONMENT = {"ACCELERATE_TORCH_DEVICE": "fake:0"}
ERRORS = ("mismatch", "race", "freed_in_use")
COUNTED = ("item", "to_device", "from_device", "wait", *ERRORS)
PACKAGES = ("/hf_pipetransformer/", "/transformers/", "/accelerate/", "/torch/optim/", "/torch/nn/utils/")

_library: Any = None
sites: Counter[tuple[str, str]] = Counter()
"""How often each line has asked for what."""
errors: list[str] = []
"""The lines that have mixed devices or streams, also where somebody caught the error."""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Return the library, which is compiled the first time (a minute) and then kept among temporary files."""
    facts = (SOURCE.read_bytes(), torch.__version__.encode(), sys.version.encode())
    name = f"{MODULE}-{os.getuid()}-{hashlib.sha256(b''.join(facts)).hexdigest()[:16]}"
    library = Path(tempfile.gettempdir()) / f"{name}.so"
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait for the first one
        if not library.exists():
            root = Path(torch.__file__).parent
            includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
            made = library.with_suffix(f".{os.getpid()}")
            command = [str(compiler()), "-std=c++20", "-O0", "-w", "-fPIC", "-shared", *(f"-I{i}" for i in includes)]
            command += [str(SOURCE), "-o", str(made), f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
            command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
            subprocess.run(command, check=True, timeout=1200)
            made.replace(library)
    return library


class _Module(types.ModuleType):
    """What torch asks of a device's module (`torch.fake`)."""

    def __init__(self) -> None:
        super().__init__("torch.fake")

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass  # its kernels draw from the CPU's generator

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return int(_library.allocated())

    def max_memory_allocated(self, device: Any = None) -> int:
        return int(_library.peak())

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _library.reset_peak()


def register(path: Path) -> None:
    """Make "fake" a device of this process, for the rest of its life."""
    global _library
    specification = importlib.util.spec_from_file_location(MODULE, path)
    assert specification is not None and specification.loader is not None
    _library = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(_library)
    torch.utils.rename_privateuse1_backend("fake")
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module("fake", _Module())
    _library.set_hook(_note)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.Generator = _generator_class()  # type: ignore[misc]
    _save_from_the_cpu()


def is_registered() -> bool:
    return _library is not None


def as_cpu(value: Any) -> Any:
    """A tensor of the device as one of the CPU, with the same memory; other values as they are."""
    return _library.as_cpu(value) if isinstance(value, torch.Tensor) and value.device.type == "fake" else value


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what happens inside; the counts are there once the context is left."""
    counted: Counter[str] = Counter()
    _library.reset()
    sites.clear()
    yield counted
    counted.update({name: number for name, number in _library.counts().items() if number})


def _note(what: str) -> None:
    if what in ERRORS:
        errors.append(f"{what}: {site()}")
    if what in COUNTED:
        sites[what, site()] += 1


def site() -> str:
    """The innermost line in `PACKAGES`, and the line of this package that led to it."""
    frame, innermost = sys._getframe(2), None
    while frame is not None:
        file = frame.f_code.co_filename
        if any(package in file for package in PACKAGES):
            line = f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
            innermost = innermost or line
            if "/hf_pipetransformer/" in file:
                return line if line == innermost else f"{innermost} <- {line}"
        frame = frame.f_back
    return innermost or "elsewhere"


def _generator_class() -> type:
    real = torch.Generator

    class Generator(real):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return real.__new__(cls, "cpu")

    return Generator


def _save_from_the_cpu() -> None:
    """`torch.save` cannot read a storage of this device."""
    import torch.utils._pytree as pytree

    save = torch.save

    def copied(one: Any) -> Any:
        return one.cpu() if isinstance(one, torch.Tensor) and one.device.type == "fake" else one

    def save_from_the_cpu(value: Any, *args: Any, **kwargs: Any) -> None:
        on_cpu = pytree.tree_map(
            lambda v: v.cpu() if isinstance(v, torch.Tensor) and v.device.type == "fake" else v, value
        )
        save(on_cpu, *args, **kwargs)

    torch.save = save_from_the_cpu
