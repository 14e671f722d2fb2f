"""How much of mapped files is in this process's memory."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(files: Path) -> int:
    """Bytes of the mappings of a file, or of those in a folder, that are in this process's memory."""
    total, is_one = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):  # a mapping's addresses, permissions, ..., and its file
            path = Path(line.split(maxsplit=5)[-1])
            is_one = path == files or files in path.parents
        elif first == "Rss:" and is_one:
            total += int(line.split()[1]) * 1024
    return total
