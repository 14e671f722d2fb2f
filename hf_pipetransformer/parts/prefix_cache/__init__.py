"""The outputs of layers that a freeze policy has frozen, stored on disk and read in later epochs."""
