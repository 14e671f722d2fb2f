"""The watchdog: if a process dies or hangs, the other processes log its rank and exit."""
