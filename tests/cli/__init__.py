"""The command line, from the outside: flags, files, exit codes, messages."""
