"""The report of a training: reading its records and creating an HTML page from them."""
