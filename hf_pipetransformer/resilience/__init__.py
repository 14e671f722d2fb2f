"""Start and exit of the processes of a job: the store that connects them, and their shutdown."""
