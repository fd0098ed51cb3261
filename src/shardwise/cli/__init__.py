"""One module per sub-command, no logic. Modules import heavy rooms inside their functions, so `--help` stays quick."""
