"""Outputs of modules that the user has frozen and that are fed by the batch alone, stored and read in later epochs."""
