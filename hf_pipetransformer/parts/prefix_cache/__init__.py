"""The cache of frozen layers' outputs: one epoch stores them on disk, later epochs read them."""
