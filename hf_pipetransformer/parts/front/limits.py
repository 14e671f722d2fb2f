"""Numbers by which a front is looked for, kept and closed."""

LEAST_SHARE = 0.05
"""Minimum share of the forward pass for a front to be stored with `activation_cache="auto"`."""
READS_TO_JUDGE = 5
"""Number of read calls before the times of reading and computing are compared."""
CALLS_TO_MISS = 16
"""Number of calls without any stored sample, after which the inputs are assumed to change from epoch to epoch."""
MOST_OF_IT = 0.25
"""Minimum share of the forward pass of a stored part for which the log reports the whole frozen module as stored."""
MOST_OPENED = 3
"""Maximum number of searches inside modules that cannot be stored as a whole."""
MOST_UNREAD = 0.1
"""Share of the store's space that may be filled before the first sample is found."""
MOST_SEARCHES = 5
"""Maximum number of searches for the front: each change of `requires_grad` starts one."""
